"""Which layers calibration gave a range, and what is said of the others and of odd ranges."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fewbit.keras._calibration import CalibrationError, Collector
from fewbit.keras._planning import LayerPlan
from fewbit.static_statistics import is_fixed
from fewbit.tails import cure_by_rule, far_message, far_ranges
from fewbit.tiny_ranges import is_tiny

_MSG_UNREACHED = (
    "Calibration never reached {count} of the layers that need a range: {paths}. Let the "
    "calibration function run the model in the way it will be used, {leave}."
)
_MSG_NONE = (
    " It reached none at all: the function has to run the model that it is given, which with "
    "inplace=False is a copy, and in no program that was compiled before."
)
_MSG_ZEROS = (
    "Calibration saw nothing but zeros at the inputs of {count} of the layers that need a range: "
    "{paths}. With a range of zero they would turn every input to zero. Calibrate on data like "
    "those of use, {leave}."
)
_MSG_TINY = (
    "Calibration saw nothing but numbers that are too small for a scale at the inputs of {count} "
    "of the layers that need a range: {paths}. They would all become zeros, with dynamic ranges "
    "too. Calibrate on data like those of use, multiply them by a power of two first, {leave}."
)
_LEAVE = (
    "exclude these layers (exclude_list), or pass strict=False in the config to leave them float"
)
_LEAVE_BY_RULE = "or give these layers a rule of their own, without act_static_scale"
_FLOAT_BY_RULE = "or give these layers a rule of their own, without act_qtype"
_MSG_DYNAMIC = "config + DynamicQuantConfig({types}, white_list=[{entries}])"


def with_ranges(
    planned: Sequence[LayerPlan], collectors: Sequence[Collector], stats: Any
) -> list[LayerPlan]:
    """The layers whose every range is known; the others are an error or stay float.

    A layer that can be called in several ways, such as a table that projects too, has the ranges of
    those it was called in. Another one is an error when it is called.
    """
    ran = {id(each.layer_plan): each for each in collectors if each.calls}
    needing = [each for each in planned if any(not is_fixed(s) for s in each.plan.scales)]

    def is_missed(each: LayerPlan) -> bool:
        collector = ran.get(id(each))
        return collector is None or any(name not in stats.entries for name in collector.operands)

    missed = [each for each in needing if is_missed(each)]
    _judge(missed, _MSG_UNREACHED, _MSG_NONE if len(missed) == len(needing) else "")
    zeros = [each for each in needing if each not in missed and _saw_zeros(each, stats)]
    _judge(zeros, _MSG_ZEROS)
    known = [each for each in needing if each not in missed and each not in zeros]
    tiny = [each for each in known if _saw_tiny(each, stats)]
    _judge(tiny, _MSG_TINY, by_rule=_FLOAT_BY_RULE)
    _name_far(needing, collectors, stats)
    return [each for each in planned if all(each not in lost for lost in (missed, zeros, tiny))]


def _name_far(needing: Sequence[LayerPlan], collectors: Sequence[Collector], stats: Any) -> None:
    """Warn of ranges that leave few codes for almost all values."""
    far = far_ranges(stats.entries)
    if not far:
        return
    operands = {name: operand for each in collectors for name, operand in each.operands.items()}
    layers = [each for each in needing if any(f.name in _names(each) for f in far)]
    with_config = [each for each in layers if each.choice.config is not None]
    cure = _cure_by_config(with_config) if with_config else cure_by_rule(far, operands)
    warnings.warn(far_message(far, len(stats.entries), cure), stacklevel=4)


def _cure_by_config(layers: Sequence[LayerPlan]) -> str:
    """The config that measures each batch in these layers."""
    config = layers[0].choice.config
    assert config is not None
    types = f"{config.weight_dtype!r}, {config.activation_dtype!r}"
    entries = ", ".join(repr(f"^{re.escape(each.path)}$") for each in layers)
    return _MSG_DYNAMIC.format(types=types, entries=entries)


def _names(each: LayerPlan) -> list[str]:
    return [scale.name for scale in each.plan.scales if not is_fixed(scale)]


def _saw_zeros(each: LayerPlan, stats: Any) -> bool:
    """Whether the range of an input holds nothing but zero."""
    found = [stats.entries[name].states["range"] for name in _names(each) if name in stats.entries]
    return any(
        all(np.all(value == 0) for key, value in state.items() if key.startswith(("max_", "min_")))
        for state in found
    )


def _saw_tiny(each: LayerPlan, stats: Any) -> bool:
    """Whether all numbers of an input would be lost to its scale."""
    scales = {s.name: s for s in each.plan.scales if not is_fixed(s) and s.name in stats.entries}
    return any(is_tiny(s, stats.entries[n].states["range"]) for n, s in scales.items())


def _judge(
    lost: Sequence[LayerPlan], message: str, more: str = "", by_rule: str = _LEAVE_BY_RULE
) -> None:
    if not lost:
        return
    paths = ", ".join(each.path for each in lost[:5]) + (", ..." if len(lost) > 5 else "")
    has_rule = any(each.choice.config is None for each in lost)
    leave = by_rule if has_rule else _LEAVE
    text = message.format(count=len(lost), paths=paths, leave=leave) + more
    if has_rule or any(each.choice.config.strict for each in lost if each.choice.config):
        raise CalibrationError(text)
    warnings.warn(text, stacklevel=5)
