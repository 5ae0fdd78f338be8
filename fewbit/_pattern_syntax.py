"""Regular expressions as trees: the part of Python's syntax whose matching has a bound.

What is left out remembers what it has read (`\\1`, `(?(1)...)`) or forbids itself to go back
(`(?>...)`, `a*+`), so that no number of steps bounds it, or is never needed for a name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

MOST_DEPTH = 60
_FLAGS = {"a": re.A, "i": re.I, "m": re.M, "s": re.S}
_COUNT = re.compile(r"\{(?:(\d*),(\d*)|(\d+))\}", re.A)
_OCTAL = re.compile(r"0[0-7]{0,2}|[0-3][0-7]{2}")
_COUNTLESS = 1e9
_NUMBERED = {"x": 2, "u": 4, "U": 8}

_MSG_BACK = (
    "it refers back to what a group has read ({found}), for which no number of steps is enough"
)
_MSG_ATOMIC = "it has {found}, which never goes back; leave out the {sign}"
_MSG_VERBOSE = "it has the flag 'x'; write it in one line"
_MSG_DEEP = f"its groups are more than {MOST_DEPTH} deep"


class Unbounded(ValueError):
    """What a pattern has that cannot be matched within a bound."""


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
    fewbit._pattern_syntax.Unbounded: it refers back to what a group has read (\\1), for which no...
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
        begin = self.at
        char = self.pattern[begin]
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
        if not self._take("?"):
            return self._numbered(flags, depth)
        if self._take("P<"):
            self.at = self.pattern.index(">", self.at) + 1
            return self._numbered(flags, depth)
        if self._take("#"):
            self.at = self.pattern.index(")", self.at) + 1
            return None
        for sign, ahead, negative in (
            *(("=", True, False), ("!", True, True)),
            *(("<=", False, False), ("<!", False, True)),
        ):
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

    def _numbered(self, flags: int, depth: int) -> Node:
        self.groups += 1
        number = self.groups
        return Group(self._closed(flags, depth), number)

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
