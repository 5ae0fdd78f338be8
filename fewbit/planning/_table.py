"""The Plan for human eyes: one row per Site, equal layers folded, and what it all adds up to."""

from __future__ import annotations

import dataclasses
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fewbit._util import (
    COMFORT,
    MIN_WIDTH,
    human_bytes,
    human_count,
    natural_width,
    shorten,
    table,
    table_blocks,
    terminal_width,
    wrap,
)
from fewbit.planning._rows import AdapterPlan, LeafPlan, SitePlan, Totals
from fewbit.rules import same_value

if TYPE_CHECKING:
    from fewbit.planning._plan import Plan

_KINDS = {
    "linen": "a Linen model",
    "nnx": "an NNX model",
    "keras": "a Keras model",
    "function": "a function",
}
_HEADER = ("module", "op", "weight", "rule", "types", "scales", "bytes", "runs on")
# A model that trains has three products at a Site, and parameters that stay float.
_TRAINING = ("module", "op", "weight", "rule", "forward", "dlhs", "drhs", "scales", "runs on")
_ALIGN = dict(zip((*_HEADER, *_TRAINING[4:7]), "mllrllrwlll", strict=True))
# Narrow terminals lose these first; the line below the table says so.
_DROP_ORDER = ("scales", "weight", "bytes")
_PATH_COMFORT = 28
_SHORT_REASON = 20
_MOST_UNUSED_NAMES = 6


@dataclass(frozen=True)
class Row:
    """A line of the table. `parts` is the path cut at its numbers, which folding widens."""

    parts: tuple[str, ...]
    cells: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    adapter_bytes: int = 0
    runs_on: str = ""
    remark: str = ""
    count: int = 1

    @property
    def path(self) -> str:
        return "".join(self.parts) or "(root)"


def render(plan: Plan, *, fold: bool = True, width: int | None = None) -> str:
    """The Plan as text, no line wider than `width` (the terminal's, at least 60).

    >>> from fewbit import Plan
    >>> print(render(Plan(rules=(), sites=(), leaves=(), kind="linen"), width=60))
    Plan of a Linen model: 0 of 0 sites quantized
    <BLANKLINE>
    no sites: the model has no products or look-ups
    <BLANKLINE>
    totals
      sites        0 of 0 quantized
      parameters   0 of 0 quantized
      bytes        0 B → 0 B
    """
    width = max(MIN_WIDTH, terminal_width() if width is None else width)
    totals = plan.totals
    methods = "" if plan.methods == ("__call__",) else f" ({', '.join(plan.methods)})"
    title = (
        f"Plan of {_KINDS.get(plan.kind, plan.kind)}{methods}: "
        f"{totals.quantized_sites} of {totals.sites} sites quantized"
    )
    blocks = [
        wrap(title, width, indent="  ", first=""),
        _site_lines(plan, fold, width),
        _other_leaf_lines(plan, width),
        _note_lines(plan, width),
        _rule_lines(plan, width),
        _total_lines(plan, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def render_html(plan: Plan) -> str:
    """The Plan as an HTML table for notebooks.

    >>> from fewbit import Plan
    >>> render_html(Plan(rules=(), sites=(), leaves=()))[:7]
    '<table>'
    """
    cell = lambda tag, text: f"<{tag} style='text-align:left'>{html.escape(text)}</{tag}>"  # noqa: E731
    header = _header(plan)
    rows = [_cells(row, header) for row in fold_rows(site_rows(plan))]
    head = "".join(cell("th", name) for name in header)
    body = "".join("<tr>" + "".join(cell("td", text) for text in row) + "</tr>" for row in rows)
    below = "".join(f"<p>{html.escape(text)}</p>" for text in (*plan.notes, str(plan.totals)))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def site_rows(plan: Plan) -> list[Row]:
    """A row for every Site, in the order of the model."""
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    training = _header(plan) is _TRAINING
    adapters = {adapter.leaf: adapter for adapter in plan.adapters}
    return [
        _row(site, leaves, adapters.get(site.site.weight or ""), training) for site in plan.sites
    ]


def _header(plan: Plan) -> tuple[str, ...]:
    return _TRAINING if plan.trains else _HEADER


def _row(
    planned: SitePlan,
    leaves: dict[str, LeafPlan],
    adapter: AdapterPlan | None,
    training: bool,
) -> Row:
    site = planned.site
    leaf = leaves.get(site.weight) if site.weight is not None else None
    weight = leaf or getattr(site, site.weight_side or "", None)
    types = f"{planned.weight_qtype or '-'} x {planned.act_qtype or '-'}"
    if planned.act_mode in ("static", "delayed"):
        types += f" {planned.act_mode}"
    shown = planned.quantized or adapter is not None
    if adapter is not None:
        types += f" + r{adapter.rank}"
    reason = () if shown else (planned.reason or "",)
    prefix = "" if site.method == "__call__" else f"{site.method}."
    return Row(
        parts=tuple(re.split(r"(\d+)(?=/|$)", prefix + site.path)),
        cells=(
            site.op_id,
            "x".join(map(str, weight.shape)) if weight else "-",
            "-" if planned.rule is None else str(planned.rule),
            types if shown else "-",
            *((planned.dlhs or "-", planned.drhs or "-") if training else ()),
            planned.granularity if planned.quantized else "-",
        ),
        bytes_before=leaf.bytes_before if leaf else 0,
        bytes_after=leaf.bytes_after if leaf else 0,
        adapter_bytes=adapter.bytes if adapter is not None else 0,
        runs_on=planned.runs_on if shown else "",
        remark="; ".join((*reason, *planned.notes)),
    )


def fold_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in one number of their path only, as one row with a range and a count.

    >>> rows = [Row(("layers/", str(i), "/up"), (), 4, 1) for i in range(24)]
    >>> [(row.path, row.count, row.bytes_before) for row in fold_rows(rows)]
    [('layers/0..23/up', 24, 96)]
    """
    # One number after the other, outermost first: a fold over layers may fold over experts again.
    places = max((len(row.parts) for row in rows), default=0) // 2
    folded = list(rows)
    for place in range(places):
        folded = _fold_at(folded, 2 * place + 1)
    return folded


def _fold_at(rows: Iterable[Row], at: int) -> list[Row]:
    groups: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        alike = _with_part(row, at, "") if at < len(row.parts) else number
        groups.setdefault(alike, []).append(row)
    return [_merge(group, at) if len(group) > 1 else group[0] for group in groups.values()]


def _merge(group: list[Row], at: int) -> Row:
    first, many = group[0], len(group)
    numbers = sorted({int(row.parts[at]) for row in group})
    return replace(
        _with_part(first, at, number_ranges(numbers)),
        bytes_before=first.bytes_before * many,
        bytes_after=first.bytes_after * many,
        adapter_bytes=first.adapter_bytes * many,
        count=first.count * many,
    )


def _with_part(row: Row, at: int, text: str) -> Row:
    return replace(row, parts=(*row.parts[:at], text, *row.parts[at + 1 :]))


def number_ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers with their runs written as ranges.

    >>> number_ranges([0, 1, 2, 3, 7, 9, 10])
    '0..3,7,9..10'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _cells(
    row: Row, header: tuple[str, ...], footnotes: dict[str, int] | None = None
) -> tuple[str, ...]:
    """The row's text; with `footnotes`, long remarks are numbered there instead of written out."""
    if row.bytes_before == row.bytes_after:
        size = human_bytes(row.bytes_before) if row.bytes_before else "-"
    else:
        size = f"{human_bytes(row.bytes_before)} → {human_bytes(row.bytes_after)}"
    if row.adapter_bytes:
        size += f" + {human_bytes(row.adapter_bytes)}"
    last = "; ".join(filter(None, (row.runs_on, row.remark)))
    if footnotes is not None and row.remark and (row.runs_on or len(last) > _SHORT_REASON):
        number = footnotes.setdefault(row.remark, len(footnotes) + 1)
        last = f"{row.runs_on or 'left alone'} [{number}]"
    sizes = (size,) if "bytes" in header else ()
    return (_path(row), *row.cells, *sizes, last)


def _path(row: Row, width: int | None = None) -> str:
    """The row's path and how many rows it stands for, within `width`."""
    times = f"  x{row.count}" if row.count > 1 else ""
    return (row.path if width is None else shorten(row.path, width - len(times))) + times


def _site_lines(plan: Plan, fold: bool, width: int) -> list[str]:
    if not plan.sites:
        return ["no sites: the model has no products or look-ups"]
    rows = fold_rows(site_rows(plan)) if fold else site_rows(plan)
    footnotes: dict[str, int] = {}
    header = _header(plan)
    cells = [_cells(row, header, footnotes) for row in rows]
    kept, path_width = _layout([header, *cells], width)
    pick = lambda columns: [columns[i] for i in kept]  # noqa: E731
    align = "".join(_ALIGN[header[i]] for i in kept)
    if path_width:
        body = [
            [_path(row, path_width), *pick(line)[1:]] for row, line in zip(rows, cells, strict=True)
        ]
        lines = table(body, pick(header), align, width).split("\n")
    else:
        lines = _stacked(rows, [pick(line)[1:] for line in cells], pick(header), align, width)
    for remark, number in footnotes.items():
        lines += wrap(remark, width, "     ", f"{f'[{number}]':<5}")
    hidden = [name for i, name in enumerate(header) if i not in kept]
    if hidden:
        text = f"no room here for: {', '.join(hidden)}; print(plan.table(width=120)) shows all"
        lines += wrap(text, width, "     ", "…    ")
    return lines


def _stacked(
    rows: Sequence[Row], cells: list[list[str]], header: list[str], align: str, width: int
) -> list[str]:
    """Each path on a line of its own, the other columns below it."""
    (head, rule), *blocks = table_blocks(cells, header[1:], align[1:], width - 2)
    lines = [header[0], f"  {head}", f"──{rule}"]
    for row, block in zip(rows, blocks, strict=True):
        lines.append(_path(row, width))
        lines += [f"  {line}" for line in block]
    return lines


def _layout(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """The columns that fit and the room for the path; 0 puts the path on a line of its own."""
    header = list(rows[0])
    kept = list(range(len(header)))
    # Paths can be cut and the last column wrapped, so only their comfort counts.
    path = max(len(row[0]) for row in rows)
    last = min(COMFORT, max(len(row[-1]) for row in rows))
    middle = lambda: natural_width([[row[i] for i in kept[1:-1]] for row in rows])  # noqa: E731
    room = width - last - middle() - 4
    if room >= min(path, _PATH_COMFORT):
        return kept, min(path, room)
    for name in _DROP_ORDER:
        if 2 + middle() + 2 + last <= width:
            break
        if name in header:
            kept.remove(header.index(name))
    return kept, 0


def _other_leaf_lines(plan: Plan, width: int) -> list[str]:
    others = [leaf for leaf in plan.leaves if not leaf.sites]
    if not others:
        return []
    names = Counter(leaf.path.rsplit("/", 1)[-1] for leaf in others).most_common()
    shown = [f"{name} x{n}" if n > 1 else name for name, n in names[:_MOST_UNUSED_NAMES]]
    if len(names) > _MOST_UNUSED_NAMES:
        shown.append(f"{len(names) - _MOST_UNUSED_NAMES} other names")
    text = (
        f"{_plural(len(others), 'parameter')} outside all sites: {', '.join(shown)}; "
        f"{human_count(sum(leaf.size for leaf in others))} numbers, "
        f"{human_bytes(sum(leaf.bytes_after for leaf in others))}"
    )
    changed = sum(leaf.how is not None for leaf in others)
    text += f", {changed} of them quantized" if changed else ", left as they are"
    return wrap(text, width, indent="  ", first="")


def _note_lines(plan: Plan, width: int) -> list[str]:
    if not plan.notes:
        return []
    counted = Counter(plan.notes)
    notes = (note if n == 1 else f"{note} (x{n})" for note, n in counted.items())
    return ["notes", *(line for note in notes for line in wrap(note, width, "    ", "  "))]


def _rule_lines(plan: Plan, width: int) -> list[str]:
    if not plan.rules:
        return []
    counts = Counter(site.rule for site in plan.sites)
    lines = ["rules"]
    for number, rule in enumerate(plan.rules):
        matched = _plural(counts[number], "site")
        if not counts[number]:
            matched = "no site" + (" (UNMATCHED)" if number in plan.unmatched_rules else "")
        lines += wrap(f"{rule!r}: {matched}", width, "      ", f"  {number:>2}  ")
    return lines


def _total_lines(plan: Plan, width: int) -> list[str]:
    t = plan.totals
    sites = f"{t.quantized_sites} of {t.sites} quantized"
    sites += f", {t.share_of_macs:.1%} of all multiply-adds" if t.share_of_macs else ""
    weights = f"{human_count(t.quantized_parameters)} of {human_count(t.parameters)} quantized"
    weights += f", {t.bits_per_weight:.2f} bits each" if t.quantized_parameters else ""
    size = f"{human_bytes(t.bytes_before)} → {human_bytes(t.bytes_after)}"
    size += f", {t.ratio:.2f}x smaller" if t.bytes_after < t.bytes_before else ""
    named = [("sites", sites), ("parameters", weights), ("bytes", size)]
    if plan.adapters:
        ranks = ", ".join(map(str, sorted({adapter.rank for adapter in plan.adapters})))
        total = sum(adapter.bytes for adapter in plan.adapters)
        named.append(
            ("adapters", f"{len(plan.adapters)} of rank {ranks} (r), {human_bytes(total)} to train")
        )
    lines = ["totals"]
    for name, text in named:
        lines += wrap(text, width, " " * 15, f"  {name:<13}")
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


# --- The difference of two Plans: what changes when a rule, a model or a version of it does -------


@dataclass(frozen=True)
class Change:
    """One value that differs: of which Site or parameter, which field, from what to what."""

    name: str
    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        before, after = (
            human_bytes(value) if self.field.startswith("bytes") else str(value)
            for value in (self.before, self.after)
        )
        return f"{self.name}  {self.field}: {before} → {after}"


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two Plans; false when there are none, and prints as a list."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    leaves: tuple[Change, ...]
    plan: tuple[Change, ...]
    before: Totals
    after: Totals
    adapters: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        sites = self.added or self.removed or self.changed
        return bool(sites or self.leaves or self.adapters or self.plan)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = [f"+ site {name}" for name in self.added]
        lines += [f"- site {name}" for name in self.removed]
        lines += [f"~ site {change}" for change in self.changed]
        lines += [f"~ parameter {change}" for change in self.leaves]
        lines += [f"~ adapter {change}" for change in self.adapters]
        lines += [f"~ {change}" for change in self.plan]
        return "\n".join([*lines, f"before: {self.before}", f"after:  {self.after}"])


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What `after` does differently from `before`, field by field.

    >>> from fewbit import Plan
    >>> plan = Plan(rules=(), sites=(), leaves=())
    >>> print(diff_plans(plan, plan))
    no difference
    """
    old, new = ({plan.site.id: plan for plan in side.sites} for side in (before, after))
    changed: list[Change] = []
    for name in (name for name in old if name in new):
        changed += _changes(name, old[name].site, new[name].site)
        changed += _changes(name, old[name], new[name], skip=("site",))
    scales = [{scale.name: scale for scale in side.scales} for side in (before, after)]
    leaves = [*_by_name(before._leaf_by_path, after._leaf_by_path), *_by_name(*scales)]
    return PlanDiff(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(changed),
        leaves=tuple(leaves),
        plan=tuple(_changes("plan", before, after, skip=("sites", "leaves", "scales", "adapters"))),
        before=before.totals,
        after=after.totals,
        adapters=tuple(_adapters(before.adapters, after.adapters)),
    )


def _adapters(before: Sequence[AdapterPlan], after: Sequence[AdapterPlan]) -> Iterator[Change]:
    """Differences of adapters, by the parameter that each adds to."""
    old, new = ({adapter.leaf: adapter for adapter in side} for side in (before, after))
    for leaf in dict.fromkeys((*old, *new)):
        if leaf not in old or leaf not in new:
            there = [f"rank {side[leaf].rank}" if leaf in side else "none" for side in (old, new)]
            yield Change(leaf, "adapter", *there)
            continue
        a, b = old[leaf], new[leaf]
        for field in dataclasses.fields(a.rule):
            values = [getattr(side.rule, field.name) for side in (a, b)]
            if not same_value(*values):
                yield Change(leaf, field.name, *values)
        yield from _changes(leaf, a, b, skip=("leaf", "rule"))


def _by_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Differences of parameters or static scales, those that only one side has too."""
    for name, item in old.items():
        if name in new:
            yield from _changes(name, item, new[name])
        else:
            yield Change(name, "shape", item.shape, "not in the plan")
    for name, item in new.items():
        if name not in old:
            yield Change(name, "shape", "not in the plan", item.shape)


def _changes(name: str, before: Any, after: Any, skip: Sequence[str] = ()) -> list[Change]:
    fields = [field.name for field in dataclasses.fields(before) if field.name not in skip]
    found = [Change(name, field, getattr(before, field), getattr(after, field)) for field in fields]
    return [change for change in found if change.before != change.after]
