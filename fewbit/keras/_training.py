"""Training a quantized model: what can be trained is, and the rest is said before it starts."""

import functools
from typing import Any

import keras

from fewbit.keras._classes import is_quantized
from fewbit.keras._lora import adapters
from fewbit.keras._variables import sublayers

_MSG_TRAIN = (
    "{model} is quantized, and the weights of '{first}'{more} are stored on few bits, which no "
    "optimizer can move. Train low-rank adapters beside them: layer.enable_lora(rank=4) on Dense, "
    "EinsumDense and Embedding layers, or backbone.enable_lora(rank=4) on a KerasHub backbone, "
    "then compile and fit. Or freeze these layers (layer.trainable = False) and train what is "
    "float. Or train quantized from the float model: fewbit.quantize_model(model, "
    "fewbit.QtProvider(rules)), fit, then fewbit.to_ptq(model). evaluate and predict need none "
    "of this."
)


_TRAINING = ("fit", "train_on_batch")


def guard_training(model: keras.Layer) -> None:
    """Let the models here check, before they are trained, that there is something to train.

    On the instances: their classes are the user's, and what Keras saves is as before.
    """
    for each in [model, *sublayers(model)]:
        if isinstance(each, keras.Model):
            for name in _TRAINING:
                setattr(each, name, _checked(each, name))


def _checked(model: Any, name: str) -> Any:
    method = getattr(type(model), name)

    @functools.wraps(method)
    def train(*args: Any, **kwargs: Any) -> Any:
        check_trainable(model)
        return method(model, *args, **kwargs)

    return train


def check_trainable(model: keras.Model) -> None:
    """An error unless the quantized layers of a model are frozen, or adapters are there to train.

    >>> import fewbit.keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> config = fewbit.keras.DynamicQuantConfig('int8')
    >>> model = fewbit.keras.quantize_model(model, config, progress=False)
    >>> model.layers[0].enable_lora(2)
    >>> check_trainable(model)
    """
    layers = sublayers(model)
    if any(adapters(layer) for layer in layers):
        return
    held = [
        layer.path or layer.name
        for layer in layers
        if is_quantized(layer) and layer._fewbit.stored and layer.trainable
    ]
    if held:
        more = f" and {len(held) - 1} more layers" if held[1:] else ""
        cls = getattr(model, "_fewbit_original", type(model))
        name = f"{cls.__name__} '{model.name}'"
        raise ValueError(_MSG_TRAIN.format(model=name, first=held[0], more=more))
