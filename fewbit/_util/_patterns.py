"""Regular expressions that cannot run away, whoever wrote them.

Rules, configs and names match short paths, but their patterns come out of files too, and `re` may
take years for `(a+)+$`. Where a pattern has few ways to match a text, `re` does it; where it has
many, the machine below, which never tries the same place of pattern and text twice: its steps are
at most the product of their lengths. It prefers what `re` prefers.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

MOST_LENGTH = 50_000  # of a pattern
MOST_DEPTH = 60  # of its groups
MOST_WORDS = 10_000  # of a pattern whose counted repetitions are written out
MOST_STEPS = 1_000_000  # words of the pattern times characters of the text
_FEW_WAYS = 250_000  # that `re` may try
_COUNTLESS = 1e9
_MOST_RANGES = 20

_FLAGS = {"a": re.A, "i": re.I, "m": re.M, "s": re.S}
_LOOKS = {"=": (True, False), "!": (True, True), "<=": (False, False), "<!": (False, True)}
_NUMBERED = {"x": 2, "u": 4, "U": 8}
_COUNT = re.compile(r"\{(?:(\d*),(\d*)|(\d+))\}", re.A)
_OCTAL = re.compile(r"0[0-7]{0,2}|[0-3][0-7]{2}")
_WIDE_RANGE = re.compile(r"-(?:\\[uUN]|[^\x00-\xff])")

_MSG_LONG = f"it is longer than {MOST_LENGTH} characters"
_MSG_RANGES = f"it has more than {_MOST_RANGES} ranges of characters beyond Latin-1"
_MSG_WORDS = (
    f"its repetitions come to more than {MOST_WORDS} parts when they are written out; use '*' or "
    "'+' for the large ones"
)
_MSG_NESTED = "it is nested too deeply"
_MSG_EMPTY = "a group stands in a look-ahead, or in a repetition of what may be empty"
_MSG_REFUSED = "the pattern {pattern} cannot be matched within a bound: {why}"
_MSG_TEXT = (
    "the pattern {pattern} takes too many steps for a name of {length} characters ({text}); make "
    "one of the two shorter"
)
_MSG_BACK = (
    "it refers back to what a group has read ({found}), for which no number of steps is enough"
)
_MSG_ATOMIC = "it has {found}, which never goes back; leave out the {sign}"
_MSG_VERBOSE = "it has the flag 'x'; write it in one line"
_MSG_DEEP = f"its groups are more than {MOST_DEPTH} deep"


class Unbounded(ValueError):
    """What a pattern has that cannot be matched within a bound."""


class PatternError(ValueError):
    """A regular expression that is none, or that has no bound."""


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: `matches` whole texts, their beginning, or any part of them.

    >>> compile_pattern('(a+)+b').matches('a' * 60), compile_pattern('h/.*').matches('h/0')
    (False, True)
    """

    text: str
    compiled: re.Pattern[str]
    tree: Node

    def matches(self, text: str, where: str = "whole") -> bool:
        """Whether the text matches: as a 'whole', from its 'start', or 'anywhere'."""
        if self._cheap(text, where):
            method = {"whole": "fullmatch", "start": "match", "anywhere": "search"}[where]
            return getattr(self.compiled, method)(text) is not None
        return self._machine(text).run(where) is not None

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """As that of `re`: a match with the groups of the whole text."""
        if self._cheap(text, "whole"):
            return self.compiled.fullmatch(text)
        if _remembers_nothing(self.tree):
            raise PatternError(_MSG_REFUSED.format(pattern=_short(self.text), why=_MSG_EMPTY))
        places = self._machine(text).run("whole", self.compiled.groups)
        return None if places is None else _as_match(self.compiled, text, places)

    def _cheap(self, text: str, where: str) -> bool:
        places = len(text) + 1 if where == "anywhere" else 1
        if len(text) not in self._ways:
            self._ways[len(text)] = ways(self.tree, len(text))
        return self._ways[len(text)] * places <= _FEW_WAYS

    def _machine(self, text: str) -> _Machine:
        if len(self._program) * (len(text) + 1) > MOST_STEPS:
            facts = dict(pattern=_short(self.text), text=_short(text), length=len(text))
            raise PatternError(_MSG_TEXT.format(**facts))
        return _Machine(self._program, text)

    @functools.cached_property
    def _ways(self) -> dict[int, float]:
        return {}

    @functools.cached_property
    def _program(self) -> tuple[Word, ...]:
        words: list[Word] = []
        _write(self.tree, words)
        return (*words, ("end",))


@functools.lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """The pattern, if it is one and can be matched within a bound.

    `re.error` is what `re` says of a mistake; a `PatternError` names what has no bound.

    >>> compile_pattern(r'(a)\\1')
    Traceback (most recent call last):
    ...
    fewbit._util._patterns.PatternError: the pattern '(a)\\\\1' cannot be matched within a bound: it
    refers back to what a group has read (\\1), for which no number of steps is enough
    """
    try:
        if len(text) > MOST_LENGTH:
            raise Unbounded(_MSG_LONG)
        # `re` lists the characters of such ranges one by one.
        if "[" in text and len(_WIDE_RANGE.findall(text)) > _MOST_RANGES:
            raise Unbounded(_MSG_RANGES)
        compiled = re.compile(text)
        tree = parse(text)
        if _size(tree) > MOST_WORDS:
            raise Unbounded(_MSG_WORDS)
    except (Unbounded, RecursionError, OverflowError) as error:
        why = _MSG_NESTED if isinstance(error, RecursionError) else error
        raise PatternError(_MSG_REFUSED.format(pattern=_short(text), why=why)) from None
    return Pattern(text, compiled, tree)


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}..."


def _as_match(
    compiled: re.Pattern[str], text: str, places: tuple[int | None, ...]
) -> re.Match[str]:
    """A match of `re` with these groups, numbers and names, for `expand` and indexing."""
    names = {number: f"?P<{name}>" for name, number in compiled.groupindex.items()}
    source, parts = "", []
    for number in range(1, compiled.groups + 1):
        begin, end = places[2 * number - 2], places[2 * number - 1]
        if begin is None or end is None:
            source += f"(?:({names.get(number, '')}(?!))|)"
        else:
            source += f"({names.get(number, '')}.{{{end - begin}}})"
            parts.append(text[begin:end])
    found = re.compile(source, re.S).fullmatch("".join(parts))
    assert found is not None
    return found


# --- Patterns as trees: the part of the syntax of `re` whose matching has a bound -----------------


@dataclass(frozen=True)
class Text:
    """Characters as they stand."""

    text: str


@dataclass(frozen=True)
class One:
    """One character of a kind (`width` 1), or a place between two (`width` 0), in `re`'s words."""

    source: str
    flags: int
    width: int = 1


@dataclass(frozen=True)
class Group:
    """A part that is remembered by number."""

    inner: Node
    number: int


@dataclass(frozen=True)
class Look:
    """Something that must, or must not, follow or come before."""

    inner: Node
    ahead: bool
    negative: bool


@dataclass(frozen=True)
class Repeat:
    """A part `low` to `high` times (None: any number), as often or as rarely as possible."""

    inner: Node
    low: int
    high: int | None
    lazy: bool


@dataclass(frozen=True)
class Seq:
    """One after another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """The first that leads to a match."""

    parts: tuple[Node, ...]


Node = Text | One | Group | Look | Repeat | Seq | Either


def parse(pattern: str) -> Node:
    """The tree of a pattern that `re` compiles; `Unbounded` says what stands in the way.

    >>> parse('a(b|c)*')
    Seq(parts=(Text(text='a'), Repeat(inner=Group(inner=Either(parts=(Text(text='b'),
    Text(text='c'))), number=1), low=0, high=None, lazy=False)))
    >>> parse(r'(a)\\1')
    Traceback (most recent call last):
    ...
    fewbit._util._patterns.Unbounded: it refers back to what a group has read (\\1), for which no...
    """
    return _Parser(pattern).alternatives(0, 0)


class _Parser:
    """Believes that `re` compiles the pattern, and says nothing of mistakes."""

    def __init__(self, pattern: str):
        self.pattern, self.at, self.groups = pattern, 0, 0

    def alternatives(self, flags: int, depth: int) -> Node:
        if depth > MOST_DEPTH:
            raise Unbounded(_MSG_DEEP)
        parts = []
        while True:
            part, flags = self._sequence(flags, depth)
            parts.append(part)
            if not self._take("|"):
                return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self, flags: int, depth: int) -> tuple[Node, int]:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            if self._repeated(parts):
                continue
            found = self._item(flags, depth)
            if isinstance(found, int):  # flags of the whole pattern
                flags = found
            elif found is not None:
                parts.append(found)
        joined = _joined(parts)
        return joined[0] if len(joined) == 1 else Seq(tuple(joined)), flags

    def _repeated(self, parts: list[Node]) -> bool:
        """Wrap the last part in the repetition that stands here, if one does."""
        sign = self.pattern[self.at]
        bounds: tuple[int, int | None]
        if sign in "*+?":
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            self.at += 1
        else:
            count = _COUNT.match(self.pattern, self.at) if sign == "{" else None
            if count is None:
                return False
            if count[3] is not None:
                bounds = (int(count[3]), int(count[3]))
            else:
                bounds = (int(count[1] or 0), int(count[2]) if count[2] else None)
            self.at = count.end()
        lazy = self._take("?")
        if not lazy and self._take("+"):
            raise Unbounded(_MSG_ATOMIC.format(found=f"'{sign}+'", sign="'+'"))
        parts.append(Repeat(parts.pop(), *bounds, lazy))
        return True

    def _item(self, flags: int, depth: int) -> Node | int | None:
        begin, char = self.at, self.pattern[self.at]
        self.at += 1
        if char == "(":
            return self._group(flags, depth)
        if char == "[":
            self.at += self.pattern[self.at] == "^"
            self.at += self.pattern[self.at] == "]"
            while self.pattern[self.at] != "]":
                self.at += 2 if self.pattern[self.at] == "\\" else 1
            self.at += 1
        elif char == "\\":
            return self._escape(flags)
        elif char not in ".^$":
            return One(re.escape(char), flags) if flags & re.I else Text(char)
        return One(self.pattern[begin : self.at], flags, 0 if char in "^$" else 1)

    def _escape(self, flags: int) -> Node:
        begin, char = self.at - 1, self.pattern[self.at]
        octal = _OCTAL.match(self.pattern, self.at)
        if octal is not None:
            self.at = octal.end()
        elif char.isdecimal():
            raise Unbounded(_MSG_BACK.format(found=f"\\{char}"))
        elif char == "N":
            self.at = self.pattern.index("}", self.at) + 1
        else:
            self.at += 1 + _NUMBERED.get(char, 0)
        if not char.isascii() or not char.isalnum():
            return One(re.escape(char), flags) if flags & re.I else Text(char)
        return One(self.pattern[begin : self.at], flags, 0 if char in "AbBZz" else 1)

    def _group(self, flags: int, depth: int) -> Node | int | None:
        named = self._take("?P<")
        if named:
            self.at = self.pattern.index(">", self.at) + 1
        if named or not self._take("?"):
            self.groups += 1
            number = self.groups
            return Group(self._closed(flags, depth), number)
        if self._take("#"):
            self.at = self.pattern.index(")", self.at) + 1
            return None
        for sign, (ahead, negative) in _LOOKS.items():
            if self._take(sign):
                return Look(self._closed(flags, depth), ahead, negative)
        if self._take(">"):
            raise Unbounded(_MSG_ATOMIC.format(found="'(?>'", sign="'?>'"))
        if self.pattern.startswith(("P=", "("), self.at):
            end = self.pattern.index(")", self.at) + 1
            raise Unbounded(_MSG_BACK.format(found=f"(?{self.pattern[self.at : end][:40]}"))
        return self._flags(flags, depth)

    def _flags(self, flags: int, depth: int) -> Node | int:
        off = False
        while (char := self.pattern[self.at]) not in ":)":
            if char == "x":
                raise Unbounded(_MSG_VERBOSE)
            bit = _FLAGS.get(char, 0)
            flags = flags & ~bit if off else flags | bit
            off = off or char == "-"
            self.at += 1
        self.at += 1
        return int(flags) if char == ")" else self._closed(flags, depth)

    def _closed(self, flags: int, depth: int) -> Node:
        inner = self.alternatives(flags, depth + 1)
        self.at += 1  # the parenthesis that closes it
        return inner

    def _take(self, sign: str) -> bool:
        here = self.pattern.startswith(sign, self.at)
        self.at += len(sign) * here
        return here


def _joined(parts: list[Node]) -> list[Node]:
    """Characters that follow each other as one text."""
    result: list[Node] = []
    for part in parts:
        if isinstance(part, Text) and result and isinstance(result[-1], Text):
            result[-1] = Text(result[-1].text + part.text)
        else:
            result.append(part)
    return result


# --- How much a pattern may cost `re` -------------------------------------------------------------


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly inside."""
    if isinstance(node, Seq | Either):
        return node.parts
    return () if isinstance(node, Text | One) else (node.inner,)


def width(node: Node) -> int:
    """The fewest characters that a node takes.

    >>> width(parse('a{2,}(bc|d)(?=x)'))
    3
    """
    if isinstance(node, Text):
        return len(node.text)
    if isinstance(node, One):
        return node.width
    if isinstance(node, Look):
        return 0
    if isinstance(node, Repeat):
        return node.low * width(node.inner)
    inner: Any = map(width, children(node))
    return min(inner) if isinstance(node, Either) else sum(inner)


def ways(node: Node, length: int) -> float:
    """At most so many ways a node has to match at one place of a text: what `re` may try.

    >>> ways(parse('.*(attn|mlp).*'), 9), ways(parse('(a+)+'), 9)
    (200, inf)
    """
    found = _ways(node, [ways(child, length) for child in children(node)], length)
    return found if found < _COUNTLESS else math.inf


def _ways(node: Node, inner: list[float], length: int) -> float:
    if isinstance(node, Either):
        return sum(inner)
    if not isinstance(node, Repeat):
        return math.prod(inner)
    if node.high is not None and node.high <= 1:
        return inner[0] + (node.low != node.high)
    most = length if node.high is None else min(node.high, length)
    if inner[0] == 1 and width(node.inner):
        return most + 1
    return inner[0] ** (most + 1) if most < 9 and width(node.inner) else math.inf


# --- The machine ----------------------------------------------------------------------------------

# ('text', t), ('one', leaf), ('save', k), ('split', a, b), ('go', a), ('look', ...), ('end',)
Word = tuple[Any, ...]


def _remembers_nothing(node: Node) -> bool:
    """Whether a group is inside of what takes no characters, where `re` has its own ways."""
    inside = any(map(_remembers_nothing, children(node)))
    if isinstance(node, Look) or isinstance(node, Repeat) and not width(node.inner):
        return inside or _has_group(node)
    return inside


def _has_group(node: Node) -> bool:
    return isinstance(node, Group) or any(map(_has_group, children(node)))


def _size(node: Node) -> int:
    """The words of a node's program, before any is written."""
    inner = sum(map(_size, children(node)))
    if isinstance(node, Text | One):
        return 1
    if isinstance(node, Repeat):
        copies = max(node.low, 1) if node.high is None else node.high
        return copies * (inner + 1) + 2
    return inner + 2 * len(children(node))


def _write(node: Node, words: list[Word]) -> None:
    if isinstance(node, Text):
        words.append(("text", node.text))
    elif isinstance(node, One):
        words.append(("one", node))
    elif isinstance(node, Seq):
        for part in node.parts:
            _write(part, words)
    elif isinstance(node, Group):
        words.append(("save", 2 * node.number - 2))
        _write(node.inner, words)
        words.append(("save", 2 * node.number - 1))
    elif isinstance(node, Either):
        _write_either(node.parts, words)
    elif isinstance(node, Look):
        place = len(words)
        words.append(())
        _write(node.inner, words)
        words.append(("end",))
        back = 0 if node.ahead else width(node.inner)
        words[place] = ("look", place + 1, back, node.negative, len(words))
    else:
        _write_repeat(node, words)


def _write_either(parts: tuple[Node, ...], words: list[Word]) -> None:
    leaving = []
    for part in parts[:-1]:
        place = len(words)
        words.append(())
        _write(part, words)
        leaving.append(len(words))
        words.append(())
        words[place] = ("split", place + 1, len(words))
    _write(parts[-1], words)
    for place in leaving:
        words[place] = ("go", len(words))


def _write_repeat(node: Repeat, words: list[Word]) -> None:
    for _ in range(node.low):
        _write(node.inner, words)
    if node.high is None:
        place = len(words)
        words.append(())
        _write(node.inner, words)
        words.append(("go", place))
        _split(words, place, len(words), node.lazy)
        return
    skipping = []
    for _ in range(node.high - node.low):
        skipping.append(len(words))
        words.append(())
        _write(node.inner, words)
    for place in skipping:
        _split(words, place, len(words), node.lazy)


def _split(words: list[Word], place: int, out: int, lazy: bool) -> None:
    words[place] = ("split", out, place + 1) if lazy else ("split", place + 1, out)


class _Machine:
    """One program on one text. What a word led to at a place is known when it comes up again."""

    def __init__(self, program: tuple[Word, ...], text: str):
        self.program, self.text = program, text
        self._masks: dict[One, bytes] = {}
        # For each word and place: 0 not tried, 1 led to nothing, 2 led to the end.
        self._known = bytearray(len(program) * (len(text) + 1))

    def run(self, where: str, groups: int = 0) -> tuple[int | None, ...] | None:
        """The places of the groups' ends, None for no match."""
        starts = range(len(self.text) + 1) if where == "anywhere" else range(1)
        end = len(self.text) if where == "whole" else None
        found = (self._from(0, start, end, groups) for start in starts)
        return next((places for places in found if places is not None), None)

    def _from(
        self, word: int, at: int, end: int | None = None, groups: int = 0
    ) -> tuple[int | None, ...] | None:
        program, text, known, stride = self.program, self.text, self._known, len(self.text) + 1
        trail: list[int] = []
        nothing: tuple[int | None, ...] = (None,) * 2 * groups
        stack = [(word, at, nothing, 0)]
        while stack:
            word, at, places, length = stack.pop()
            del trail[length:]
            while True:
                place = word * stride + at
                if known[place]:
                    ended = known[place] == 2
                    break
                known[place] = 1
                trail.append(place)
                step = program[word]
                kind, ended = step[0], False
                word += 1
                if kind == "text":
                    if not text.startswith(step[1], at):
                        break
                    at += len(step[1])
                elif kind == "one":
                    if not self._mask(step[1])[at]:
                        break
                    at += step[1].width
                elif kind == "split":
                    stack.append((step[2], at, places, len(trail)))
                    word = step[1]
                elif kind == "go":
                    word = step[1]
                elif kind == "save":
                    if groups:
                        places = (*places[: step[1]], at, *places[step[1] + 1 :])
                elif kind == "look":
                    start = at - step[2]
                    there = start >= 0 and self._from(step[1], start) is not None
                    if there == step[3]:
                        break
                    word = step[4]
                else:
                    ended = end is None or at == end
                    break
            if ended:
                for place in trail:
                    known[place] = 2
                return places
        return None

    def _mask(self, leaf: One) -> bytes:
        """A 1 for each place of the text where the leaf matches."""
        if leaf not in self._masks:
            mask = bytearray(len(self.text) + 1)
            for found in re.compile(f"(?={leaf.source})", leaf.flags).finditer(self.text):
                mask[found.start()] = 1
            self._masks[leaf] = bytes(mask)
        return self._masks[leaf]
