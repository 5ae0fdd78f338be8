"""Activation ranges that calibration saw."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fewbit._errors import describe
from fewbit.report_page._markup import Markup, tag
from fewbit.report_page._tables import Cell, sortable

_MSG_STATS = (
    "stats= takes the statistics that calibration made: nested mappings whose ends have 'count' "
    "and sums such as 'sum_of_absmax'; got {found}."
)


def ranges(stats: Any) -> Markup:
    """One row per operand: how many batches, the average and the extreme range."""
    if not isinstance(stats, Mapping):
        raise TypeError(_MSG_STATS.format(found=describe(stats)))
    found = list(_statistics(stats, ""))
    if stats and not found:
        raise TypeError(_MSG_STATS.format(found=describe(stats)))
    largest = max((high for _, _, _, high in found if math.isfinite(high)), default=0.0)
    rows = [
        [
            name,
            Cell(count, count),
            Cell(f"{mean:.4g}", mean),
            Cell(f"{high:.4g}", high),
            Cell(f"{high / mean:.2f}x" if mean else "-", high / mean if mean else 0.0),
            Cell(_bar(mean, high, largest), high),
        ]
        for name, count, mean, high in found
    ]
    columns = (
        ("operand", "operand", False),
        ("batches", "batches", True),
        ("mean", "mean range", True),
        ("range", "range seen", True),
        ("spread", "range / mean", True),
        ("bar", "of the largest", False),
    )
    intro = tag(
        "p",
        "The largest magnitude of each activation, averaged over batches and over all of them. A "
        "range far above its mean comes from few batches.",
        class_="soft lead",
    )
    table = sortable("range-table", "Activation ranges", columns, rows)
    return tag("section", tag("h2", "Activation ranges"), intro, table, id="ranges")


def _bar(mean: float, high: float, largest: float) -> Markup:
    width = 100 * high / largest if largest and math.isfinite(high) else 0.0
    return tag(
        "div",
        tag("span", style=f"width:{width:.1f}%"),
        class_="track",
        style="min-width:110px",
        aria_hidden="true",
    )


def _statistics(node: Any, path: str) -> Iterator[tuple[str, int, float, float]]:
    """(name, batches, mean, extreme) of every statistic below a mapping."""
    if not isinstance(node, Mapping):
        return
    sums = [key for key in node if str(key).startswith("sum_of_")]
    if "count" in node and sums:
        count = int(np.max(np.asarray(node["count"])))
        means, highs = [0.0], [0.0]
        for key in sums:
            total = np.abs(np.asarray(node[key], np.float64))
            means.append(float(total.max(initial=0.0)) / max(count, 1))
        for key, value in node.items():
            if str(key).startswith(("max_of_", "min_of_")):
                highs.append(float(np.abs(np.asarray(value, np.float64)).max(initial=0.0)))
        mean = max(means)
        yield path.strip("/"), count, mean, max(*highs, mean)
        return
    for key, value in node.items():
        yield from _statistics(value, f"{path}/{key}")
