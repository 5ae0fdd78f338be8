"""A quantized layer made again from its config: the float layer without its floats, then its class.

Values come later, when Keras loads the weights; until then the layer only knows its shapes.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras

from fewbit.keras._classes import PREFIXES, become, holder_class, quantized_class
from fewbit.keras._program import LayerProgram
from fewbit.keras._qat import add_seed
from fewbit.keras._remembered import empty as empty_memory
from fewbit.keras._serial_classes import resolve
from fewbit.keras._serial_config import KEY, name_in, saved_dtype
from fewbit.keras._serial_format import damaged, opened
from fewbit.keras._serial_layer import Saveable
from fewbit.keras._serial_tree import places
from fewbit.keras._state import LayerState, named_variables
from fewbit.keras._training import guard_training
from fewbit.keras._variables import hollow
from fewbit.rules_io import rule_from_dict

_MSG_PLACE = (
    "{where} was saved with a quantized {name} at {place!r}, but what its config builds has "
    "{found} there. The code of the model changed since; load it with the code that saved it."
)
_MSG_RESHAPED = (
    "{where}/{place} was saved as {qtype} with the shape {saved}, but is built with {found}: it "
    "stays float and gets no saved values. Quantize it again after training it."
)


class _Waiting:
    """What is still to be done to a layer once it is built."""

    def __init__(self, do: Callable[[Any], None]):
        self._do, self._done = do, False

    def __call__(self, layer: Any, built: bool = False) -> None:
        if not self._done and (built or layer.built):
            self._done = True
            self._do(layer)


def restored(config: Mapping[str, Any]) -> Any:
    """The layer of a config that has a record."""
    where = name_in(config)
    record = opened(config.get(KEY), where)
    plain = {key: value for key, value in config.items() if key not in (KEY, f"{KEY}_dtype")}
    if f"{KEY}_dtype" in config:
        plain["dtype"] = saved_dtype(config)
    original = resolve(record.get("class"), where)
    own, below = record.get("own"), record.get("below")
    if not (own is None or isinstance(own, Mapping)) or not isinstance(below, Mapping):
        raise damaged(where, "its fewbit record", "it lacks its decisions")
    if own is None:
        layer = _without_values(original, plain)
        layer.__class__ = holder_class(original)
    else:
        cls = quantized_class(original, _kind(own, where))
        layer = super(Saveable, cls).from_config(plain)
        layer.__class__ = cls  # where the class's own from_config names another

    def finish(layer: Any) -> None:
        if own is not None:
            _make_ready(layer, own)
        _adopt_below(layer, below, where)
        guard_training(layer)

    if own is not None:
        layer._fewbit = _state(layer, original, own, where)
    layer._fewbit_waiting = _Waiting(finish)
    layer._fewbit_waiting(layer)
    return layer


def _without_values(original: type[keras.Layer], config: dict[str, Any]) -> keras.Layer:
    """The float layer, its variables left for loading where its constructor allows that."""
    try:
        with keras.StatelessScope(initialize_variables=False):
            return original.from_config(copy.copy(config))
    except ValueError:  # variables made of arrays cannot wait
        return original.from_config(copy.copy(config))


def _adopt_below(layer: Any, below: Mapping[str, Any], where: str) -> None:
    found = places(layer) if below else {}
    for place, fields in below.items():
        child = found.get(place)
        if hasattr(child, "_fewbit_original"):
            continue  # its own config made it so
        name = fields["class"]["name"]
        if child is None or type(child).__name__ != name:
            there = "nothing" if child is None else f"a {type(child).__name__}"
            raise ValueError(_MSG_PLACE.format(where=where, name=name, place=place, found=there))
        if fields["own"] is None:
            child.__class__ = holder_class(type(child))
        else:
            _adopt(child, fields["own"], where, place)
    with keras.StatelessScope():
        pass  # leaving it makes Keras give the variables that stay float their first values


def _adopt(child: Any, own: Mapping[str, Any], where: str, place: str) -> None:
    variables = named_variables(child)
    for name, about in own["stored"].items():
        found = variables[name].shape if name in variables else None
        if child.built and found != tuple(about["shape"]):
            saved, qtype = tuple(about["shape"]), about["qtype"]
            text = _MSG_RESHAPED.format(
                where=where, place=place, saved=saved, found=found, qtype=qtype
            )
            warnings.warn(text, stacklevel=2)
            return
    become(child, _state(child, type(child), own, f"{where}/{place}"))

    child._fewbit_waiting = _Waiting(lambda child: _make_ready(child, own))
    child._fewbit_waiting(child)


def _make_ready(layer: Any, own: Mapping[str, Any]) -> None:
    """Give a built layer the variables that a file will fill."""
    empty(layer)
    add_seed(layer)
    layer._fewbit.remembered.add(layer, empty_memory(own.get("remembered", {})))


def _state(layer: Any, original: Any, own: Mapping[str, Any], where: str) -> LayerState:
    try:
        rule, path = rule_from_dict(own["rule"], where), str(own["path"])
        settings = dict(own["settings"])
        how = {name: settings[name] for name in ("emulate", "fused") if name in settings}
        how["trains"] = own["kind"] == "training"
        program = LayerProgram(layer, original.call, path, rule, **how)
        state = LayerState(path, rule, _kind(own, where), program, settings)
        state.awaited = {name: dict(about) for name, about in own["stored"].items()}
    except (KeyError, TypeError) as error:
        raise damaged(where, "its fewbit record", f"it lacks {error}") from None
    return state


def _kind(own: Mapping[str, Any], where: str) -> str:
    if own.get("kind") not in PREFIXES:
        raise damaged(where, "its fewbit record", f"unknown kind {str(own.get('kind'))[:40]!r}")
    return str(own["kind"])


def empty(layer: Any) -> None:
    """Give up the floats of what will be loaded."""
    state: LayerState = layer._fewbit
    variables = named_variables(layer)
    for name in state.awaited:
        if name not in variables:
            raise ValueError(
                _MSG_PLACE.format(
                    where=layer.path or layer.name,
                    name="variable",
                    place=name,
                    found=", ".join(variables) or "none",
                )
            )
        hollow(layer, variables[name], None)
        state.hollow[name] = variables[name]
