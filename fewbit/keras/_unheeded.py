"""What is asked for and would not happen: said, instead of left out."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from fewbit.keras._attention import is_attention
from fewbit.keras._choices import Choice
from fewbit.keras._planning import LayerPlan
from fewbit.rules import QtRule

_MSG_TRAINING_RULES = (
    "{rule!r} says how a model trains, and a list of rules makes one that only serves. To train, "
    "give the list to a provider: quantize_model(model, fewbit.QtProvider(rules)), fit, then "
    "fewbit.to_ptq(model). To serve now with the types of the forward pass, write "
    "fewbit.PtqProvider(rules)."
)
_MSG_FLOAT_ATTENTION = (
    "{config}: dot_product_attention_enable=True decides nothing. It is about quantized products "
    "inside attention, and those of {layers} stay float: Keras takes its fused operation for them "
    "wherever it can. Leave the field out, or quantize the products with quantize_attention=True."
)
_MSG_NO_ATTENTION = (
    "{config}: dot_product_attention_enable=True decides nothing, as none of the layers that the "
    "config quantizes is one of attention. Leave the field out."
)
_MSG_DATA = (
    "The calibration data was not used: {config} takes no range from data. Leave it out, or use "
    "StaticQuantConfig (in a rule: act_static_scale=True) for ranges that are measured once."
)


def check_rules(quant_config: Any) -> None:
    """Raise for rules of training that come without the provider that trains."""
    if isinstance(quant_config, list | tuple):
        for rule in quant_config:
            if isinstance(rule, QtRule):
                raise TypeError(_MSG_TRAINING_RULES.format(rule=rule))


def warn_of_attention(
    layers: Mapping[str, keras.Layer],
    choices: Mapping[str, Choice],
    planned: Sequence[LayerPlan],
) -> None:
    """Warn where a config decides how attention is computed and quantizes none."""
    decided = {id(each.choice.config) for each in planned if is_attention(each.layer)}
    for config in {id(choice.config): choice.config for choice in choices.values()}.values():
        if config is None or not config.dot_product_attention_enable or id(config) in decided:
            continue
        name = type(config).__name__
        paths = [
            f"'{path}'"
            for path, choice in choices.items()
            if choice.config is config and is_attention(layers[path])
        ]
        message = _MSG_NO_ATTENTION.format(config=name)
        if paths:
            shown = paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")
            message = _MSG_FLOAT_ATTENTION.format(config=name, layers=shown)
        warnings.warn(message, stacklevel=4)


def warn_of_data(quant_config: Any) -> None:
    """Warn that calibration data was given to what needs none."""
    many = isinstance(quant_config, list | tuple)
    name = "this list of rules" if many else type(quant_config).__name__
    warnings.warn(_MSG_DATA.format(config=name), stacklevel=3)
