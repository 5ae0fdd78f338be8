"""From the histories of a training with delayed scales to the scales that serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._plan import Plan, ScalePlan
from fewbit.calibration import history_length
from fewbit.calls import key_name
from fewbit.rules import QuantizationRule
from fewbit.static_scales import insert, name_of_site
from fewbit.trained_histories import GRADIENT, HistoryPlan, check_histories
from fewbit.training.delayed import SUFFIX

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
            axes = tuple(plan.how.channelwise_axes)
            if not empty:  # a weight that no step has seen is measured, as its first step does
                found.weights[plan.leaf] = _spread(absmax, axes, made, plan.leaf)
        elif name.removesuffix(SUFFIX) in scales:
            if empty:
                raise ValueError(_MSG_EMPTY.format(name=name, site=plan.site))
            found.activations[name.removesuffix(SUFFIX)] = absmax
    return found


def _spread(absmax: Any, axes: tuple[int, ...], made: Plan, path: str) -> Any:
    """One range for each layer of a leaf, in the rank of the leaf."""
    leaf = next(leaf for leaf in made.leaves if leaf.path == path)
    shape = [n if axis in axes else 1 for axis, n in enumerate(leaf.shape)]
    return absmax.reshape(shape)


def _statistic(scale: ScalePlan, absmax: Any) -> dict[str, Any]:
    shape = (*absmax.shape, *(1,) * (len(scale.shape) - absmax.ndim))
    value = np.asarray(absmax, np.float32).reshape(shape)
    count = np.ones(absmax.shape, np.int32)
    return {
        "count": jnp.asarray(count),
        "sum_of_absmax": jnp.asarray(value),
        "max_of_absmax": jnp.asarray(value),
    }
