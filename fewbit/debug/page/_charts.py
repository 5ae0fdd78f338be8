"""What the page is built from: HTML elements, charts as inline SVG, tables. Colours are CSS."""

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewbit._util import human_bytes, human_count
from fewbit.debug._metrics import Distribution

# --- HTML built from values. Every string is escaped unless this module made it -------------------

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "input", "br", "hr"})


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """A value as text: nothing in it is markup, and nothing in it is unprintable.

    >>> text('<b>&'), text('a\\x00b')
    ('&lt;b&gt;&amp;', 'a\ufffdb')
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_CONTROL.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` and `data_value` are written as in HTML; None leaves an attribute out.

    >>> tag('td', '<up>', class_='name', data_value=3)
    '<td class="name" data-value="3">&lt;up&gt;</td>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def color_key(**meanings: str) -> Markup:
    """What the colours of a chart mean, by the names that page.css has for them.

    >>> color_key(before='float numbers')
    '<ul class="key"><li><i class="k-before"></i>float numbers</li></ul>'
    """
    items = [tag("li", tag("i", class_=f"k-{color}"), said) for color, said in meanings.items()]
    return tag("ul", items, class_="key")


def section(name: str, title: str, lead: str, *children: Any) -> Markup:
    """A part of the page: its heading, what to know before one looks at it, and the rest."""
    intro = tag("p", lead, class_="soft lead")
    return tag("section", tag("h2", title), intro, *children, id=name)


def join(*parts: Any) -> Markup:
    """Parts one after the other; lists are spread."""
    out = []
    for part in parts:
        if isinstance(part, list | tuple):
            out.append(join(*part))
        elif part is not None:
            out.append(text(part))
    return Markup("".join(out))


# --- Charts as inline SVG: a weight on its grid of codes, accuracy against bytes ------------------

Point = tuple[str, int, float]  # label, bytes, accuracy


def weight_histogram(d: Distribution, number: int) -> Markup:
    """Float numbers as an area, codes as bars on their grid, both in units of the scale."""
    width, height, base, top = 300, 132, 112, 8
    reach = d.high - d.low
    x = lambda value: (value - d.low) / reach * width  # noqa: E731
    # Bars stand for the mass of a code, the area for a density: both as share per unit.
    step = reach / len(d.before)
    total_before, total_after = max(sum(d.before), 1), max(sum(d.after), 1)
    gaps = _gaps(d.codes, d.low, d.high)
    density = [count / total_before / step for count in d.before]
    mass = [count / total_after / gap for count, gap in zip(d.after, gaps, strict=True)]
    # Close codes around zero share few numbers: what chance puts on one of them would dwarf all.
    highest = max([1.3 * max(density), 1e-12])
    y = lambda value: base - (base - top) * math.sqrt(min(value / highest, 1.0))  # noqa: E731
    bars = []
    for code, gap, value in zip(d.codes, gaps, mass, strict=True):
        if value:
            w = max(min(gap / reach * width * 0.74, 14.0), 1.2)
            left, up, wide, high = map(rounded, (x(code) - w / 2, y(value), w, base - y(value)))
            bars.append(tag("rect", x=left, y=up, width=wide, height=high, class_="after"))
    curve = [(x(d.low + (i + 0.5) * step), y(v)) for i, v in enumerate(density)]
    drawn = [
        tag("polygon", points=_path([(0, base), *curve, (width, base)]), class_="before"),
        bars,
        tag("polyline", points=_path(curve), class_="before-line"),
        tag("line", x1=0, x2=width, y1=base, y2=base, class_="axis"),
    ]
    binned = d.codes[0] != d.first
    for at in () if binned else map(rounded, map(x, d.codes)):
        drawn.append(tag("line", x1=at, x2=at, y1=base, y2=base + 4, class_="tick"))
    drawn.append(tag("text", f"{d.first:g}", x=2, y=height - 4, class_="label"))
    if d.first < 0 < d.last:
        drawn.append(tag("text", "0", x=rounded(x(0.0)), y=height - 4, class_="label middle"))
    drawn.append(tag("text", f"{d.last:g}", x=width - 2, y=height - 4, class_="label end"))
    words = (
        f"{d.path}, {d.qtype}: {human_count(d.elements)} numbers before and after rounding to "
        f"values from {d.first:g} to {d.last:g} in units of the scale"
    )
    return svg(width, height, words, f"histogram-{number}", drawn)


def _gaps(codes: Sequence[float], low: float, high: float) -> list[float]:
    """How much of the axis each code stands for: half the way to its neighbours."""
    edges = [low, *((a + b) / 2 for a, b in zip(codes, codes[1:], strict=False)), high]
    return [max(b - a, 1e-9) for a, b in zip(edges, edges[1:], strict=False)]


def accuracy_chart(points: Sequence[Point]) -> Markup:
    """Accuracy against bytes, smaller to the left; a line along those that nothing beats."""
    width, height, left, right, top, bottom = 520, 300, 62, 18, 18, 44
    sizes, scores = [p[1] for p in points], [p[2] for p in points]
    low, high = min(scores), max(scores)
    pad = (high - low) * 0.18 or max(abs(high) * 0.02, 1e-3)
    low, high = low - pad, high + pad
    least, most = math.log(min(sizes)), math.log(max(sizes))
    room = (most - least) * 0.08 or 0.3
    least, most = least - room, most + room * 1.6
    x = lambda size: left + (math.log(size) - least) / (most - least) * (width - left - right)  # noqa: E731
    y = lambda score: top + (high - score) / (high - low) * (height - top - bottom)  # noqa: E731
    grid = level_lines(low, high, y, left, width - right)
    for size in _size_ticks(math.exp(least), math.exp(most)):
        at = rounded(x(size))
        grid.append(tag("line", x1=at, x2=at, y1=top, y2=height - bottom, class_="grid"))
        grid.append(tag("text", human_bytes(size), x=at, y=height - 24, class_="label middle"))
    best = [(x(size), y(score)) for _, size, score in frontier(points)]
    line = tag("polyline", points=_path(best), class_="frontier") if len(best) > 1 else None
    dots = [
        tag(
            "g",
            tag("title", f"{label}: {human_bytes(size)}, {score:.6g}"),
            tag("circle", cx=rounded(x(size)), cy=rounded(y(score)), r=6, class_="dot"),
        )
        for label, size, score in points
    ]
    names = _placed_names(points, x, y, width - right)
    words = f"Accuracy against bytes of {len(points)} models; the table below has the numbers"
    middle = rounded((left + width) / 2)
    axis = tag("text", "bytes (log)", x=middle, y=height - 6, class_="label middle")
    return svg(width, height, words, "curve", grid, line, dots, names, axis)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other is both smaller and better than, by size.

    >>> frontier([('a', 10, 0.9), ('b', 5, 0.8), ('c', 20, 0.85)])
    [('b', 5, 0.8), ('a', 10, 0.9)]
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p[1], -p[2])):
        if not found or point[2] > found[-1][2]:
            found.append(point)
    return found


def _placed_names(points: Sequence[Point], x: Any, y: Any, edge: float) -> list[Markup]:
    """Labels beside their dots, moved down where two would lie on each other."""
    placed: list[tuple[float, float, float]] = []
    names = []
    for label, size, score in sorted(points, key=lambda p: y(p[2])):
        shown = label if len(label) <= 22 else label[:21] + "…"
        wide = 6.6 * len(shown)
        px, py = x(size) + 10, y(score) + 4
        if px + wide > edge:
            px = x(size) - 10 - wide
        while any(abs(py - b) < 14 and px < a + w and a < px + wide for a, b, w in placed):
            py += 14
        placed.append((px, py, wide))
        names.append(tag("text", shown, x=rounded(px), y=rounded(py), class_="name"))
    return names


def line_chart(
    words: str, name: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]
) -> Markup:
    """Lines over steps. Each says its name and last number under the pointer."""
    width, height, left, right, top, bottom = 640, 260, 62, 14, 12, 36
    known = [v for numbers in curves.values() for v in numbers if math.isfinite(v)] or [0.0]
    low, high = min(known), max(known)
    pad = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-3)
    low, high = low - pad, high + pad
    first, last = min(steps), max(steps)
    reach = max(last - first, 1)
    x = lambda step: left + (step - first) / reach * (width - left - right)  # noqa: E731
    y = lambda value: top + (high - value) / (high - low) * (height - top - bottom)  # noqa: E731
    grid = level_lines(low, high, y, left, width - right)
    for step, anchor in ((first, "label"), (last, "label end")):
        grid.append(tag("text", f"step {step}", x=rounded(x(step)), y=height - 10, class_=anchor))
    order = sorted(range(len(steps)), key=lambda k: steps[k])
    lines = []
    for number, (place, values) in enumerate(curves.items()):
        color = line_color(number, len(curves))
        points = [(x(steps[k]), y(values[k])) for k in order if math.isfinite(values[k])]
        drawn = [
            tag("circle", cx=rounded(a), cy=rounded(b), r=2.5, style=f"fill:{color}")
            for a, b in points
        ]
        if len(points) > 1:
            style = f"fill:none;stroke:{color};stroke-width:1.6"
            drawn.append(tag("polyline", points=_path(points), style=style))
        lines.append(tag("g", tag("title", f"{place}: {values[order[-1]]:.4g}"), drawn))
    return svg(width, height, words, f"chart-{name}", grid, lines)


def line_color(number: int, count: int) -> str:
    """The colour of one of so many lines."""
    return f"hsl({round(360 * number / count)} 65% 45%)"


def level_lines(low: float, high: float, y: Any, left: float, right: float) -> list[Markup]:
    """Lines across a chart at round values, each with its number on the left."""
    lines = []
    for value in round_ticks(low, high, 5):
        at = rounded(y(value))
        lines.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        above = rounded(y(value) + 4)
        lines.append(tag("text", f"{value:.4g}", x=left - 8, y=above, class_="label end"))
    return lines


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two.

    >>> round_ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _size_ticks(low: float, high: float) -> list[int]:
    """Powers of two between two sizes, thinned to at most six."""
    powers = [2**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    return powers[:: -(-len(powers) // 6) or 1]


def svg(width: int, height: int, words: str, name: str, *children: Any) -> Markup:
    """A chart with the words that say what it shows."""
    return tag(
        "svg",
        tag("title", words, id=f"{name}-title"),
        join(*children),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{name}-title",
        class_="chart",
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{rounded(a)},{rounded(b)}" for a, b in points)


def rounded(value: float) -> str:
    """A coordinate, as short as a tenth of a pixel allows.

    >>> rounded(12.04), rounded(3.25)
    ('12', '3.2')
    """
    return f"{value:.1f}".rstrip("0").rstrip(".")


# --- Tables that the page's script can sort and filter, and that read well without it -------------


@dataclass(frozen=True)
class Cell:
    """What a cell shows and what it sorts by."""

    shown: Any
    value: float | None = None
    class_: str | None = None


def sortable(
    name: str,
    caption: str,
    columns: Sequence[tuple[str, str, bool]],
    rows: Sequence[Sequence[Any]],
    *,
    filtered: bool = False,
) -> Markup:
    """A table of (key, heading, is a number) columns; the first cell of a row is its heading."""
    head = []
    for key, heading, number in columns:
        button = tag("button", heading, type="button", data_key=key)
        head.append(tag("th", button, scope="col", class_="number" if number else None))
    body = [tag("tr", [_cell(c, k, columns[k][2]) for k, c in enumerate(row)]) for row in rows]
    parts = tag("caption", caption), tag("thead", tag("tr", head)), tag("tbody", body)
    table = tag("table", parts, id=name, class_="sortable")
    wrapped = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)
    if not filtered:
        return wrapped
    about = dict(type="search", data_table=name, placeholder="module, op, type, kernel …")
    box = tag("input", **about, autocomplete="off", spellcheck="false")
    count = tag("span", f"{len(rows)} of {len(rows)}", class_="count", aria_live="polite")
    return tag("div", tag("label", "Filter ", box, count, class_="filter"), wrapped)


def _cell(cell: Any, number: int, numeric: bool) -> Markup:
    if not isinstance(cell, Cell):
        cell = Cell(cell)
    classes = " ".join(filter(None, ("number" if numeric else None, cell.class_))) or None
    name, scope = ("th", "row") if number == 0 else ("td", None)
    return tag(name, cell.shown, scope=scope, class_=classes, data_value=cell.value)
