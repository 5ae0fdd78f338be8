"""What a rule may say of one operand of one training product: `additional_qt_config`, checked.

The fields are those of `fewbit.DotGeneralQtConfig`, which lies above the rules and cannot be asked;
a test holds the two lists together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbit._rule_checks import check_bool, check_calibration, check_qtype, check_tile, nearest

_PARTS = ("lhs", "rhs", "dlhs_grad", "drhs_grad", "dlhs_residual", "drhs_residual")
_TYPES = tuple(f"{part}_qtype" for part in _PARTS)
_METHODS = tuple(f"{part}_calibration_method" for part in _PARTS)
_TILES = ("tile_size", "dlhs_tile_size", "drhs_tile_size")
_TRUTHS = (
    *(f"{part}_disable_channelwise_axes" for part in _PARTS),
    "disable_gradient_clipping",
    "use_original_residuals",
)
_FUNCTIONS = (
    *(f"{side}_collect_quant_stat" for side in ("lhs", "rhs")),
    *(f"{side}_stochastic_rounding_noise_fn" for side in ("dlhs", "drhs")),
)
_NOT_HERE = ("grad_delayed_range", "sparsity_rule")
QT_FIELDS = (*_TYPES, *_METHODS, *_TILES, *_TRUTHS, *_FUNCTIONS, *_NOT_HERE)

_MSG_MAPPING = "{where}: {field} must be a mapping from field name to value, got {value!r}."
_MSG_UNKNOWN = (
    "{where}: {field} has {name!r}, which is no field of fewbit.DotGeneralQtConfig.{near}"
)
_MSG_FUNCTION = "{where}: {field}[{name!r}] must be a function or None, got {value!r}.{fix}"
_FIX_NOISE = " For all steps write bwd_stochastic_rounding='uniform' in the rule instead."
_MSG_COLLECT = (
    "{where}: {field}[{name!r}] would see one operand of one product, and what serves afterwards "
    "would not. Write act_static_scale=True in the rule to collect ranges while training, or give "
    "the function to fewbit.DotGeneralQtConfig where fewbit.dot_general_qt is called."
)
_MSG_DELAYED = (
    "{where}: {field}[{name!r}]={value!r} takes the range from the steps before, which is kept by "
    "rule. Write {instead}={value!r} in the rule instead."
)
_INSTEAD = {
    "lhs": "act_calibration_method (of a weight: weight_calibration_method)",
    "rhs": "weight_calibration_method (of an activation: act_calibration_method)",
}
_MSG_RANGE = (
    "{where}: {field}['grad_delayed_range'] is made at each step from a history. Write "
    "bwd_calibration_method='delayed' in the rule instead."
)
_MSG_SPARSITY = (
    "{where}: {field}['sparsity_rule'] is not there yet. Prune the float weights before they are "
    "quantized, and leave it out."
)


def check_qt_config(where: str, field: str, value: Any) -> dict[str, Any] | None:
    """The fields with their values in standard form.

    >>> check_qt_config('rule', 'additional_qt_config', {'dlhs_grad_qtype': 'int8'})
    {'dlhs_grad_qtype': dtype('int8')}
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(_MSG_MAPPING.format(where=where, field=field, value=value))
    return {name: _checked(where, field, name, item) for name, item in value.items()}


def _checked(where: str, field: str, name: str, item: Any) -> Any:
    place = f"{field}[{name!r}]"
    if name not in QT_FIELDS:
        near = nearest(name, QT_FIELDS)
        raise ValueError(_MSG_UNKNOWN.format(where=where, field=field, name=name, near=near))
    if name in _TYPES:
        return check_qtype(where, place, item)
    if name in _METHODS:
        if isinstance(item, str) and item.split(",")[0].strip() == "delayed":
            part = name.removesuffix("_calibration_method")
            instead = _INSTEAD.get(part, "bwd_calibration_method")
            text = dict(where=where, field=field, name=name, value=item, instead=instead)
            raise ValueError(_MSG_DELAYED.format(**text))
        return None if item is None else check_calibration(where, place, item, None)
    if name in _TILES:
        return check_tile(where, place, item, ())
    if name in _TRUTHS:
        return check_bool(where, place, item)
    if name in _FUNCTIONS:
        if item is not None and not callable(item):
            fix = _FIX_NOISE if name.endswith("noise_fn") else ""
            text = dict(where=where, field=field, name=name, value=item, fix=fix)
            raise TypeError(_MSG_FUNCTION.format(**text))
        if item is not None and name.endswith("collect_quant_stat"):
            raise ValueError(_MSG_COLLECT.format(where=where, field=field, name=name))
        return item
    if item is not None:
        if name == "sparsity_rule":
            raise NotImplementedError(_MSG_SPARSITY.format(where=where, field=field))
        raise ValueError(_MSG_RANGE.format(where=where, field=field))
    return item
