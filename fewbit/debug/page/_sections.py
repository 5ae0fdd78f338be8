"""The sections of the page: errors per Site, weights, outliers, the plan, activation ranges."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fewbit._util import describe, human_bytes, human_count
from fewbit.debug._comparison import Comparison, SiteError
from fewbit.debug._metrics import OUTLIER_RATIO, Difference, decibels, level
from fewbit.debug.page._charts import (
    Cell,
    Markup,
    color_key,
    join,
    section,
    sortable,
    tag,
    weight_histogram,
)
from fewbit.planning import LeafPlan, Plan, SitePlan

_MOST_BARS = 24
_MOST_HISTOGRAMS = 24
_MOST_OUTLIERS = 100
_SCALE = 60.0  # dB: an error this small has no bar any more

_LEAD_ERRORS = (
    "Signal to quantization noise in dB, worst first; 6 dB are one bit, and a longer bar is a "
    "larger error. In the table, weight is the stored weight’s own error; only and restored are "
    "the model’s output with nothing but this Site quantized, and with nothing but this Site in "
    "float."
)
_LEAD_WEIGHTS = (
    "Each number divided by its own scale, so that the codes stand where they are; heights are "
    "square roots of densities, to keep the tails in sight."
)
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
    key = color_key(
        after="local: the quantized op on float operands",
        second="accumulated: as it happens in the quantized model",
    )
    bars = tag("ol", [_bar(row) for row in rows[:_MOST_BARS] if row.ran], class_="bars")
    more = _left(len(rows) - _MOST_BARS, "more in the table.")
    table = sortable("error-table", "Errors of every Site", _COLUMNS, [_numbers(r) for r in rows])
    notes = None
    if comparison.notes:
        notes = tag("ul", [tag("li", note) for note in comparison.notes], class_="plain soft")
    return section("errors", "Error per Site", _LEAD_ERRORS, key, bars, more, table, notes)


def _left(count: int, words: str) -> Markup | None:
    return tag("p", f"{count} {words}", class_="soft") if count > 0 else None


def _width(difference: Difference | None) -> float:
    if difference is None:
        return 0.0
    if math.isnan(difference.sqnr):
        return 100.0
    return 100 * min(max(1 - difference.sqnr / _SCALE, 0.004), 1.0)


def _bar(row: SiteError) -> Markup:
    tracks = []
    for name, difference in (("local", row.local), ("accumulated", row.accumulated)):
        bar = tag("span", class_=name, style=f"width:{_width(difference):.1f}%")
        tracks.append(tag("div", bar, class_="track"))
    if row.not_finite > 0:
        accumulated = tag("span", "not finite", class_="bad")
    else:
        accumulated = tag("span", f"{level(row.accumulated)} accum.", class_="soft")
    return tag(
        "li",
        tag("span", row.site, class_="site"),
        tag("div", tracks, class_="pair", aria_hidden="true"),
        tag("span", tag("span", level(row.local), " local"), accumulated, class_="level"),
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
        words = f"layer {', '.join(map(str, layer.layer))}: {level(layer.local)} dB local"
        cells.append(tag("i", title=words, style=f"opacity:{strength:.2f}"))
    worst = row.worst_layer
    words = f"{len(row.layers)} layers"
    if worst is not None:
        number = ", ".join(map(str, worst.layer))
        words = f"layer {number} of {len(row.layers)}: {level(worst.local)}"
    strip = tag("span", cells, class_="layers", role="img", aria_label=words, title=words)
    return join(strip, tag("span", words, class_="level soft"))


def _numbers(row: SiteError) -> list[Any]:
    def number(value: float | None) -> Cell:
        if value is None or math.isnan(value):
            return Cell(decibels(value)) if value is None else Cell(decibels(value), -1e6, "bad")
        return Cell(decibels(value), max(min(value, 1e6), -1e6))

    def of(difference: Difference | None) -> Cell:
        return number(None if difference is None else difference.sqnr)

    local = row.local
    finite = local is not None and math.isfinite(local.relative)
    return [
        row.site if row.ran else f"{row.site} (did not run)",
        of(row.weight),
        of(local),
        number(math.nan) if row.not_finite else of(row.accumulated),
        Cell(f"{local.cosine:.5f}", local.cosine) if finite and local else Cell("-"),
        Cell(f"{local.relative:.2%}", local.relative) if finite and local else Cell("-"),
        Cell("-") if row.clipped is None else Cell(f"{row.clipped:.2%}", row.clipped),
        number(row.only),
        number(row.restored),
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
        words = f"{d.qtype}, {human_count(d.elements)} numbers up to {d.absmax:.3g}"
        caption = tag("figcaption", tag("h3", d.path), tag("p", words))
        cards.append(tag("figure", caption, weight_histogram(d, number)))
    key = color_key(before="float numbers", after="codes, on their grid")
    grid = tag("div", cards, class_="cards")
    more = _left(len(paths) - _MOST_HISTOGRAMS, "more weights are not shown.")
    return section("weights", "Weights, before and after", _LEAD_WEIGHTS, key, grid, more)


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
    lead = (
        f"Channels whose largest magnitude is at least {OUTLIER_RATIO:g} times the median "
        "channel’s: where they share a scale, they leave few codes to the others."
    )
    if len(found) > _MOST_OUTLIERS:
        lead += f" The farthest {_MOST_OUTLIERS} of {len(found)}."
    table = sortable("outlier-table", "Outlier channels", columns, rows)
    return section("outliers", "Outlier channels", lead, table)


# --- The plan on the page: the numbers that sum it up, and every Site in a table ------------------

_PLAN_COLUMNS = (
    ("module", "module", False),
    ("op", "op", False),
    ("weight", "weight", False),
    ("types", "types", False),
    ("scales", "scales", False),
    ("before", "before", True),
    ("bytes", "after", True),
    ("macs", "mult-adds", True),
    ("runs", "runs on", False),
)


def summary(plan: Plan | None, comparison: Comparison | None) -> Markup:
    """The first thing to see: size, and how far the output is."""
    tiles: list[tuple[str, str, str]] = []
    sizes = None
    if plan is not None:
        t = plan.totals
        tiles += [
            ("Smaller by", f"{t.ratio:.2f}x", f"{human_bytes(t.bytes_after)} of parameters"),
            (
                "Bits per weight",
                f"{t.bits_per_weight:.2f}" if t.quantized_parameters else "-",
                f"{human_count(t.quantized_parameters)} of {human_count(t.parameters)} parameters",
            ),
            ("Sites quantized", f"{t.quantized_sites} of {t.sites}", "products and look-ups"),
            ("Multiply-adds", f"{t.share_of_macs:.1%}", "run with fewer bits"),
        ]
        sizes = _sizes(t.bytes_before, t.bytes_after)
    if comparison is not None:
        out = comparison.output
        shown = decibels(out.sqnr)
        shown += "" if shown == "exact" else " dB"
        tiles.append(("Output", shown, f"against float, cosine {out.cosine:.4f}"))
        if out.agreement is not None:
            tiles.append(("Same argmax", f"{out.agreement:.1%}", "of the batch's rows"))
    cells = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", below)))
        for name, value, below in tiles
    ]
    table = tag("dl", cells, class_="tiles")
    warning = None
    if comparison is not None and comparison.first_not_finite is not None:
        words = f"NaN or infinity first appears at {comparison.first_not_finite}."
        warning = tag("p", tag("strong", "Not finite. "), words, class_="warning")
    return tag("section", tag("h2", "Summary"), table, sizes, warning, id="summary")


def _sizes(before: int, after: int) -> Markup:
    share = 100 * after / before if before else 100.0

    def row(name: str, size: int, width: float, class_: str | None) -> list[Any]:
        bar = tag("span", class_=class_, style=f"width:{min(max(width, 0.5), 100):.2f}%")
        return [tag("span", name), tag("div", bar, class_="track"), tag("span", human_bytes(size))]

    rows = row("before", before, 100.0, "before") + row("after", after, share, None)
    return tag("div", rows, class_="sizes")


def plan_table(plan: Plan) -> Markup:
    """Every Site, and the rules and notes below."""
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    rows = [_row(planned, leaves) for planned in plan.sites]
    table = sortable("plan-table", "What happens at every Site", _PLAN_COLUMNS, rows, filtered=True)
    below: list[Any] = []
    if plan.rules:
        lines = "\n".join(f"{k}  {rule!r}" for k, rule in enumerate(plan.rules))
        below += [tag("h3", "Rules: the first that matches decides"), tag("pre", lines)]
    if plan.notes:
        items = [tag("li", note) for note in dict.fromkeys(plan.notes)]
        below += [tag("h3", "Notes"), tag("ul", items, class_="plain")]
    lead = (
        "One row per product or look-up, with its weight’s bytes before and after. Press a heading "
        "to sort."
    )
    return section("plan", "Plan", lead, table, below)


def _row(planned: SitePlan, leaves: dict[str, LeafPlan]) -> list[Any]:
    site = planned.site
    leaf = leaves.get(site.weight) if site.weight is not None else None
    prefix = "" if site.method == "__call__" else f"{site.method}."
    if planned.quantized:
        types = f"{planned.weight_qtype or '-'} x {planned.act_qtype or '-'}"
        types += f" {planned.act_mode}" if planned.act_mode in ("static", "delayed") else ""
        runs = Cell("; ".join((planned.runs_on, *planned.notes)), class_="wrap")
        kind: Any = Cell(types, class_="types")
    else:
        kind = Cell("float", class_="float")
        runs = Cell("; ".join((planned.reason or "", *planned.notes)), class_="wrap float")
    return [
        (prefix + site.path) or "(root)",
        site.op_id,
        "x".join(map(str, leaf.shape)) if leaf is not None else "-",
        kind,
        planned.granularity if planned.quantized else "-",
        Cell(human_bytes(leaf.bytes_before), leaf.bytes_before) if leaf else Cell("-", 0),
        Cell(human_bytes(leaf.bytes_after), leaf.bytes_after) if leaf else Cell("-", 0),
        Cell(human_count(site.macs), site.macs),
        runs,
    ]


# --- Activation ranges that calibration saw -------------------------------------------------------

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
            Cell(_range_bar(high, largest), high),
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
    lead = (
        "The largest magnitude of each activation, averaged over batches and over all of them. A "
        "range far above its mean comes from few batches."
    )
    table = sortable("range-table", "Activation ranges", columns, rows)
    return section("ranges", "Activation ranges", lead, table)


def _range_bar(high: float, largest: float) -> Markup:
    width = 100 * high / largest if largest and math.isfinite(high) else 0.0
    bar = tag("span", style=f"width:{width:.1f}%")
    return tag("div", bar, class_="track", style="min-width:110px", aria_hidden="true")


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
