"""Adapters while a model runs: found, checked, picked for the layer, multiplied.

The factors ride beside the parameters, as static scales do (`static_run`), so that every body of
the program can reach them and gradients come back through every body.
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit._plan_adapter import LORA_A, LORA_B, AdapterPlan
from fewbit.adapters import Shaped, shaped
from fewbit.decisions import weight_operand
from fewbit.provenance import Origin
from fewbit.static_run import StaticScales
from fewbit.trace import TracedSite

DROPOUT = "dropout key of the adapters"  # no parameter has such a name

_MSG_MISSING = (
    "The adapter '{name}' of {site} is missing from the parameters{more}. Make fresh adapters with "
    "params = fewbit.lora.init(plan, params, key), or read trained ones with "
    "fewbit.lora.load_adapters(path, params, plan).{near} Without adapters, run the model with "
    "PtqProvider(fewbit.lora.base_rules(rules))."
)
_MSG_SHAPE = (
    "The adapter '{name}' has shape {found}, but {site} needs {wanted} (rank {rank}): {why}"
)
_MSG_RANK = (
    "it was made for rank {found}. Write rank={found} in {rule!r}, or make adapters of rank {rank} "
    "with fewbit.lora.init(plan, params, key)."
)
_MSG_OTHER = (
    "it was made for another model or another op. Make it again with a plan of this model: "
    "fewbit.lora.init(plan, params, key)."
)
_MSG_UNUSED = (
    "The parameters hold the adapter '{name}', but no LoraRule makes one for '{leaf}', so it would "
    "not be used. Let a rule match it, take it out with fewbit.lora.without_adapters(params), or "
    "make the provider with strict=False."
)


@dataclass(frozen=True)
class SiteAdapter:
    """The adapter of the weight at one Site: the factors of the layer being run, and what to do."""

    plan: AdapterPlan
    here: Shaped  # as this Site would shape it
    side: int
    a: Any
    b: Any
    key: Any = None  # for dropout; None: deterministic

    @property
    def fits(self) -> bool:
        """Whether this Site can use the factors as they are."""
        return self.plan.geometry == self.here.plan.geometry

    def factors(self, dtype: Any) -> tuple[Any, Any]:
        return self.a.astype(dtype), self.b.astype(dtype)

    def scaled(self, out: Any) -> Any:
        return out * jnp.asarray(self.plan.scale, out.dtype)

    def dropped(self, x: Any) -> Any:
        """The product's other operand, some of it left out while training."""
        rate = self.plan.rule.dropout
        if self.key is None or not rate:
            return x
        kept = jax.random.bernoulli(self.key, 1 - rate, x.shape)
        return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))

    def update(self, dtype: Any) -> Any:
        """A B as the operand of this Site, for uses that the factors do not fit."""
        whole = self.plan.product(*self.factors(dtype), one_layer=True)
        here = self.here.plan
        gone = {i for group in here.stack for i in group}
        order = [i for i in range(len(here.split)) if i not in gone]
        atoms = whole.reshape([here.split[i] for i in order])
        seen = [i for group in self.here.axes for i in group]
        return atoms.transpose([order.index(i) for i in seen]).reshape(self.here.shape)


@dataclass
class Adapters:
    """The adapters of a run, by parameter path."""

    plans: Mapping[str, AdapterPlan] = field(default_factory=dict)
    static: StaticScales = field(default_factory=StaticScales)

    def at(self, ts: TracedSite) -> SiteAdapter | None:
        """The adapter of the Site's weight, for the layer that is being run."""
        plan = self.plans.get(ts.site.weight or "")
        side = weight_operand(ts)
        if plan is None or side is None:
            return None
        origin: Origin = ts.sources[side]  # type: ignore[assignment]
        values, layers = self.static.state

        def factor(name: str) -> Any:
            value = values[name]
            for depth, _ in origin.picked:
                value = lax.dynamic_index_in_dim(value, layers[depth], 0, keepdims=False)
            return value

        a, b = map(factor, plan.names)
        here = shaped(ts, plan.rule, plan.dtype)
        return SiteAdapter(plan, here, side, a, b, self.key(ts))

    def key(self, ts: TracedSite) -> Any:
        """Randomness of its own for each Site and layer."""
        values, layers = self.static.state
        key = values.get(DROPOUT)
        if key is None:
            return None
        key = jax.random.fold_in(key, zlib.crc32(ts.site.id.encode()))
        for i in layers[: len(ts.layers)]:
            key = jax.random.fold_in(key, i)
        return key


def check_adapters(
    plans: Mapping[str, AdapterPlan],
    values: Mapping[str, Any],
    strict: bool,
    used: Collection[str | None] | None = None,
) -> None:
    """Every planned adapter is there, in its shape; strictly, none is there without a plan.

    `used` are the parameters of the program: the adapters of others (another method's) may wait.
    """
    wanted = {name: plan for plan in plans.values() for name in plan.names}
    missing = [name for name in wanted if name not in values]
    given = [name for name in values if name.endswith((LORA_A, LORA_B))]
    extra = [name for name in given if name not in wanted]
    if missing:
        close = get_close_matches(missing[0], extra, 1)
        raise ValueError(
            _MSG_MISSING.format(
                name=missing[0],
                site=wanted[missing[0]].site,
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                near=f" There is '{close[0]}', which no Site here has." if close else "",
            )
        )
    for name, plan in wanted.items():
        check_shape(name, tuple(values[name].shape), plan)
    for name in extra if strict else ():
        leaf = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if used is None or leaf in used:
            raise ValueError(_MSG_UNUSED.format(name=name, leaf=leaf))


def check_shape(name: str, found: tuple[int, ...], plan: AdapterPlan) -> None:
    """A factor has the shape that the plan says; if only the rank differs, that is said."""
    wanted = plan.shapes[name]
    if found == wanted:
        return
    axis = len(wanted) - 1 if name.endswith(LORA_A) else len(plan.stack + plan.batch)
    same = len(found) == len(wanted) and found[:axis] + found[axis + 1 :] == (
        wanted[:axis] + wanted[axis + 1 :]
    )
    why = _MSG_OTHER
    if same:
        why = _MSG_RANK.format(found=found[axis], rank=plan.rank, rule=plan.rule)
    text = dict(name=name, found=found, wanted=wanted, site=plan.site, rank=plan.rank)
    raise ValueError(_MSG_SHAPE.format(**text, why=why))
