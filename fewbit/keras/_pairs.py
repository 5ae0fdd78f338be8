"""A Keras model and its twin: both as programs that run on one batch, and how a twin is made.

The programs are traced through the float model's own layers, each inside the scope that names it;
the twin gives the quantized weights and static scales. Neither model is changed by it."""

import contextlib
import functools
import inspect
import re
from typing import Any

import jax.numpy as jnp
import keras

from fewbit.interpreter import Call, Runner, split_call
from fewbit.keras._planning import (
    layers_of,
    model_variables,
    parameters,
    quantized_layers,
    scales,
)
from fewbit.keras.layers._attention import attention_way, call_scopes
from fewbit.keras.layers._classes import is_quantized
from fewbit.keras.layers._program import EmulatingProvider
from fewbit.keras.layers._variables import sublayers, take_path
from fewbit.models import Pair
from fewbit.planning import ScaleName
from fewbit.providers import PtqProvider

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
        for site in (s.site for s in sites if s.site.path == place and s.site.op == op):
            if site.index % max(count, 1) == int(match["number"]):
                found[f"{place}/{op}{site.index}{end}"] = value
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
    def name(key: tuple[Any, ...]) -> str | None:
        if key[0].idx == 0:
            return str(key[1].key)
        return ScaleName(key[1].key) if key[0].idx == 3 else None

    dynamic, call = split_call((values, args, kwargs, held), name)
    pure = functools.partial(_call, model, layers_of(model), model_variables(model), call, ways)
    names, what = call.names, f"'{model.name}'"
    return Runner(
        pure, provider, lambda key: names[key[0].idx], site_path="owner", what=what
    ), dynamic


def _call(
    model: Any, layers: Any, variables: Any, call: Call, ways: Any, dynamic: list[Any]
) -> Any:
    values, args, kwargs, _ = call.merge(dynamic)
    mapping = [(variables[path], value) for path, value in values.items() if path in variables]
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(state_mapping=mapping))
        stack.enter_context(call_scopes(layers.items()))
        for path, fused in ways.items():  # as the quantized layers go: a range is of one way
            stack.enter_context(attention_way(layers[path], fused))
        return model(*args, **kwargs)


# --- A second model with the same values, float or quantized --------------------------------------

_MSG_NO_TWIN = (
    "{model} cannot be made a second time from its get_config(), which {wanted} needs: {why} "
    "Give the class a get_config() and a build(){instead}."
)
_MSG_UNLIKE = "what it makes has {found} {what} and the model {wanted}."


def clone_model(model: keras.Layer) -> Any:
    """A model of the same configuration, with copies of the values under the same paths.

    `keras.models.clone_model` starts with new random values, which a quantized layer has none of.

    >>> import fewbit.keras, numpy as np
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> config = fewbit.keras.DynamicQuantConfig('int8')
    >>> model = fewbit.keras.quantize_model(model, config, progress=False)
    >>> x = np.ones((1, 8), 'float32')
    >>> bool((clone_model(model)(x) == model(x)).all())
    True
    """
    quantized = any(is_quantized(each) for each in [model, *sublayers(model)])
    try:
        twin = _made_again(model, quantized)
        layers = _paired("layers", sublayers(twin), sublayers(model))
        # A model comes before its layers: it is the one that makes them quantized.
        for new, old in [(twin, model), *layers] if quantized else []:
            if hasattr(old, "_fewbit_original"):
                store: dict[str, Any] = {}  # what it would write into a file
                old.save_own_variables(store)
                new.load_own_variables(store)
        pairs = _paired("variables", twin.variables, model.variables)
    except Exception as error:
        why = " ".join(re.split("Example:|Full object config:", str(error))[0].split())
        name = f"{type(model).__name__} '{model.name}'"
        wanted = "fewbit.keras.clone_model" if quantized else "inplace=False"
        instead = "" if quantized else ", or quantize the model itself: inplace=True"
        text = dict(model=name, why=why, wanted=wanted, instead=instead)
        raise ValueError(_MSG_NO_TWIN.format(**text)) from error
    for new, old in pairs:  # copies: Keras gives up the arrays of a model that it runs compiled
        new.assign(jnp.copy(old.value))
    for new, old in [*pairs, *layers]:
        take_path(new, old)
    return twin


def _made_again(model: keras.Layer, quantized: bool) -> Any:
    """A model of the same configuration, by Keras' own clone where a config alone does not do."""
    try:
        return _from_config(model)
    except Exception:
        if quantized or not isinstance(model, keras.Model):
            raise
        with contextlib.suppress(Exception):  # what the config lacks says more
            return keras.models.clone_model(model)
        raise


def _from_config(model: Any) -> Any:
    # A class that Keras would not find by its name is at hand: it need not be registered. Keras'
    # own would hide the operations of the same name: a graph may hold layers.Add and ops.add.
    classes = {
        keras.saving.get_registered_name(cls): cls
        for each in sublayers(model)
        for cls in [getattr(each, "_fewbit_original", type(each))]
        if cls.__module__.partition(".")[0] not in ("keras", "keras_hub")
    }
    with keras.saving.custom_object_scope(classes):
        twin = model.__class__.from_config(model.get_config())
        if not twin.built and model.built:
            # As a file would have it: Keras does not see through the dicts that it tracks.
            config = keras.saving.serialize_keras_object(model.get_build_config() or {})
            if config:
                twin.build_from_config(config)
                twin.built = True  # as Keras does when it loads a model
    return twin


def _paired(what: str, new: list[Any], old: list[Any]) -> list[tuple[Any, Any]]:
    """The parts of two models side by side."""
    if len(new) != len(old):
        raise ValueError(_MSG_UNLIKE.format(found=len(new), what=what, wanted=len(old)))
    return list(zip(new, old, strict=True))
