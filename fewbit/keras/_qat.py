"""Keras models that train quantized: `fit` as always, products on few bits, variables float."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import keras

from fewbit.keras._choices import Choice
from fewbit.keras._classes import become, is_quantized
from fewbit.keras._planning import LayerPlan, layers_of
from fewbit.keras._state import LayerState
from fewbit.keras._variables import sublayers, unlocked

_MSG_STATIC = (
    "{rule!r}: a Keras model that trains measures its activations at every step. Leave "
    "act_static_scale out here, and make static scales when it is converted: "
    "fewbit.to_ptq(model, calib_function, rules=[... act_static_scale=True ...])."
)
_MSG_NOT_TRAINED = (
    "to_ptq takes a Keras model that fewbit.quantize_model(model, QtProvider(rules)) made, and "
    "'{model}' has no layer that trains quantized. A float model is quantized by "
    "fewbit.keras.quantize_model(model, config)."
)
SEED = "fewbit_rounding"


def training_choice(choice: Choice, emulate: bool) -> Choice:
    """What a rule means for a layer that trains."""
    if choice.rule is None:
        return choice
    if choice.rule.act_static_scale:
        raise ValueError(_MSG_STATIC.format(rule=choice.rule))
    return replace(choice, kind="training", emulate=emulate)


def train_quantized(each: LayerPlan) -> None:
    """Make one layer train quantized, in place; its variables stay what they are."""
    choice = each.choice
    settings = {"granularity": choice.granularity, "emulate": choice.emulate, "fused": choice.fused}
    state = LayerState(each.path, each.rule, "training", each.program, settings)
    become(each.layer, state)
    add_seed(each.layer)


def add_seed(layer: Any) -> None:
    """Where a rule rounds stochastically: a seed that every step changes, kept with the layer."""
    state: LayerState = layer._fewbit
    if state.kind != "training" or not state.program.provider.draws_noise:
        return
    if getattr(layer, SEED, None) is None:
        with unlocked(layer):
            setattr(layer, SEED, keras.random.SeedGenerator())
    state.seed = getattr(layer, SEED)


def to_ptq(
    model: keras.Layer,
    calib_function: Callable[[Any], Any] | Iterable[Any] | None = None,
    *,
    rules: Iterable[Any] | None = None,
    progress: bool = True,
) -> Any:
    """The model that serves what was trained, in place: weights as training rounded them.

    `rules` replace those of training, for instance to make activations static; they, too, are the
    layers' own otherwise. `calib_function` is that of `quantize_model`.

    >>> import fewbit, keras, numpy as np
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> rules = [fewbit.QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')]
    >>> model = fewbit.quantize_model(model, fewbit.QtProvider(rules))
    >>> model.compile('sgd', 'mse')
    >>> x, y = np.ones((4, 8), 'float32'), np.zeros((4, 4), 'float32')
    >>> history = model.fit(x, y, verbose=0)
    >>> trained = model.predict(x, verbose=0)
    >>> served = fewbit.to_ptq(model).predict(x, verbose=0)
    >>> type(model.layers[0]).__name__, bool(abs(served - trained).max() < 1e-5)
    ('QDynamicDense', True)
    """
    from fewbit.keras._quantize import forget_compiled, quantize_model

    layers = [
        layer
        for layer in [model, *sublayers(model)]
        if is_quantized(layer) and layer._fewbit.kind == "training"
    ]
    if not layers:
        raise ValueError(_MSG_NOT_TRAINED.format(model=model.name))
    # By the paths of now: a model that was loaded may have others than the one that was saved.
    own = [
        layer._fewbit.rule.replace(module_path=re.escape(path))
        for path, layer in layers_of(model).items()
        if any(layer is each for each in layers)
    ]
    for layer in layers:
        _make_float(layer)
    forget_compiled(model)
    return quantize_model(
        model, own if rules is None else list(rules), calib_function, progress=progress
    )


def _make_float(layer: Any) -> None:
    del layer._fewbit
    if getattr(layer, SEED, None) is not None:
        with unlocked(layer):
            delattr(layer, SEED)
    layer.__class__ = layer._fewbit_original
