"""The amax histories of a model that trains with delayed scales: which there are, found, checked.

One history per operand and Site, `<module>/<op_id>_lhs_amax_history` (`_rhs`, `_grad`), rides
beside the parameters like a static scale, with the layers of a scan in front. A weight has one
where its storage was decided, however many Sites read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._plan_messages import PlanError
from fewbit.decisions import Decision, Request, remembered, request, weight_operand
from fewbit.numerics import should_quantize
from fewbit.qarray import HowToQuantize
from fewbit.static_scales import SIDES, name_at, scale_name
from fewbit.trace import Program, TracedSite
from fewbit.training.delayed import SUFFIX, quantize_delayed, seen
from fewbit.training.paired import Paired, clip_gradient

GRADIENT = "grad"

_MSG_LOOP = (
    "{site} runs {trips} times in a step, so the histories of its runs would be added up: "
    "'delayed' needs a product that runs once, or once per layer of a scan. Give this path a rule "
    "of its own with 'absmax' before the general one: {rule!r}."
)
_MSG_DERIVATIVE = (
    "{site} stands inside a {rule_of}, whose own derivative knows of no history, so 'delayed' "
    "would never learn a range there. Give this path a rule of its own with 'absmax' before the "
    "general one: {rule!r}."
)
_MSG_SHARDS = (
    "{site} stands inside a shard_map, where each device would add its own history. Let jit place "
    "the arrays (NamedSharding), which takes the maximum over all devices, or give this path a "
    "rule of its own with 'absmax' before the general one: {rule!r}."
)
_MSG_MISSING = (
    "{what} trains with delayed scales, but there is no history '{name}' for {site}{more}. Linen: "
    "model.init makes them, model.apply({{'params': params, '_overwrite_with_gradient': "
    "histories}}, x) takes them; a function: f(params, x, "
    "amax_history=f.init_amax_history(params, x)); NNX models and Keras layers hold theirs.{near}"
)
_MSG_SHAPE = (
    "The history '{name}' has shape {found}, but {site} needs {wanted}: {layers}the length that "
    "the rule says. Start with the histories that init makes for this model and these rules."
)


@dataclass(frozen=True)
class HistoryPlan:
    """One history: its name, whose it is, and its shape with the layers in front."""

    name: str
    site: str
    side: str
    shape: tuple[int, ...]
    leaf: str | None = None
    how: HowToQuantize | None = None  # of a weight: per layer


def planned_histories(
    program: Program,
    decisions: Mapping[str, Decision],
    requests: Mapping[str, Request],
    gradients: bool = True,
) -> dict[str, HistoryPlan]:
    """All histories of a program, by name. Where one would be wrong it is refused."""
    found: list[HistoryPlan] = []
    for ts in program.sites:
        rule = decisions[ts.site.id].rule
        if rule is None or ts.site.op == "take":
            continue
        infos = (ts.site.lhs, ts.site.rhs)
        for side in (0, 1):
            length = remembered(rule, side) or 0
            if length and ts.sources[side] is None and should_quantize(infos[side].dtype):
                found.append(_of_site(ts, SIDES[side], length, rule))
        length = remembered(rule, None) or 0
        if length and gradients:
            found.append(_of_site(ts, GRADIENT, length, rule))
    for leaf, wanted in requests.items():
        ts, stored = wanted.site, weight_operand(wanted.site)
        length = stored is not None and remembered(wanted.rule, stored, is_weight=True) or 0
        if stored is None or not length:
            continue
        shared = request(ts, wanted.rule, per_tensor=True)
        assert shared is not None, f"{ts.site.id} asked for its weight before"
        shape = ts.sources[stored].leaf_shape  # type: ignore[union-attr]
        layers = tuple(shape[axis] for axis in shared.how.channelwise_axes)
        name = scale_name(ts.site, stored) + SUFFIX
        found.append(
            HistoryPlan(name, ts.site.id, SIDES[stored], (*layers, length), leaf, shared.how)
        )
    return {plan.name: plan for plan in found}


def _of_site(ts: TracedSite, side: str, length: int, rule: Any) -> HistoryPlan:
    site = ts.site
    if ts.in_rule is not None:
        rule_of = ts.in_rule.removesuffix("_call")
        raise PlanError(_MSG_DERIVATIVE.format(site=site.id, rule_of=rule_of, rule=rule))
    if ts.in_shards:
        raise PlanError(_MSG_SHARDS.format(site=site.id, rule=rule))
    if site.trips != prod(ts.layers):
        trips = site.trips // prod(ts.layers)
        raise PlanError(_MSG_LOOP.format(site=site.id, trips=trips, rule=rule))
    name = name_at(site.path, site.op_id, side) + SUFFIX
    return HistoryPlan(name, site.id, side, (*ts.layers, length))


def check_histories(plans: Mapping[str, HistoryPlan], values: Mapping[str, Any], what: str) -> None:
    """Every history is there, as long as its rule says."""
    missing = [name for name in plans if name not in values]
    if missing:
        extra = [name for name in values if name not in plans and name.endswith(SUFFIX)]
        close = get_close_matches(missing[0], extra, 1)
        raise ValueError(
            _MSG_MISSING.format(
                what=what,
                name=missing[0],
                site=plans[missing[0]].site,
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                near=f" There is '{close[0]}', which no Site here has." if close else "",
            )
        )
    for name, plan in plans.items():
        found = tuple(values[name].shape)
        if found != plan.shape:
            layers = f"{plan.shape[:-1]} layers and " if len(plan.shape) > 1 else ""
            text = dict(name=name, found=found, site=plan.site, wanted=plan.shape, layers=layers)
            raise ValueError(_MSG_SHAPE.format(**text))


def empty_histories(plans: Mapping[str, HistoryPlan]) -> dict[str, jax.Array]:
    """Histories of no steps, by name."""
    return {name: jnp.zeros(plan.shape, jnp.float32) for name, plan in plans.items()}


def delayed_weights(
    plans: Mapping[str, HistoryPlan], ranges: Mapping[str, Any]
) -> dict[str, tuple[HowToQuantize, Any]]:
    """How each parameter with a delayed scale is quantized, and its range, by path."""
    return {
        plan.leaf: (plan.how, ranges[name])
        for name, plan in plans.items()
        if plan.leaf is not None and plan.how is not None
    }


def delayed_pair(array: jax.Array, how: HowToQuantize, delayed: Any, clip: bool) -> Paired:
    """A float parameter with its codes, as the steps before scale them."""
    q, amax = quantize_delayed(array, delayed, how)
    return Paired(seen(clip_gradient(array, q) if clip else array, delayed, amax), q)
