"""A second model with the same values, float or quantized."""

import contextlib
import re
from typing import Any

import jax.numpy as jnp
import keras

from fewbit.keras._classes import is_quantized
from fewbit.keras._variables import sublayers, take_path

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
        if quantized:
            _copy_saved([(twin, model), *layers])
        pairs = _paired("variables", twin.variables, model.variables)
    except Exception as error:
        why = " ".join(re.split("Example:|Full object config:", str(error))[0].split())
        name = f"{type(model).__name__} '{model.name}'"
        wanted = "fewbit.keras.clone_model" if quantized else "inplace=False"
        instead = "" if quantized else ", or quantize the model itself: inplace=True"
        text = _MSG_NO_TWIN.format(model=name, why=why, wanted=wanted, instead=instead)
        raise ValueError(text) from error
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


def _copy_saved(layers: list[tuple[Any, Any]]) -> None:
    """What each quantized layer would write into a file, taken over by its twin.

    A model comes before its layers: it is the one that makes them quantized.
    """
    for new, old in layers:
        if hasattr(old, "_fewbit_original"):
            store: dict[str, Any] = {}
            old.save_own_variables(store)
            new.load_own_variables(store)
