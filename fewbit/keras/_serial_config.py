"""What a saved config says of quantized layers: one decision per layer, by its place.

A layer's config gets a 'fewbit' record: its class, its own decision if it is quantized itself
('own'), and those of the layers inside it ('below'), which the configs of most layers do not show.
"""

from collections.abc import Mapping
from typing import Any

import keras

from fewbit.keras._serial_classes import reference
from fewbit.keras._serial_format import sealed
from fewbit.keras._serial_tree import places
from fewbit.keras._state import LayerState
from fewbit.numerics import qtype_name
from fewbit.rules_io import rule_to_dict

KEY = "fewbit"


def record_of(layer: Any) -> dict[str, Any]:
    """The record of a quantized layer, or of one that holds some."""
    below = {
        place: _fields(child)
        for place, child in places(layer).items()
        if hasattr(child, "_fewbit_original")
    }
    return sealed({**_fields(layer), "below": below})


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
