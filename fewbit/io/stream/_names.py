"""Names of other people's tensors as paths of parameters: regular expressions, in order.

An entry is `(pattern, replacement)` or `(pattern, replacement, axes)`. The first pattern that
matches a whole name decides; a replacement of None leaves the tensor out. A word in braces stands
for a number: `{i}` in both keeps it, `{i}` in the pattern alone stacks the tensors along a new
first axis, in order. `axes` says how the source is turned: `'T'` (the last two axes exchanged) or a
permutation such as `(1, 0)`; `()` leaves it as it lies. Names that no pattern matches keep theirs,
with `/` for `.`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fewbit._util import Pattern, PatternError, compile_pattern, nearest
from fewbit.io._errors import CheckpointError

_NUMBER = re.compile(r"\{([a-zA-Z_]\w*)\}")

_MSG_ENTRY = (
    "names takes a list of (pattern, replacement) or (pattern, replacement, axes), and entry "
    "{number} is {found!r}. An example: (r'model\\.layers\\.{{i}}\\.(.*)\\.weight', "
    "r'layers/{{i}}/\\1/kernel', 'T')."
)
_MSG_PATTERN = "names: {pattern!r} is no regular expression ({reason})."
_MSG_REPLACEMENT = "names: {replacement!r} does not fit the pattern {pattern!r} ({reason})."
_MSG_AXES = (
    "names: the axes of {pattern!r} are {found!r}. Write 'T' for a transpose, a permutation such "
    "as (1, 0), or () to leave the tensor as it lies."
)
_MSG_TWICE = "has two tensors for {target!r}, {first!r} and {second!r}"
_FIX_TWICE = "Change names=... so that each gets a path of its own, or leave one out with None."
_MSG_UNUSED = (
    "names: nothing in the checkpoint matches {pattern!r}.{near} Its names are like {some}."
)
_MSG_NAME = "cannot be mapped by names ({reason})"
_MSG_GAP = "has no {name!r}, which {target!r} stacks"


@dataclass(frozen=True)
class NameRule:
    """One entry of `names`, compiled."""

    pattern: str
    compiled: Pattern
    replacement: str | None
    axes: str | tuple[int, ...] | None
    stacked: tuple[str, ...]  # the numbers that become leading axes, outermost first


@dataclass(frozen=True)
class Target:
    """A path and the tensors that it is made of: one, or a grid of them to be stacked."""

    path: str
    sources: tuple[str, ...]
    stack: tuple[int, ...] = ()  # the lengths of the stacked axes
    axes: str | tuple[int, ...] | None = None  # None: nothing was said


def compile_names(names: Iterable[Sequence[Any]] | None) -> tuple[NameRule, ...]:
    """The entries, checked.

    >>> compile_names([('wte', 'embed')])[0].replacement
    'embed'
    """
    return tuple(_compiled(number, entry) for number, entry in enumerate(names or ()))


def map_names(
    path: str,
    sources: Sequence[str],
    names: Iterable[Sequence[Any]] | None,
    known: Collection[str] = (),
) -> tuple[Target, ...]:
    """What each parameter is made of, in the order in which the sources come first.

    A name that is `known` as a path already stays as it is.

    >>> rules = [(r'h\\.{i}\\.(\\w+)\\.weight', r'layers/\\1/kernel', 'T'), (r'.*\\.rope', None)]
    >>> found = map_names('a', ['h.0.up.weight', 'h.1.up.weight', 'h.0.rope', 'norm.scale'], rules)
    >>> found[0]
    Target(path='layers/up/kernel', sources=('h.0.up.weight', 'h.1.up.weight'), stack=(2,),
           axes='T')
    >>> found[1].path
    'norm/scale'
    """
    rules = compile_names(names)
    used: set[str] = set()
    grids: dict[str, dict[tuple[int, ...], str]] = {}
    axes: dict[str, Any] = {}
    for source in sources:
        try:
            found = _mapped(source, rules, known)
        except ValueError as error:  # a number of thousands of digits, a name of thousands of words
            raise CheckpointError(path, _MSG_NAME.format(reason=error), tensor=source) from None
        if found is None:
            continue
        target, index, rule = found
        if rule is not None:
            used.add(rule.pattern)
            axes[target] = rule.axes
        grid = grids.setdefault(target, {})
        if index in grid or (grid and len(next(iter(grid))) != len(index)):
            first = grid.get(index, next(iter(grid.values())))
            what = _MSG_TWICE.format(target=target, first=first, second=source)
            raise CheckpointError(path, what, fix=_FIX_TWICE)
        grid[index] = source
    dropped = {rule.pattern for rule in rules if rule.replacement is None}
    for rule in rules:
        if rule.pattern not in used | dropped:
            words = re.sub(r"\\(.)", r"\1", rule.pattern)
            near = nearest(words, sources, " The nearest are {}.", 2, show=str)
            some = ", ".join(sources[:3]) or "none at all"
            raise ValueError(_MSG_UNUSED.format(pattern=rule.pattern, near=near, some=some))
    return tuple(_target(path, name, grid, axes.get(name)) for name, grid in grids.items())


def _mapped(
    source: str, rules: tuple[NameRule, ...], known: Collection[str]
) -> tuple[str, tuple[int, ...], NameRule | None] | None:
    fitting = (rule for rule in rules if rule.compiled.fullmatch(source))
    rule = next(fitting, None)
    if rule is None:
        return source if source in known else source.replace(".", "/"), (), None
    if rule.replacement is None:
        return None
    match: Any = rule.compiled.fullmatch(source)
    target = match.expand(_NUMBER.sub(lambda m: str(match[m[1]]), rule.replacement))
    return target, tuple(int(match[name]) for name in rule.stacked), rule


def _target(
    path: str, name: str, grid: dict[tuple[int, ...], str], axes: str | tuple[int, ...] | None
) -> Target:
    if list(grid) == [()]:
        return Target(name, (grid[()],), (), axes)
    lengths = tuple(max(column) + 1 for column in zip(*grid, strict=True))
    sources = []
    for index in itertools.product(*map(range, lengths)):
        if index not in grid:
            some = next(iter(grid.values()))
            what = _MSG_GAP.format(name=f"number {index} beside {some}", target=name)
            raise CheckpointError(path, what, expected=f"{lengths} tensors", found=len(grid))
        sources.append(grid[index])
    return Target(name, tuple(sources), lengths, axes)


def _compiled(number: int, entry: Any) -> NameRule:
    parts = tuple(entry) if isinstance(entry, (tuple, list)) else ()
    known = len(parts) in (2, 3) and isinstance(parts[0], str)
    if not known or not isinstance(parts[1], str | None):
        raise TypeError(_MSG_ENTRY.format(number=number, found=entry))
    pattern, replacement = parts[:2]
    try:
        compiled = compile_pattern(_NUMBER.sub(lambda m: rf"(?P<{m[1]}>\d+)", pattern))
    except PatternError as error:
        raise ValueError(f"names: {error}.") from None
    except re.error as error:
        raise ValueError(_MSG_PATTERN.format(pattern=pattern, reason=error)) from None
    kept = set(_NUMBER.findall(replacement or ""))
    unknown = kept - set(compiled.compiled.groupindex)
    if unknown:
        raise _misfit(replacement, pattern, f"it has no {{{unknown.pop()}}}")
    stacked: tuple[str, ...] = ()
    if replacement is not None:
        replacement = _renumbered(pattern, replacement, compiled.compiled)
        stacked = tuple(name for name in _NUMBER.findall(pattern) if name not in kept)
    axes = _axes(pattern, parts[2]) if len(parts) == 3 else None
    return NameRule(pattern, compiled, replacement, axes, stacked)


def _misfit(replacement: str, pattern: str, reason: str) -> ValueError:
    what = _MSG_REPLACEMENT.format(replacement=replacement, pattern=pattern, reason=reason)
    return ValueError(what)


def _renumbered(pattern: str, replacement: str, compiled: re.Pattern[str]) -> str:
    """The replacement with `\\1` as the first group that is not a number in braces."""
    braces = {compiled.groupindex[name] for name in _NUMBER.findall(pattern)}
    own = [group for group in range(1, compiled.groups + 1) if group not in braces]

    def real(reference: re.Match[str]) -> str:
        number = int(reference[1])
        if not 0 < number <= len(own):
            raise _misfit(replacement, pattern, f"the pattern has {len(own)} groups")
        return rf"\g<{own[number - 1]}>"

    return re.sub(r"\\(\d+)", real, replacement)


def _axes(pattern: str, axes: Any) -> str | tuple[int, ...] | None:
    if axes is None or axes == "T":
        return axes
    if isinstance(axes, (tuple, list)) and sorted(axes) == list(range(len(axes))):
        return tuple(int(axis) for axis in axes)
    raise ValueError(_MSG_AXES.format(pattern=pattern, found=axes))


def turned(shape: Sequence[int], axes: str | tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The permutation of an array of this shape, None where nothing moves.

    >>> turned((2, 3, 4), 'T'), turned((2, 3), ()), turned((3,), 'T')
    ((0, 2, 1), None, None)
    """
    rank = len(shape)
    if axes == "T":
        return (*range(rank - 2), rank - 1, rank - 2) if rank > 1 else None
    if not axes:
        return None
    if len(axes) != rank:
        raise ValueError(f"axes {axes} do not fit an array of shape {tuple(shape)}.")
    return tuple(int(axis) for axis in axes)
