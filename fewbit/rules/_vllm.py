"""Rules for vLLM on TPUs (tpu-inference), which quantizes a float checkpoint by rules of Qwix.

Its config holds the arguments of Qwix's `QuantizationRule`, of the version that it pins (0.1.2).
What a rule of ours says beyond that would be dropped there in silence, so it is an error here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fewbit.numerics import qtype_name
from fewbit.qarray import parse_method
from fewbit.rules._rules import QuantizationRule, changed_fields

_MSG_CANNOT = "Rule {number}, {rule!r}, cannot be said in rules for vLLM: {why}"
_WHY_KIND = (
    "it is a {kind}, and only QuantizationRules are served. {fields} would be lost; write a "
    "QuantizationRule for the model that serves."
)
_WHY_FIELD = {
    "scale_dtype": (
        "scales have no dtype of their own in a rule there. Leave scale_dtype out; the config's "
        "own 'scale_dtype', beside its rules, is for all of them."
    ),
    "act_static_scale": (
        "static scales are made from statistics, which these rules do not carry, and the server "
        "would make them from its dummy inputs. Leave act_static_scale out: ranges of each batch."
    ),
    "act_static_reduction": "there are no static scales. Leave act_static_reduction out.",
}
_WHY_TILES = (
    "tile_size is one length there, not a mapping of axes. Give the length along what the product "
    "sums over."
)
_WHY_TYPE = "{field}={name!r} is not known there. Types are {known}."
_WHY_METHOD = "{field}={method!r} is not known there. Methods are {known}."
_WHY_ASYMMETRIC = (
    "{field}={method!r} needs a zero point, which exists there for int8 and int4 only, not for "
    "{name}. Use 'absmax'."
)
_WHY_LOOK_UP = (
    "look-ups ('take') are no op there, and tables stay float. Leave 'take' out of op_names."
)
_MSG_ONE = "One rule where a list of rules is expected. Write [{rule!r}]."
_MSG_NO_RULE = "rules_to_vllm takes QuantizationRules, got {found} as rule {number}."

_METHODS = ("absmax", "minmax", "rms", "fixed")
_TYPES = (
    *("int2", "int3", "int4", "int5", "int6", "int7", "int8", "nf4", "float4_e2m1fn"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
_ZERO_POINTS = ("int8", "int4")


def rules_to_vllm(rules: Iterable[QuantizationRule]) -> list[dict[str, Any]]:
    """The rules as vLLM on TPUs reads them, for its option `additional_config`.

    Each is a dict of plain values, and together they are
    `additional_config={"quantization": {"qwix": {"rules": rules_to_vllm(rules)}}}`: the float
    checkpoint is quantized by them when it is loaded. A rule that says what that format cannot
    say (static scales, adapters, training, types and calibration methods of fewbit's own) is an
    error that names it.

    >>> rules_to_vllm([
    ...     QuantizationRule(module_path=".*/router", weight_qtype=None),
    ...     QuantizationRule(weight_qtype="int4", act_qtype="fp8", tile_size=128),
    ... ])  # doctest: +NORMALIZE_WHITESPACE
    [{'module_path': '.*/router'},
     {'module_path': '.*', 'weight_qtype': 'int4', 'act_qtype': 'float8_e4m3fn', 'tile_size': 128}]
    """
    if isinstance(rules, QuantizationRule):
        raise TypeError(_MSG_ONE.format(rule=rules))
    return [_as_dict(number, rule) for number, rule in enumerate(rules)]


def _as_dict(number: int, rule: Any) -> dict[str, Any]:
    if not isinstance(rule, QuantizationRule):
        raise TypeError(_MSG_NO_RULE.format(found=type(rule).__name__, number=number))
    fields = changed_fields(rule)
    why = _why_not(rule, fields)
    if why is not None:
        raise ValueError(_MSG_CANNOT.format(number=number, rule=rule, why=why))
    # Read by a program of another library: names and plain values, nothing of ours.
    return {"module_path": rule.module_path} | {
        name: _plain(name, value) for name, value in fields.items() if value is not None
    }


def _plain(name: str, value: Any) -> Any:
    if name.endswith("_qtype"):
        return qtype_name(value)
    return list(value) if name in ("op_names", "act_batch_axes") else value


def _why_not(rule: QuantizationRule, fields: Mapping[str, Any]) -> str | None:
    """What of a rule cannot be said; None if all can."""
    common = {field.name for field in dataclasses.fields(QuantizationRule)}
    own = [name for name in fields if name not in common]
    if own:
        return _WHY_KIND.format(kind=type(rule).__name__, fields=", ".join(own))
    for name, why in _WHY_FIELD.items():
        if fields.get(name):
            return why
    if isinstance(rule.tile_size, Mapping):
        return _WHY_TILES
    if "take" in rule.op_names:
        return _WHY_LOOK_UP
    return _why_not_operand(rule, "weight") or _why_not_operand(rule, "act")


def _why_not_operand(rule: QuantizationRule, operand: str) -> str | None:
    qtype = getattr(rule, f"{operand}_qtype")
    if qtype is None:
        return None
    name, field = qtype_name(qtype), f"{operand}_calibration_method"
    if name not in _TYPES:
        return _WHY_TYPE.format(field=f"{operand}_qtype", name=name, known=", ".join(_TYPES))
    method = getattr(rule, field) or "absmax"
    parsed = parse_method(method)
    if parsed.name not in _METHODS:
        return _WHY_METHOD.format(field=field, method=method, known=", ".join(_METHODS))
    if parsed.asymmetric and name not in _ZERO_POINTS:
        return _WHY_ASYMMETRIC.format(field=field, method=method, name=name)
    return None
