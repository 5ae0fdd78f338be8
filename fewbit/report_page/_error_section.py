"""Errors on the page: bars per Site worst first, all numbers, distributions, outliers."""

import math
from typing import Any

from fewbit._text import human_count
from fewbit.debug._channels import OUTLIER_RATIO
from fewbit.debug._comparison import Comparison, SiteError
from fewbit.debug._metrics import Difference, decibels
from fewbit.report_page._charts import weight_histogram
from fewbit.report_page._markup import Markup, color_key, join, tag
from fewbit.report_page._tables import Cell, sortable

_MOST_BARS = 24
_MOST_HISTOGRAMS = 24
_MOST_OUTLIERS = 100
_SCALE = 60.0  # dB: an error this small has no bar any more

_COLUMNS = (
    ("site", "site", False),
    ("weight", "weight", True),
    ("local", "local", True),
    ("accumulated", "accum.", True),
    ("cosine", "cosine", True),
    ("error", "rel. error", True),
    ("clipped", "clipped", True),
    ("only", "only", True),
    ("restored", "restored", True),
    ("types", "types", False),
)


def errors(comparison: Comparison) -> Markup:
    """Bars and numbers of every Site."""
    rows = comparison.sites
    bars = [_bar(row) for row in rows[:_MOST_BARS] if row.ran]
    key = color_key(
        after="local: the quantized op on float operands",
        second="accumulated: as it happens in the quantized model",
    )
    intro = tag(
        "p",
        "Signal to quantization noise in dB, worst first; 6 dB are one bit, and a longer bar is a "
        "larger error. In the table, weight is the stored weight’s own error; only and restored "
        "are the model’s output with nothing but this Site quantized, and with nothing but this "
        "Site in float.",
        class_="soft lead",
    )
    left = len(rows) - _MOST_BARS
    more = tag("p", f"{left} more in the table.", class_="soft") if left > 0 else None
    table = sortable("error-table", "Errors of every Site", _COLUMNS, [_numbers(r) for r in rows])
    notes = None
    if comparison.notes:
        notes = tag("ul", [tag("li", note) for note in comparison.notes], class_="plain soft")
    return tag(
        "section",
        tag("h2", "Error per Site"),
        intro,
        key,
        tag("ol", bars, class_="bars"),
        more,
        table,
        notes,
        id="errors",
    )


def _width(difference: Difference | None) -> float:
    if difference is None:
        return 0.0
    level = difference.sqnr
    if math.isnan(level):
        return 100.0
    return 100 * min(max(1 - level / _SCALE, 0.004), 1.0)


def _bar(row: SiteError) -> Markup:
    tracks = [
        tag(
            "div",
            tag("span", class_=name, style=f"width:{_width(difference):.1f}%"),
            class_="track",
        )
        for name, difference in (("local", row.local), ("accumulated", row.accumulated))
    ]
    broken = row.not_finite > 0
    levels = [
        tag("span", _level(row.local), " local"),
        tag(
            "span",
            "not finite" if broken else _level(row.accumulated) + " accum.",
            class_="bad" if broken else "soft",
        ),
    ]
    return tag(
        "li",
        tag("span", row.site, class_="site"),
        tag("div", tracks, class_="pair", aria_hidden="true"),
        tag("span", levels, class_="level"),
        _layers(row),
    )


def _layers(row: SiteError) -> Markup | None:
    """A strip of the scan's layers, the worst the strongest, and what it says in words."""
    if not row.layers:
        return None
    widths = [_width(layer.local) for layer in row.layers]
    low, reach = min(widths), max(max(widths) - min(widths), 1e-9)
    cells = []
    for layer, width in zip(row.layers, widths, strict=True):
        strength = 0.15 + 0.85 * (width - low) / reach
        words = f"layer {', '.join(map(str, layer.layer))}: {_level(layer.local)} dB local"
        cells.append(tag("i", title=words, style=f"opacity:{strength:.2f}"))
    worst = row.worst_layer
    words = f"{len(row.layers)} layers"
    if worst is not None:
        number = ", ".join(map(str, worst.layer))
        words = f"layer {number} of {len(row.layers)}: {_level(worst.local)}"
    strip = tag("span", cells, class_="layers", role="img", aria_label=words, title=words)
    return join(strip, tag("span", words, class_="level soft"))


def _level(difference: Difference | None) -> str:
    return decibels(None if difference is None else difference.sqnr)


def _numbers(row: SiteError) -> list[Any]:
    def level(value: float | None) -> Cell:
        shown = decibels(value)
        if value is None:
            return Cell(shown)
        sorts = -1e6 if math.isnan(value) else max(min(value, 1e6), -1e6)
        return Cell(shown, sorts, "bad" if math.isnan(value) else None)

    def of(difference: Difference | None) -> Cell:
        return level(None if difference is None else difference.sqnr)

    local = row.local
    name = row.site if row.ran else f"{row.site} (did not run)"
    finite = local is not None and math.isfinite(local.relative)
    return [
        name,
        of(row.weight),
        of(local),
        level(math.nan) if row.not_finite else of(row.accumulated),
        Cell(f"{local.cosine:.5f}", local.cosine) if finite and local else Cell("-"),
        Cell(f"{local.relative:.2%}", local.relative) if finite and local else Cell("-"),
        Cell("-") if row.clipped is None else Cell(f"{row.clipped:.2%}", row.clipped),
        level(row.only),
        level(row.restored),
        Cell(row.types, class_="types"),
    ]


def distributions(comparison: Comparison) -> Markup | None:
    """Weights on their grids, those of the worst Sites first."""
    known = {d.path: d for d in comparison.distributions}
    order = [row.weight_path for row in comparison.sites if row.weight_path in known]
    paths = list(dict.fromkeys([*order, *known]))
    if not paths:
        return None
    cards = []
    for number, path in enumerate(paths[:_MOST_HISTOGRAMS]):
        d = known[path]
        caption = tag(
            "figcaption",
            tag("h3", d.path),
            tag("p", f"{d.qtype}, {human_count(d.elements)} numbers up to {d.absmax:.3g}"),
        )
        cards.append(tag("figure", caption, weight_histogram(d, number)))
    left = len(paths) - _MOST_HISTOGRAMS
    more = tag("p", f"{left} more weights are not shown.", class_="soft") if left > 0 else None
    key = color_key(before="float numbers", after="codes, on their grid")
    intro = tag(
        "p",
        "Each number divided by its own scale, so that the codes stand where they are; heights are "
        "square roots of densities, to keep the tails in sight.",
        class_="soft lead",
    )
    title = tag("h2", "Weights, before and after")
    grid = tag("div", cards, class_="cards")
    return tag("section", title, intro, key, grid, more, id="weights")


def outliers(comparison: Comparison) -> Markup | None:
    """Channels far above the others."""
    found = comparison.outliers()
    if not found:
        return None
    columns = (
        ("site", "site", False),
        ("of", "of", False),
        ("layer", "layer", False),
        ("channel", "channel", True),
        ("absmax", "largest", True),
        ("median", "median channel", True),
        ("ratio", "ratio", True),
    )
    rows = [
        [
            o.site,
            o.of,
            ", ".join(map(str, o.layer)) or "-",
            Cell(o.channel, o.channel),
            Cell(f"{o.absmax:.3g}", o.absmax),
            Cell(f"{o.median:.3g}", o.median),
            Cell(f"{o.ratio:.1f}x", o.ratio),
        ]
        for o in found[:_MOST_OUTLIERS]
    ]
    intro = (
        f"Channels whose largest magnitude is at least {OUTLIER_RATIO:g} times the median "
        "channel’s: where they share a scale, they leave few codes to the others."
    )
    if len(found) > _MOST_OUTLIERS:
        intro += f" The farthest {_MOST_OUTLIERS} of {len(found)}."
    table = sortable("outlier-table", "Outlier channels", columns, rows)
    text = tag("p", intro, class_="soft lead")
    return tag("section", tag("h2", "Outlier channels"), text, table, id="outliers")
