"""A quantized layer made again from its config: the float layer without its floats, then its class.

Values come later, when Keras loads the weights; until then the layer only knows its shapes.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras

from fewbit.keras.layers._classes import (
    PREFIXES,
    become,
    holder_class,
    is_quantized,
    quantized_class,
)
from fewbit.keras.layers._program import LayerProgram, LayerState, named_variables
from fewbit.keras.layers._variables import hollow
from fewbit.keras.saving._format import (
    KEY,
    damaged,
    described,
    give_config,
    opened,
    places,
    resolve,
    saved_dtype,
)
from fewbit.keras.saving._layer import Saveable
from fewbit.keras.training._qat import add_seed, guard_training
from fewbit.keras.training._remembered import empty as empty_memory
from fewbit.rules import rule_from_dict

_MSG_PLACE = (
    "{where} was saved with a quantized {name} at {place!r}, but what its config builds has "
    "{found}. Its code changed since (load it with the code that saved it), or its config does not "
    "tell of that layer."
)
_MSG_LATE = (
    "{where} was saved with a quantized {name} at {place!r}, which is not there yet: {parent} is "
    "not built. Give the class that holds it a build() that builds it, or call the model once and "
    "load its weights then."
)
_MSG_RESHAPED = (
    "{where}/{place} was saved as {qtype} with the shape {saved}, but is built with {found}: it "
    "stays float and gets no saved values. Quantize it again after training it."
)
_MSG_RANDOM = (
    "{where} holds quantized layers whose saved values were not loaded ({places}): what this call "
    "gives comes from new random weights. Load them: model.load_weights(...). A model made by "
    "keras.models.clone_model has no values: fewbit.keras.clone_model(model) copies them too."
)


class _Waiting:
    """What is still to be done to a layer once it is built."""

    def __init__(self, do: Callable[[Any], None], inside: "_Inside | None" = None):
        self._do, self._done, self._inside = do, False, inside

    def __call__(self, layer: Any, built: bool = False) -> None:
        if not self._done and (built or layer.built):
            self._done = True
            self._do(layer)

    def called(self, outs: Any) -> None:
        """The layer was called: all inside it that makes its own layers then has made them."""
        if self._inside is not None:
            self._inside.called(outs)

    def check(self) -> None:
        """Raise if values are about to be loaded for a layer that is not there."""
        if self._inside is not None:
            self._inside.check()


class _Inside:
    """The quantized layers inside one, each made so as soon as it is there.

    A layer without a `build` of its own counts as built before the layers inside it are: those make
    their own sublayers, as attention does, when it is first called. Places inside a layer hold once
    it is built: a Sequential has one layer more then.
    """

    def __init__(self, layer: Any, below: Mapping[str, Any], where: str):
        self._layer, self._waiting, self._where = layer, dict(below), where
        self._adopting = False

    def adopt(self, finally_: bool = False) -> None:
        """`finally_`, those that are built in a layer that never is, as nobody calls it."""
        found = places(self._layer) if self._waiting else {}
        self._adopting = True  # which makes no layers, so that one walk finds all
        for place in [place for place in self._waiting if place in found]:
            ready = all(found[each].built for each in _around(place) if each in found)
            # Of a Sequential that is not built, places are those of other layers.
            same = type(found[place]).__name__ == self._waiting[place]["class"]["name"]
            if ready or (finally_ and found[place].built and same):
                self._adopt(found[place], place, self._waiting.pop(place))
        self._adopting = False
        with keras.StatelessScope():
            pass  # leaving it makes Keras give the variables that stay float their first values

    def called(self, outs: Any) -> None:
        if not self._waiting or self._adopting:
            return
        if not any(map(keras.backend.is_keras_tensor, keras.tree.flatten(outs))):
            text = _MSG_RANDOM.format(where=self._where, places=", ".join([*self._waiting][:3]))
            warnings.warn(text, stacklevel=4)
        self.adopt()

    def _adopt(self, child: Any, place: str, fields: Mapping[str, Any]) -> None:
        if hasattr(child, "_fewbit_original"):
            return  # its own config made it so
        name = fields["class"]["name"]
        if type(child).__name__ != name:
            self._refuse(place, name, f"a {type(child).__name__} there")
        if fields["own"] is None:
            child.__class__ = holder_class(type(child))
            child._fewbit_waiting = _Waiting(lambda child: self._go_on(place))
        else:
            _adopt(child, fields["own"], self._where, place, lambda: self._go_on(place))
        if hasattr(child, "_fewbit_waiting"):
            child._fewbit_waiting(child)

    def _go_on(self, place: str) -> None:
        if not self._adopting and any(each.startswith(f"{place}/") for each in self._waiting):
            self.adopt()

    def check(self) -> None:
        if not self._waiting:
            return
        self.adopt(finally_=True)
        for place, fields in self._waiting.items():
            found, name = places(self._layer), fields["class"]["name"]
            around = [found[each] for each in _around(place) if each in found]
            for parent in around:
                if not parent.built:
                    text = dict(where=self._where, name=name, place=place)
                    raise ValueError(_MSG_LATE.format(**text, parent=described(parent)))
            holder = described([self._layer, *around][-1])
            self._refuse(place, name, f"nothing there: {holder} does not have it")

    def _refuse(self, place: str, name: str, found: str) -> None:
        text = _MSG_PLACE.format(where=self._where, name=name, place=place, found=found)
        raise ValueError(text)


def _around(place: str) -> list[str]:
    """What may be the places of the layers around one.

    >>> _around('blocks/0/up')
    ['blocks', 'blocks/0']
    """
    parts = place.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def restored(config: Mapping[str, Any]) -> Any:
    """The layer of a config that has a record."""
    where = str(config.get("name") or "a quantized layer")
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

    inside = _Inside(layer, below, where)

    def finish(layer: Any) -> None:
        if own is not None:
            _make_ready(layer, own)
        inside.adopt()
        guard_training(layer)

    if own is not None:
        layer._fewbit = _state(layer, original, own, where)
    give_config(layer, record)
    layer._fewbit_waiting = _Waiting(finish, inside)
    layer._fewbit_waiting(layer)
    return layer


def _without_values(original: type[keras.Layer], config: dict[str, Any]) -> keras.Layer:
    """The float layer, its variables left for loading where its constructor allows that."""
    try:
        with keras.StatelessScope(initialize_variables=False):
            return original.from_config(copy.copy(config))
    except ValueError:  # variables made of arrays cannot wait
        return original.from_config(copy.copy(config))


def _adopt(
    child: Any, own: Mapping[str, Any], where: str, place: str, then: Callable[[], None]
) -> None:
    variables = named_variables(child)
    for name, about in own["stored"].items():
        found = variables[name].shape if name in variables else None
        if child.built and found != tuple(about["shape"]):
            text = dict(saved=tuple(about["shape"]), found=found, qtype=about["qtype"])
            warnings.warn(_MSG_RESHAPED.format(where=where, place=place, **text), stacklevel=2)
            return
    become(child, _state(child, type(child), own, f"{where}/{place}"))

    def finish(child: Any) -> None:
        _make_ready(child, own)
        then()

    child._fewbit_waiting = _Waiting(finish)


def _make_ready(layer: Any, own: Mapping[str, Any]) -> None:
    """Give a built layer the variables that a file will fill."""
    empty(layer)
    add_seed(layer)
    layer._fewbit.remembered.add(layer, empty_memory(own.get("remembered", {})))


def _state(layer: Any, original: Any, own: Mapping[str, Any], where: str) -> LayerState:
    try:
        rule, path = rule_from_dict(own["rule"], where), str(own["path"])
        settings = dict(own["settings"])
        how = {name: settings[name] for name in ("emulate", "fused", "as_read") if name in settings}
        trains = own["kind"] == "training"
        program = LayerProgram(layer, original.call, path, rule, trains=trains, **how)
        state = LayerState(path, rule, _kind(own, where), program, settings)
        state.awaited = {name: dict(about) for name, about in own["stored"].items()}
        state.awaited_scales = tuple(map(str, own.get("scales", ())))  # older files do not say
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
            found = f"{', '.join(variables) or 'none'} there"
            text = dict(where=layer.path or layer.name, name="variable", place=name, found=found)
            raise ValueError(_MSG_PLACE.format(**text))
        hollow(layer, variables[name], None)
        state.hollow[name] = variables[name]


# --- Which layers must tell, when they are saved, of the quantized ones inside them ---------------


def make_saveable(model: keras.Layer) -> None:
    """Let every model, and every layer whose config may not show its quantized sublayers, tell.

    The config of a Functional or Sequential model shows all of them; but only a class of ours can
    check, once it is loaded, that there is something to train.
    """
    for layer in [*reversed(places(model).values()), model]:
        told = hasattr(layer, "_fewbit_original")
        if not told and any(map(is_quantized, places(layer).values())):
            layer.__class__ = holder_class(type(layer))


Saveable._restored = staticmethod(restored)
