"""The amax histories of a model that trains with delayed scales.

Which there are, whether they are given, and after training the scales that they become.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import key_name, nearest
from fewbit.numerics import should_quantize
from fewbit.planning import (
    SIDES,
    Decision,
    Plan,
    PlanError,
    Request,
    ScalePlan,
    insert,
    name_at,
    name_of_site,
    remembered,
    request,
    scale_name,
    weight_operand,
)
from fewbit.qarray import HowToQuantize, history_length
from fewbit.rules import QuantizationRule
from fewbit.tracing import Program, TracedSite
from fewbit.training._delayed import SUFFIX

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
_NEAR = " There is {}, which no Site here has."
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
        for k, side in enumerate(SIDES):
            if ts.sources[k] is None and should_quantize(getattr(ts.site, side).dtype):
                found += _of_site(ts, side, remembered(rule, k), rule)
        if gradients:
            found += _of_site(ts, GRADIENT, remembered(rule, None), rule)
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


def _of_site(ts: TracedSite, side: str, length: int | None, rule: Any) -> list[HistoryPlan]:
    site = ts.site
    if not length:
        return []
    if ts.in_rule is not None:
        rule_of = ts.in_rule.removesuffix("_call")
        raise PlanError(_MSG_DERIVATIVE.format(site=site.id, rule_of=rule_of, rule=rule))
    if ts.in_shards:
        raise PlanError(_MSG_SHARDS.format(site=site.id, rule=rule))
    if site.trips != prod(ts.layers):
        trips = site.trips // prod(ts.layers)
        raise PlanError(_MSG_LOOP.format(site=site.id, trips=trips, rule=rule))
    name = name_at(site.path, site.op_id, side) + SUFFIX
    return [HistoryPlan(name, site.id, side, (*ts.layers, length))]


def check_histories(plans: Mapping[str, HistoryPlan], values: Mapping[str, Any], what: str) -> None:
    """Every history is there, as long as its rule says."""
    missing = [name for name in plans if name not in values]
    if missing:
        extra = [name for name in values if name not in plans and name.endswith(SUFFIX)]
        raise ValueError(
            _MSG_MISSING.format(
                what=what,
                name=missing[0],
                site=plans[missing[0]].site,
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                near=nearest(missing[0], extra, _NEAR, cutoff=0.6),
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


_MSG_EMPTY = (
    "The history '{name}' of {site} is empty: no step has reached this activation, so there is no "
    "scale to serve it with. Pass the histories that came out of the last training step, not those "
    "of init."
)
_OWN_METHODS = ("lhs_calibration_method", "rhs_calibration_method")
_MSG_OWN_METHOD = (
    "{rule!r} trains one operand with a delayed range and another with a method of its own "
    "(additional_qt_config[{name!r}]). What serves has static ranges for all activations of a rule "
    "or for none. Give these products a rule each, or quantize the trained parameters with rules "
    "for serving: quantize_params(params, fewbit.plan(model, rules, *inputs))."
)


def serving_rule(rule: QuantizationRule) -> QuantizationRule:
    """The rule by which a trained model serves: what was delayed is static then.

    >>> from fewbit.rules import QtRule
    >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_calibration_method='delayed')
    >>> serving_rule(rule)
    QtRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True,
    act_calibration_method='absmax')
    """
    if not getattr(rule, "delays", False):
        return rule
    changes: dict[str, Any] = {}
    if history_length(rule.act_calibration_method) is not None and rule.act_qtype is not None:
        given = getattr(rule, "additional_qt_config", None) or {}
        own = [name for name in _OWN_METHODS if name in given]
        if own:
            raise ValueError(_MSG_OWN_METHOD.format(rule=rule, name=own[0]))
        changes |= dict(act_calibration_method="absmax", act_static_scale=True)
    for name in ("weight_calibration_method", "bwd_calibration_method"):
        if history_length(getattr(rule, name)) is not None:
            changes[name] = "absmax"
    return rule.replace(**changes)


def by_name(histories: Any, nested: bool = True) -> dict[str, Any]:
    """Histories by full name, from a tree of modules or from a function's mapping of Sites."""
    flat, _ = jax.tree_util.tree_flatten_with_path(histories)
    if nested:
        return {key_name(path): value for path, value in flat}
    return {name_of_site(path[0].key, path[1].key): value for path, value in flat}


@dataclass(frozen=True)
class Remembered:
    """The ranges that histories give: of weights by path, of activations by name."""

    weights: dict[str, Any]
    activations: dict[str, Any] = field(default_factory=dict)

    def statistics(self, stats: Any, made: Plan, by_site: bool = False) -> Any:
        """The statistics that make these the static scales of a plan, beside those given."""
        scales = {scale.name: scale for scale in made.scales}
        result = dict(stats) if stats is not None else {}
        for name, absmax in self.activations.items():
            stat = _statistic(scales[name], absmax)
            if by_site:
                site, side = scales[name].site, scales[name].side
                result[site] = {**result.get(site, {}), side: stat}
            else:
                result = insert(result, name, stat)
        return result or None


def remembered_ranges(
    plans: Mapping[str, HistoryPlan], made: Plan, histories: Mapping[str, Any]
) -> Remembered:
    """What each delayed scale of a training is made from at its end."""
    check_histories(plans, histories, "What is converted")
    scales = {scale.name for scale in made.scales}
    found = Remembered({})
    for name, plan in plans.items():
        if plan.side == GRADIENT:
            continue
        absmax = jnp.max(jnp.asarray(histories[name]), axis=-1)
        empty = bool(jnp.any(absmax <= 0))
        if plan.leaf is not None and plan.how is not None:
            if not empty:  # a weight that no step has seen is measured, as its first step does
                shape = next(leaf.shape for leaf in made.leaves if leaf.path == plan.leaf)
                layers = [n if k in plan.how.channelwise_axes else 1 for k, n in enumerate(shape)]
                found.weights[plan.leaf] = absmax.reshape(layers)
        elif name.removesuffix(SUFFIX) in scales:
            if empty:
                raise ValueError(_MSG_EMPTY.format(name=name, site=plan.site))
            found.activations[name.removesuffix(SUFFIX)] = absmax
    return found


def _statistic(scale: ScalePlan, absmax: Any) -> dict[str, Any]:
    shape = (*absmax.shape, *(1,) * (len(scale.shape) - absmax.ndim))
    value = jnp.asarray(np.asarray(absmax, np.float32).reshape(shape))
    count = jnp.ones(absmax.shape, jnp.int32)
    return {"count": count, "sum_of_absmax": value, "max_of_absmax": value}
