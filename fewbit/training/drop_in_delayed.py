"""Delayed scales of a single layer's product: its amax histories, and operands scaled by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fewbit.calibration import history_length
from fewbit.numerics import should_quantize
from fewbit.qarray import HowToQuantize
from fewbit.rules import QtRule
from fewbit.training.delayed import SUFFIX, delayed_range, empty_history, quantize_delayed, seen
from fewbit.training.paired import Paired, clip_gradient

_MSG_HISTORIES = (
    "{who} got amax histories of the shapes {found}, but its rule needs {wanted}. Begin with "
    "fewbit.training.rule_histories(rule), and differentiate with respect to them: their gradient "
    "is what they are after the step."
)


class Prepared(NamedTuple):
    """The operands of a product as delayed scales make them, and what the step tells histories."""

    operands: tuple[Any, Any]
    grad_range: Any = None
    ranges: Mapping[str, Any] = {}
    amax: Mapping[str, Any] = {}

    def told(self, out: jax.Array) -> jax.Array:
        """The product, through whose gradient the histories learn of the step."""
        return seen(out, dict(self.ranges), dict(self.amax)) if self.ranges else out


def history_lengths(rule: QtRule) -> dict[str, int]:
    """How long the history of each side is that has one; lhs is the activation, rhs the weight.

    >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_calibration_method='delayed,16')
    >>> history_lengths(rule)
    {'lhs': 16}
    """
    own = rule.additional_qt_config or {}
    sides = {
        "lhs": (own.get("lhs_qtype", rule.act_qtype), rule.act_calibration_method),
        "rhs": (own.get("rhs_qtype", rule.weight_qtype), rule.weight_calibration_method),
        "grad": (rule.bwd_qtype, rule.bwd_calibration_method),
    }
    return {
        side: length
        for side, (qtype, method) in sides.items()
        if qtype is not None and f"{side}_calibration_method" not in own
        for length in [history_length(method)]
        if length is not None
    }


def rule_histories(rule: QtRule) -> dict[str, jax.Array]:
    """The histories that a single layer with this rule begins with: of no steps.

    >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_calibration_method='delayed,2')
    >>> rule_histories(rule)
    {'lhs_amax_history': Array([0., 0.], dtype=float32)}
    """
    return {side + SUFFIX: empty_history(n) for side, n in history_lengths(rule).items()}


def measured(rule: QtRule, gradients: bool = False) -> Any:
    """The rule with ranges that are measured, where operands or (if told) gradients delay them."""
    fields = ["weight_calibration_method", "act_calibration_method"]
    fields += ["bwd_calibration_method"] if gradients else []
    delayed = [name for name in fields if history_length(getattr(rule, name)) is not None]
    return rule.replace(**dict.fromkeys(delayed, "absmax"))


def check_histories(who: str, rule: Any, histories: Mapping[str, Any]) -> None:
    """Raise unless these are the histories of the rule."""
    delays = isinstance(rule, QtRule) and rule.delays
    wanted = {side + SUFFIX: (n,) for side, n in history_lengths(rule).items()} if delays else {}
    found = {name: tuple(value.shape) for name, value in histories.items()}
    if found != wanted:
        raise ValueError(_MSG_HISTORIES.format(who=who, found=found, wanted=wanted))


def prepared(
    rule: QtRule, config: Any, histories: Mapping[str, Any], lhs: Any, rhs: Any
) -> Prepared:
    """Both operands, each delayed one with the codes that its history scales."""
    operands: list[Any] = [lhs, rhs]
    ranges: dict[str, Any] = {}
    amax: dict[str, Any] = {}
    found = {side: delayed_range(histories[side + SUFFIX]) for side in history_lengths(rule)}
    for k, side in enumerate(("lhs", "rhs")):
        x = operands[k]
        if side not in found or isinstance(x, Paired) or not should_quantize(x.dtype):
            continue
        how = HowToQuantize(qtype=getattr(config, f"{side}_qtype"))
        q, amax[side] = quantize_delayed(x, found[side], how)
        ranges[side] = found[side]
        operands[k] = Paired(x if config.disable_gradient_clipping else clip_gradient(x, q), q)
    return Prepared((operands[0], operands[1]), found.get("grad"), ranges, amax)
