"""What the plan of a model that trains says of the two gradient products of a Site."""

from fewbit.calibration import parse_method
from fewbit.decisions import Request, activation_fields, weight_operand
from fewbit.numerics import format_of, qtype_name, should_quantize
from fewbit.rules import QtRule, QuantizationRule
from fewbit.trace import TracedSite


def gradient_products(ts: TracedSite, rule: QtRule, stored: Request | None) -> tuple[str, str]:
    """The types of (incoming gradient, residual) for the gradients of lhs and of rhs."""
    return _product(ts, rule, stored, 0), _product(ts, rule, stored, 1)


def _product(ts: TracedSite, rule: QtRule, stored: Request | None, side: int) -> str:
    own, name = dict(rule.additional_qt_config or {}), ("dlhs", "drhs")[side]
    if not should_quantize((ts.site.lhs, ts.site.rhs)[side].dtype):
        return "-"
    gradient = own.get(f"{name}_grad_qtype", rule.bwd_qtype)
    if gradient is None:
        return "float"
    residual = own.get(f"{name}_residual_qtype")
    codes = None if own.get("use_original_residuals") else _codes(ts, rule, stored, 1 - side)
    text = f"{qtype_name(gradient)} x {codes or (qtype_name(residual) if residual else 'float')}"
    is_weight = stored is not None and side == weight_operand(ts)
    tile = own.get(f"{name}_tile_size", rule.bwd_weight_grad_tile_size if is_weight else None)
    if tile is not None:
        text += f" tile {tile:g}"
    return text + (" stochastic" if rule.bwd_stochastic_rounding is not None else "")


def _codes(ts: TracedSite, rule: QtRule, stored: Request | None, side: int) -> str | None:
    """The type of an operand whose forward codes serve a gradient product; None if they do not."""
    if stored is not None and side == weight_operand(ts):
        qtype, method = stored.how.qtype, stored.how.calibration_method
        tiled = bool(stored.how.tiled_axes)
    else:
        fields = activation_fields(rule, side)
        qtype, method, tiled = fields["qtype"], fields["calibration_method"], fields["tile_size"]
    if qtype is None or tiled or parse_method(method).asymmetric:
        return None
    form = format_of(qtype)
    return None if form.kind == "table" or form.tile is not None else qtype_name(qtype)


def idle_settings(number: int, rule: QuantizationRule) -> list[str]:
    """Notes on what a rule sets for gradients that it leaves float.

    >>> print(*idle_settings(0, QtRule(weight_qtype='int8', bwd_stochastic_rounding='uniform')))
    rule 0: bwd_stochastic_rounding='uniform' acts on nothing, gradients are float (bwd_qtype=None)
    """
    if not isinstance(rule, QtRule) or rule.quantizes_gradients:
        return []
    idle = ("bwd_stochastic_rounding", "bwd_weight_grad_tile_size")
    return [
        f"rule {number}: {name}={value!r} acts on nothing, gradients are float (bwd_qtype=None)"
        for name in idle
        if (value := getattr(rule, name)) is not None
    ]
