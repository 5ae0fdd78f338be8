"""What a saved config says of quantized layers: one decision per layer, by its place.

A layer's config gets a 'fewbit' record: its class, its own decision if it is quantized itself
('own'), and those of the layers inside it ('below'), which the configs of most layers do not show.
What `quantize_model` was given has the model alone ('quant_config'): for reading
(`_quant_config`), never to decide by again.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from fewbit.keras._config_base import JaxBaseConfig
from fewbit.keras._serial_classes import reference
from fewbit.keras._serial_format import sealed
from fewbit.keras._serial_tree import places
from fewbit.keras._state import LayerState
from fewbit.numerics import qtype_name
from fewbit.rules import QuantizationRule
from fewbit.rules_io import rule_from_dict, rule_to_dict

KEY = "fewbit"
_MSG_CONFIG = (
    "{name} is loaded as it was saved, but the config that it was quantized by cannot be read "
    "here, so it has no _quant_config: {error}"
)


def record_of(layer: Any) -> dict[str, Any]:
    """The record of a quantized layer, or of one that holds some."""
    below = {
        place: _fields(child)
        for place, child in places(layer).items()
        if hasattr(child, "_fewbit_original")
    }
    return sealed({**_fields(layer), "below": below, **_written(layer)})


def keep_config(model: Any, quant_config: Any) -> Any:
    """The model, which tells as `_quant_config` what it was quantized by."""
    own = isinstance(quant_config, JaxBaseConfig)  # which may be changed afterwards
    model._quant_config = copy.deepcopy(quant_config) if own else quant_config
    return model


def give_config(model: Any, record: Mapping[str, Any]) -> None:
    """Let a model that is made from a record tell what it was quantized by."""
    written = record.get("quant_config")
    if written is None:
        return
    try:
        if isinstance(written, list):
            model._quant_config = [rule_from_dict(rule) for rule in written]
        else:
            model._quant_config = JaxBaseConfig.from_dict(written)
    except (TypeError, ValueError) as error:
        warnings.warn(_MSG_CONFIG.format(name=model.name, error=error), stacklevel=2)


def _written(layer: Any) -> dict[str, Any]:
    config = getattr(layer, "_quant_config", None)
    if isinstance(config, JaxBaseConfig):
        return {"quant_config": config.to_dict()}
    if isinstance(config, list | tuple) and all(type(rule) is QuantizationRule for rule in config):
        return {"quant_config": [rule_to_dict(rule) for rule in config]}
    return {}  # of a provider the layers have all that counts


def _fields(layer: Any) -> dict[str, Any]:
    state: LayerState | None = getattr(layer, "_fewbit", None)
    fields: dict[str, Any] = {"class": reference(layer._fewbit_original), "own": None}
    if state is not None:
        fields["own"] = {
            "path": state.path,
            "kind": state.kind,
            "rule": rule_to_dict(state.rule),
            "settings": dict(state.settings),
            "stored": dict(state.awaited) | {n: _about(s) for n, s in state.stored.items()},
            "scales": sorted({*state.awaited_scales, *state.scales}),
            "remembered": state.remembered.shapes(),
        }
    return fields


def _about(stored: Any) -> dict[str, Any]:
    q = stored.value().array
    return {"shape": list(q.shape), "qtype": qtype_name(q.qtype)}


def name_in(config: Mapping[str, Any]) -> str:
    """How messages name the layer of a config."""
    return str(config.get("name") or "a quantized layer")


def saved_dtype(config: Mapping[str, Any]) -> Any:
    """The dtype to build with: the one that the model was saved with, unless another is asked for.

    KerasHub's loaders put the process' default in its place, or nothing.
    """
    given, saved = config.get("dtype"), config.get(f"{KEY}_dtype")
    if saved is None:
        return given
    name = given if isinstance(given, str) else getattr(given, "name", None)
    return saved if given is None or name == keras.config.dtype_policy().name else given
