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

_MSG_AVERAGE = (
    "{optimizer} of {model} overwrites variables with their averages every "
    "ema_overwrite_frequency={steps} steps, and Keras cannot do that beside variables that their "
    "gradients overwrite, such as '{first}' of a delayed scale. Leave ema_overwrite_frequency out: "
    "use_ema=True then sets the averages once, after training."
)
_TRAINING = ("fit", "train_on_batch")


def guard_training(model: keras.Layer) -> None:
    """Let the models here check, before they are trained, that they can be.

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
        check_optimizer(model)
        return method(model, *args, **kwargs)

    return train


def check_optimizer(model: keras.Model) -> None:
    """An error for what Keras' optimizers cannot do to amax histories.

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model.compile('sgd', 'mse')
    >>> check_optimizer(model)
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    steps = getattr(optimizer, "ema_overwrite_frequency", None)
    if not steps or not getattr(optimizer, "use_ema", False):
        return
    for variable in model.trainable_variables:
        if variable.overwrite_with_gradient:
            text = dict(optimizer=type(optimizer).__name__, model=f"'{model.name}'", steps=steps)
            raise ValueError(_MSG_AVERAGE.format(**text, first=variable.path))


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
