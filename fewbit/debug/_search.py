"""Which of many suspects must go: group testing with few trials.

`enough(chosen)` tells whether taking these away cures the trouble. It is taken to be monotone (more
taken away is never worse). One culprit among n costs about 2 log2(n) trials, k culprits about
2k log2(n/k).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Enough = Callable[[Sequence[T]], bool]


def smallest_prefix(suspects: Sequence[T], enough: Enough[T]) -> int:
    """The least n for which the first n are enough; all of them are taken to be.

    >>> smallest_prefix('abcdefgh', lambda chosen: 'c' in chosen)
    3
    """
    low, high = 0, len(suspects)  # `low` is not enough, `high` is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(suspects[:middle]) else (middle, high)
    return high


def minimal_subset(suspects: Sequence[T], enough: Enough[T]) -> list[T]:
    """A subset that is enough and of which no part is; the suspects together are taken to be.

    Junker's QuickXplain: halve; what one half needs beside the other is found first.

    >>> minimal_subset('abcdefgh', lambda chosen: {'c', 'g'} <= set(chosen))
    ['c', 'g']
    """

    def needed(given: list[T], added: bool, rest: list[T]) -> list[T]:
        if added and enough(given):
            return []
        if len(rest) == 1:
            return rest
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        late = needed(given + first, True, second)
        early = needed(given + late, bool(late), first)
        return early + late

    return needed([], False, list(suspects)) if suspects else []


def guilty(suspects: Sequence[T], enough: Enough[T]) -> list[T]:
    """The few of `suspects`, likeliest first, that must be taken away.

    >>> tries = []
    >>> guilty(range(64), lambda chosen: tries.append(chosen) or 0 in chosen), len(tries)
    ([0], 6)
    """
    prefix = list(suspects[: smallest_prefix(suspects, enough)])
    # The last of the prefix is needed, or a shorter one would do.
    *others, last = prefix
    if not others:
        return prefix
    with_last = lambda chosen: enough([*chosen, last])  # noqa: E731
    if with_last([]):
        return [last]
    return [*minimal_subset(others, with_last), last]
