"""A Keras model and its quantized twin as one program each, ready to run on one batch.

Both are traced through the float model's own layers, each inside the scope that names it; the twin
gives the quantized weights and static scales. Neither model is changed by it.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import jax
import keras

from fewbit.calls import Call, split_call
from fewbit.engine import Runner
from fewbit.jaxprs import scope_name
from fewbit.keras._attention import attention_way
from fewbit.keras._emulation import EmulatingProvider
from fewbit.keras._planning import layers_of
from fewbit.keras._reading import parameters, quantized_layers, scales
from fewbit.keras._state import named_variables
from fewbit.models.pairs import Pair
from fewbit.modes.ptq import PtqProvider
from fewbit.static_scales import ScaleName

_MSG_LAYERS = (
    "The two models do not have the same layers: {mine} of the float one and {theirs} of the "
    "quantized one. Pass the model that was quantized with inplace=False and its twin."
)
_MSG_BOTH_WAYS = (
    "Some layers of this model emulate quantization and others run on few bits. Compare a model "
    "whose layers all do one of them."
)
_NUMBERED = re.compile(r"(?P<op>.*?)(?P<number>\d+)(?P<end>_(lhs|rhs)_(scale|zero_point))")


def pair(
    model: keras.Layer, quantized: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Pair:
    """Both models, called on a batch."""
    if kwargs and not kwargs.keys() <= inspect.signature(model.call).parameters.keys():
        args, kwargs = (*args, kwargs), {}  # a dict of inputs is one argument to Keras
    mine, theirs = (list(layers_of(m)) for m in (model, quantized))
    if len(mine) != len(theirs):
        raise ValueError(_MSG_LAYERS.format(mine=len(mine), theirs=len(theirs)))
    places = dict(zip(theirs, mine, strict=True))  # a loaded twin may have other names
    done = quantized_layers(quantized)
    states = {places[path]: layer._fewbit for path, layer in done.items()}
    emulated = {bool(state.settings.get("emulate")) for state in states.values()}
    if len(emulated) > 1:
        raise ValueError(_MSG_BOTH_WAYS)
    rules = [state.rule.replace(module_path=re.escape(path)) for path, state in states.items()]
    provider = (EmulatingProvider if emulated == {True} else PtqProvider)(rules)
    values = {_moved(path, places): value for path, value in parameters(quantized).items()}
    held = {_moved(path, places): value for path, value in scales(quantized).items()}
    ways = {path: state.settings.get("fused") for path, state in states.items()}
    plain = _runner(model, provider, parameters(model), args, kwargs, {}, ways)
    if held:
        with contextlib.suppress(ValueError, TypeError):  # told later, with the batch
            held |= _of_later_calls(plain[0].trace(plain[1]).program.sites, held)
    made = _runner(model, provider, values, args, kwargs, held, ways)
    return Pair("keras", *made, *plain, outputs=lambda traced: len(traced.forwarded))


def _moved(path: str, places: dict[str, str]) -> str:
    layer, _, name = path.rpartition("/")
    return f"{places[layer]}/{name}"


def _of_later_calls(sites: Any, held: dict[str, Any]) -> dict[str, Any]:
    """Scales for the further calls of a layer that a model calls several times: the same ones."""
    found = {}
    for path, value in held.items():
        place, _, name = path.rpartition("/")
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        op, end = match["op"], match["end"]
        count = sum(f"{place}/{op}{k}{end}" in held for k in range(len(held)))
        numbers = [s.site.index for s in sites if s.site.path == place and s.site.op == op]
        for number in numbers:
            if number % max(count, 1) == int(match["number"]):
                found[f"{place}/{op}{number}{end}"] = value
    return found


def _runner(
    model: keras.Layer,
    provider: Any,
    values: Any,
    args: Any,
    kwargs: Any,
    held: dict[str, Any],
    ways: dict[str, bool | None],
) -> tuple[Runner, list[Any]]:
    layers = layers_of(model)
    variables = {
        f"{path}/{name}": variable
        for path, layer in layers.items()
        for name, variable in named_variables(layer).items()
    }

    def name(key: tuple[Any, ...]) -> str | None:
        if key[0].idx == 0:
            return str(key[1].key)
        return ScaleName(key[1].key) if key[0].idx == 3 else None

    dynamic, call = split_call((values, args, kwargs, held), name)
    pure = functools.partial(_call, model, layers, variables, call, ways)
    names = call.names
    runner = Runner(
        pure, provider, lambda key: names[key[0].idx], site_path="owner", what=f"'{model.name}'"
    )
    return runner, dynamic


def _call(
    model: Any, layers: Any, variables: Any, call: Call, ways: Any, dynamic: list[Any]
) -> Any:
    values, args, kwargs, _ = call.merge(dynamic)
    mapping = [(variables[path], value) for path, value in values.items() if path in variables]
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(state_mapping=mapping))
        stack.enter_context(_scoped(layers))
        for path, fused in ways.items():  # as the quantized layers go: a range is of one way
            stack.enter_context(attention_way(layers[path], fused))
        return model(*args, **kwargs)


@contextlib.contextmanager
def _scoped(layers: dict[str, keras.Layer]) -> Iterator[None]:
    """While every layer's products carry its path; the classes are as before afterwards."""
    before = {path: type(layer) for path, layer in layers.items()}
    try:
        for path, layer in layers.items():
            original: Any = type(layer)
            layer._fewbit_scope = scope_name(path, original.__name__)
            layer.__class__ = _scoped_class(original)
        yield
    finally:
        for path, layer in layers.items():
            layer.__class__ = before[path]
            with contextlib.suppress(AttributeError):
                del layer._fewbit_scope


@functools.cache
def _scoped_class(original: type[keras.Layer]) -> type[keras.Layer]:
    @functools.wraps(original.call)
    def call(self, *args, **kwargs):
        with jax.named_scope(self._fewbit_scope):
            return original.call(self, *args, **kwargs)

    return type(original.__name__, (original,), {"call": call})
