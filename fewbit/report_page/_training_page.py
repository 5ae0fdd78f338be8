"""The page of a training run: a chart for each metric, a line for each Site and layer."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fewbit.debug._training_stats import METRICS
from fewbit.report_page._charts import round_ticks, rounded, svg
from fewbit.report_page._markup import Markup, join, tag
from fewbit.report_page._page import document
from fewbit.report_page._tables import Cell, sortable

if TYPE_CHECKING:
    from fewbit.debug._training_history import TrainingHistory

_TITLES = {
    "weight_clipped": "Clipped weights",
    "act_clipped": "Clipped activations",
    "scale_drift": "Drift of scales",
    "cotangent_snr_db": "Gradients at products",
    "weight_grad_snr_db": "Gradients of weights",
}


def training_page(history: "TrainingHistory", title: str) -> str:
    """A whole HTML document.

    >>> from fewbit.debug import TrainingHistory
    >>> history = TrainingHistory()
    >>> history.add(0, {'<up>:dot_general0/weight_clipped': 0.25})
    >>> page = training_page(history, 'A run')
    >>> '&lt;up&gt;:dot_general0' in page, '<up>' in page, page.count('<svg')
    (True, False, 1)
    """
    present = [(metric, history.curves(metric)) for metric in METRICS]
    present = [(metric, curves) for metric, curves in present if curves]
    sections = [_section(metric, history.steps, curves) for metric, curves in present]
    links = [tag("a", _TITLES[metric], href=f"#{metric}") for metric, _ in present]
    steps = f"{len(history.steps)} looks, steps {min(history.steps)} to {max(history.steps)}"
    header = tag("header", tag("div", tag("h1", title), tag("p", steps, class_="soft")))
    nav = tag("nav", links, aria_label="Sections")
    return document(title, join(header, nav, tag("main", sections)))


def _section(metric: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Markup:
    columns = (
        ("site", "product", False),
        ("first", "first", True),
        ("last", "last", True),
        ("least", "least", True),
        ("most", "most", True),
    )
    rows = []
    for number, (place, numbers) in enumerate(curves.items()):
        dot = tag("span", "● ", style=f"color:{_color(number, len(curves))}", aria_hidden="true")
        known = [v for v in numbers if math.isfinite(v)] or [float("nan")]
        ends = (numbers[0], numbers[-1], min(known), max(known))
        rows.append(
            [join(dot, place), *(Cell(f"{v:.4g}", v if math.isfinite(v) else None) for v in ends)]
        )
    title = _TITLES[metric]
    return tag(
        "section",
        tag("h2", title),
        tag("p", f"{METRICS[metric].capitalize()}.", class_="soft lead"),
        line_chart(f"{title} of {len(curves)} products over steps", metric, steps, curves),
        sortable(f"{metric}-table", title, columns, rows),
        id=metric,
    )


def _color(number: int, count: int) -> str:
    return f"hsl({round(360 * number / count)} 65% 45%)"


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
    grid: list[Any] = []
    for value in round_ticks(low, high, 5):
        at = rounded(y(value))
        grid.append(tag("line", x1=left, x2=width - right, y1=at, y2=at, class_="grid"))
        grid.append(
            tag("text", f"{value:.4g}", x=left - 8, y=rounded(y(value) + 4), class_="label end")
        )
    for step, anchor in ((first, "label"), (last, "label end")):
        grid.append(tag("text", f"step {step}", x=rounded(x(step)), y=height - 10, class_=anchor))
    order = sorted(range(len(steps)), key=lambda k: steps[k])
    lines = []
    for number, (place, values) in enumerate(curves.items()):
        color = _color(number, len(curves))
        points = [(x(steps[k]), y(values[k])) for k in order if math.isfinite(values[k])]
        drawn: list[Any] = [
            tag("circle", cx=rounded(a), cy=rounded(b), r=2.5, style=f"fill:{color}")
            for a, b in points
        ]
        if len(points) > 1:
            path = " ".join(f"{rounded(a)},{rounded(b)}" for a, b in points)
            style = f"fill:none;stroke:{color};stroke-width:1.6"
            drawn.append(tag("polyline", points=path, style=style))
        lines.append(tag("g", tag("title", f"{place}: {values[order[-1]]:.4g}"), drawn))
    return svg(width, height, words, f"chart-{name}", grid, lines)
