"""The difference of two Plans: what changes when a rule, a model or a version of it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewbit._plan import Plan, Totals
from fewbit._plan_adapter import AdapterPlan
from fewbit._rule_checks import same_value
from fewbit._text import human_bytes


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
        same_sites = not (self.added or self.removed or self.changed)
        return not same_sites or bool(self.leaves or self.adapters or self.plan)

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

    >>> from fewbit._plan import Plan
    >>> plan = Plan(rules=(), sites=(), leaves=())
    >>> print(diff_plans(plan, plan))
    no difference
    """
    old, new = ({plan.site.id: plan for plan in side.sites} for side in (before, after))
    old_leaves, new_leaves = before._leaf_by_path, after._leaf_by_path
    changed: list[Change] = []
    for name in (name for name in old if name in new):
        changed += _changes(name, old[name].site, new[name].site)
        changed += _changes(name, old[name], new[name], skip=("site",))
    scales = [{scale.name: scale for scale in side.scales} for side in (before, after)]
    leaves = [*_by_name(old_leaves, new_leaves), *_by_name(*scales)]
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
    pairs = [
        (field.name, getattr(before, field.name), getattr(after, field.name))
        for field in dataclasses.fields(before)
        if field.name not in skip
    ]
    return [Change(name, field, old, new) for field, old, new in pairs if old != new]
