"""The plan on the page: the numbers that sum it up, and every Site in a table."""

from typing import Any

from fewbit._plan import LeafPlan, Plan, SitePlan
from fewbit._text import human_bytes, human_count
from fewbit.debug._comparison import Comparison
from fewbit.debug._metrics import decibels
from fewbit.report_page._markup import Markup, join, tag
from fewbit.report_page._tables import Cell, sortable

_COLUMNS = (
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
        exact = decibels(out.sqnr)
        unit = "" if exact == "exact" else " dB"
        tiles.append(("Output", exact + unit, f"against float, cosine {out.cosine:.4f}"))
        if out.agreement is not None:
            tiles.append(("Same argmax", f"{out.agreement:.1%}", "of the batch's rows"))
    shown = tag(
        "dl",
        [
            tag("div", tag("dt", name), tag("dd", value, tag("small", below)))
            for name, value, below in tiles
        ],
        class_="tiles",
    )
    warning = None
    if comparison is not None and comparison.first_not_finite is not None:
        warning = tag(
            "p",
            tag("strong", "Not finite. "),
            f"NaN or infinity first appears at {comparison.first_not_finite}.",
            class_="warning",
        )
    return tag("section", tag("h2", "Summary"), shown, sizes, warning, id="summary")


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
    table = sortable("plan-table", "What happens at every Site", _COLUMNS, rows, filtered=True)
    below: list[Any] = []
    if plan.rules:
        lines = "\n".join(f"{k}  {rule!r}" for k, rule in enumerate(plan.rules))
        below += [tag("h3", "Rules: the first that matches decides"), tag("pre", lines)]
    if plan.notes:
        items = [tag("li", note) for note in dict.fromkeys(plan.notes)]
        below += [tag("h3", "Notes"), tag("ul", items, class_="plain")]
    intro = tag(
        "p",
        "One row per product or look-up, with its weight’s bytes before and after. Press a heading "
        "to sort.",
        class_="soft lead",
    )
    return tag("section", tag("h2", "Plan"), intro, table, join(*below), id="plan")


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
