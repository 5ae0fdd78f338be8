"""A model as it was, where quantizing it fails: nothing is half done, and a second try may follow.

What is kept are classes, attributes, tracked lists and where variables hold their values: all that
fewbit, or Keras at the user's call, changes. No array is copied. The names of Keras that are used
here are those of `_variables`, and the state of a `predict` that did not come to its end.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import keras

from fewbit.keras._variables import QuantizedVariable, own_variables, sublayers

_MSG_LOST = (
    "The values of {what} of '{model}' are lost: {names}. Keras had handed them to a program that "
    "failed. Make the model again, or load its weights, before the next try."
)
_MSG_ROUNDED = (
    "'{model}' is float again, but {what} had been quantized and given up, and have the values "
    "that their codes stood for: {names}. For the exact ones make the model again, or load its "
    "weights."
)


@contextlib.contextmanager
def as_it_was_on_failure(model: keras.Layer) -> Iterator["Before"]:
    """While anything that is raised, an interrupt too, puts the model back."""
    before = Before(model)
    try:
        yield before
    except BaseException as error:
        lost, rounded = before.restore()
        for message, paths in ((_MSG_LOST, lost), (_MSG_ROUNDED, rounded)):
            if paths:
                names = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
                what = "1 variable" if len(paths) == 1 else f"{len(paths)} variables"
                error.add_note(message.format(what=what, model=model.name, names=names))
        raise


class Before:
    """A model at one moment, and the values of its variables for as long as they are kept."""

    def __init__(self, model: keras.Layer):
        self._layers = [model, *sublayers(model)]
        self._objects = [(each, type(each), dict(vars(each))) for each in self._parts()]
        self._tracked = [_tracked(each) for each in self._layers]
        self._variables = [(v, type(v), _but_value(v)) for v in self._all_variables()]
        self._values = {id(v): vars(v).get("_value") for v, _, _ in self._variables}

    def look_again(self) -> None:
        """Keep the values of now: those of before may have been given away since."""
        for variable, _, _ in self._variables:
            if _is_usable(vars(variable).get("_value")):
                self._values[id(variable)] = variable._value

    def let_go(self, layer: keras.Layer) -> None:
        """Keep the floats of this layer no longer: they are needed elsewhere."""
        for variable in own_variables(layer):
            self._values[id(variable)] = None

    def restore(self) -> tuple[list[str], list[str]]:
        """Put everything back; the paths of variables whose values are nowhere any more, and of
        those that have the values that their codes stand for."""
        for layer in self._layers:
            _finish_run(layer)
        lost, rounded = [], []
        for variable, cls, _ in self._variables:
            held, now = self._values[id(variable)], vars(variable).get("_value")
            # What the user's own code has set since stays; what was given away comes back.
            if isinstance(variable, QuantizedVariable) and not issubclass(cls, QuantizedVariable):
                now = None
                if not _is_usable(held):
                    held = variable.value
                    rounded.append(variable.path)
            if not _is_usable(now) and held is not None and not _is_usable(held):
                lost.append(variable.path)
            self._values[id(variable)] = now if _is_usable(now) else held
        for each, cls, attributes in [*self._objects, *self._variables]:
            each.__class__ = cls
            _set_attributes(each, attributes)
        for layer, tracked in zip(self._layers, self._tracked, strict=True):
            _track_again(layer, *tracked)
        for variable, _, _ in self._variables:
            variable._value = self._values[id(variable)]
        return lost, rounded

    def _parts(self) -> list[Any]:
        """The layers, and what quantized ones know of themselves."""
        states = [s for s in (getattr(each, "_fewbit", None) for each in self._layers) if s]
        remembered = [state.remembered for state in states if hasattr(state, "remembered")]
        return [*self._layers, *states, *remembered]

    def _all_variables(self) -> list[keras.Variable]:
        found = list(self._layers[0].variables)
        for each in self._layers:
            if isinstance(each, keras.Model):
                found += each.metrics_variables
                found += getattr(getattr(each, "optimizer", None), "variables", [])
        return list({id(v): v for v in found}.values())


def _but_value(variable: keras.Variable) -> dict[str, Any]:
    return {name: value for name, value in vars(variable).items() if name != "_value"}


def _set_attributes(each: Any, attributes: dict[str, Any]) -> None:
    for name in vars(each).keys() - attributes.keys():
        del vars(each)[name]
    vars(each).update(attributes)


def _tracked(layer: Any) -> tuple[Any, Any, bool]:
    tracker = layer._tracker
    stores = {name: list(store) for name, (_, store) in tracker.config.items()}
    return stores, {name: set(ids) for name, ids in tracker.stored_ids.items()}, tracker.locked


def _track_again(layer: Any, stores: Any, ids: Any, locked: bool) -> None:
    tracker = layer._tracker
    for name, held in stores.items():
        tracker.config[name][1][:] = held
        tracker.stored_ids[name] = ids[name]
    tracker.locked = locked


def _finish_run(layer: Any) -> None:
    """Give variables the values that a run of Keras, broken off, was working with."""
    state = getattr(layer, "_jax_state", None)
    if not state or getattr(layer, "_jax_state_synced", True):
        return
    for name in ("trainable_variables", "non_trainable_variables", "metrics_variables"):
        variables = getattr(layer, name)
        for variable, value in zip(variables, state.get(name) or [], strict=False):
            if not _is_usable(variable._value) and _is_usable(value):
                variable._value = value


def _is_usable(value: Any) -> bool:
    return value is not None and not (isinstance(value, jax.Array) and value.is_deleted())
