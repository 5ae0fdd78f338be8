"""Charts as inline SVG: a weight on its grid of codes, accuracy against bytes. Colours are CSS."""

import math
from collections.abc import Sequence
from typing import Any

from fewbit._text import human_bytes, human_count
from fewbit.debug._distributions import Distribution
from fewbit.report_page._markup import Markup, join, tag

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
            bars.append(
                tag(
                    "rect",
                    x=rounded(x(code) - w / 2),
                    y=rounded(y(value)),
                    width=rounded(w),
                    height=rounded(base - y(value)),
                    class_="after",
                )
            )
    points = [
        f"{rounded(x(d.low + (i + 0.5) * step))},{rounded(y(v))}" for i, v in enumerate(density)
    ]
    outline = " ".join([f"0,{base}", *points, f"{width},{base}"])
    binned = d.codes[0] != d.first
    ticks = [
        tag("line", x1=rounded(x(c)), x2=rounded(x(c)), y1=base, y2=base + 4, class_="tick")
        for c in (() if binned else d.codes)
    ]
    ends = [
        tag("text", _short(d.first), x=2, y=height - 4, class_="label"),
        tag("text", "0", x=rounded(x(0.0)), y=height - 4, class_="label middle")
        if d.first < 0 < d.last
        else None,
        tag("text", _short(d.last), x=width - 2, y=height - 4, class_="label end"),
    ]
    words = (
        f"{d.path}, {d.qtype}: {human_count(d.elements)} numbers before and after rounding to "
        f"values from {_short(d.first)} to {_short(d.last)} in units of the scale"
    )
    return svg(
        width,
        height,
        words,
        f"histogram-{number}",
        tag("polygon", points=outline, class_="before"),
        bars,
        tag("polyline", points=" ".join(points), class_="before-line"),
        tag("line", x1=0, x2=width, y1=base, y2=base, class_="axis"),
        ticks,
        ends,
    )


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
    grid: list[Any] = []
    for value in round_ticks(low, high, 5):
        grid.append(
            tag(
                "line",
                x1=left,
                x2=width - right,
                y1=rounded(y(value)),
                y2=rounded(y(value)),
                class_="grid",
            )
        )
        grid.append(
            tag("text", f"{value:.4g}", x=left - 8, y=rounded(y(value) + 4), class_="label end")
        )
    for size in _size_ticks(math.exp(least), math.exp(most)):
        grid.append(
            tag(
                "line",
                x1=rounded(x(size)),
                x2=rounded(x(size)),
                y1=top,
                y2=height - bottom,
                class_="grid",
            )
        )
        grid.append(
            tag("text", human_bytes(size), x=rounded(x(size)), y=height - 24, class_="label middle")
        )
    best = frontier(points)
    line = " ".join(f"{rounded(x(size))},{rounded(y(score))}" for _, size, score in best)
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
    return svg(
        width,
        height,
        words,
        "curve",
        grid,
        tag("polyline", points=line, class_="frontier") if len(best) > 1 else None,
        dots,
        names,
        tag(
            "text",
            "bytes (log)",
            x=rounded((left + width) / 2),
            y=height - 6,
            class_="label middle",
        ),
    )


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


def _short(value: float) -> str:
    return f"{value:g}"


def rounded(value: float) -> str:
    """A coordinate, as short as a tenth of a pixel allows.

    >>> rounded(12.04), rounded(3.25)
    ('12', '3.2')
    """
    return f"{value:.1f}".rstrip("0").rstrip(".")
