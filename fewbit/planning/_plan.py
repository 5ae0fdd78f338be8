"""The Plan: what will happen to every Site and every parameter of a model, as a value.

Tracing finds the Sites, the planner decides, and everything after that only executes a Plan. So a
Plan holds no arrays and no functions: it prints, compares, hashes, and goes to JSON and back.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from fewbit._util import nearest
from fewbit.planning._json import plan_from_json, plan_to_json
from fewbit.planning._rows import AdapterPlan, LeafPlan, ScalePlan, SitePlan, Totals
from fewbit.planning._table import PlanDiff, diff_plans, render, render_html
from fewbit.qarray import HowToQuantize
from fewbit.rules import QuantizationRule


@dataclass(frozen=True)
class Plan:
    """Everything that will be done to a model. Print it, save it, compare it, then execute it.

    >>> plan = Plan(rules=(), sites=(), leaves=(), kind="function")
    >>> plan.totals.sites, Plan.from_json(plan.to_json()) == plan
    (0, True)
    """

    rules: tuple[QuantizationRule, ...]
    sites: tuple[SitePlan, ...]
    leaves: tuple[LeafPlan, ...]
    notes: tuple[str, ...] = ()
    unmatched_rules: tuple[int, ...] = ()
    kind: str = "function"
    methods: tuple[str, ...] = ("__call__",)
    scales: tuple[ScalePlan, ...] = ()
    adapters: tuple[AdapterPlan, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "kind":
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))

    # Plans travel as static arguments of jit, which hashes them at every call.
    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rules, self.sites, self.leaves, self.kind, self.methods))

    def __hash__(self) -> int:
        return self._hash

    @property
    def trains(self) -> bool:
        """Whether it is of a model that trains: gradients are planned, parameters stay float."""
        return any(site.dlhs is not None or site.drhs is not None for site in self.sites)

    @functools.cached_property
    def _leaf_by_path(self) -> dict[str, LeafPlan]:
        return {leaf.path: leaf for leaf in self.leaves}

    def leaf(self, path: str) -> LeafPlan:
        """The plan of the parameter at `path`; an unknown path raises and names the nearest."""
        if path in self._leaf_by_path:
            return self._leaf_by_path[path]
        near = nearest(path, self._leaf_by_path, " The nearest are {}.", 3, 0.4)
        raise KeyError(
            f"The plan has no parameter {path!r} among its {len(self.leaves)}.{near} "
            "plan.leaves lists them all."
        )

    def how(self, path: str) -> HowToQuantize | None:
        """How the parameter at `path` is quantized, None when it stays as it is."""
        return self.leaf(path).how

    @functools.cached_property
    def totals(self) -> Totals:
        quantized = [leaf for leaf in self.leaves if leaf.how is not None]
        weights = sum(leaf.size for leaf in quantized)
        bits = 8 * sum(leaf.bytes_after for leaf in quantized)
        macs = sum(plan.site.macs for plan in self.sites)
        quantized_macs = sum(plan.site.macs for plan in self.sites if plan.quantized)
        return Totals(
            parameters=sum(leaf.size for leaf in self.leaves),
            quantized_parameters=weights,
            bytes_before=sum(leaf.bytes_before for leaf in self.leaves),
            bytes_after=sum(leaf.bytes_after for leaf in self.leaves),
            bits_per_weight=bits / weights if weights else 0.0,
            share_of_macs=quantized_macs / macs if macs else 0.0,
            sites=len(self.sites),
            quantized_sites=sum(plan.quantized for plan in self.sites),
        )

    def to_json(self) -> str:
        """The Plan as a JSON document that `Plan.from_json` reads back to an equal Plan."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The Plan that `to_json` wrote."""
        return plan_from_json(cls, text)

    def table(self, *, fold: bool = True, width: int | None = None) -> str:
        """The Plan as text of the terminal's width; `fold=False` gives every layer its own row."""
        return render(self, fold=fold, width=width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return render_html(self)

    def diff(self, other: Plan) -> PlanDiff:
        """What `other` does differently."""
        if not isinstance(other, Plan):
            raise TypeError(
                f"plan.diff compares with another plan, not a {type(other).__name__}: "
                "plan.diff(fewbit.plan(model, other_rules, *inputs)), or Plan.from_json(text)."
            )
        return diff_plans(self, other)
