"""Memory that was freed and is still the process's, given back to the system.

glibc keeps what is freed for the next call, and of a model that gives up its floats layer by layer
that is most of the model: a float kernel is below the size that glibc takes from the system one by
one, and its successor, a quarter as large, rarely fits where it was.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_PARTS, _LEAST = 32, 2**24  # a call looks at every free block: so many calls, or fewer


def give_back() -> None:
    """Let the C library return whole pages that nobody uses, if it is one that can be asked to.

    >>> give_back()
    """
    _trim()(0)


def giving_back(items: Iterable[T], size: Callable[[T], int], total: int) -> Iterator[T]:
    """The items, while the memory that their user frees, `size` of each, is given back.

    >>> list(giving_back('abc', len, 3))
    ['a', 'b', 'c']
    """
    give_back()
    freed = 0
    for item in items:
        freed += size(item)
        yield item
        if freed >= max(total // _PARTS, _LEAST):
            give_back()
            freed = 0
    give_back()


class Leftovers:
    """What compiling leaves, given back once when the program that was compiled begins to run.

    Nobody is asked between the two, when somebody else's code compiles and runs a model: so layers
    say `expect` while they are traced, and `give_back` when they run.
    """

    def __init__(self) -> None:
        self._expected = False

    def expect(self) -> None:
        self._expected = True

    def give_back(self) -> None:
        if self._expected:
            self._expected = False
            give_back()


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return lambda padding: None
