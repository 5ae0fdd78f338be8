"""Keras models that train quantized: `fit` as always, products on few bits, variables float."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from fewbit.calibration import is_fixed
from fewbit.keras._planning import LayerPlan
from fewbit.keras.config._choose import Choice
from fewbit.keras.layers._classes import become, is_quantized
from fewbit.keras.layers._lora import adapters
from fewbit.keras.layers._program import LayerState
from fewbit.keras.layers._variables import is_recomputed, sublayers, unlocked
from fewbit.keras.saving._format import described
from fewbit.keras.training._remembered import beginning

_MSG_LOOP = (
    "'{path}' runs at every time step inside a loop, from which what {field} remembers cannot come "
    "out. Let its recurrent layer take the steps one by one (unroll=True), or give this path a "
    "rule of its own before this one, without it: {rule!r}."
)
_MSG_REMAT = (
    "'{path}' is computed again in the backward pass (keras.RematScope), from where the ranges of "
    "act_static_scale=True cannot come out. Make the layer outside of the scope, or train without "
    "act_static_scale and make static scales when the model is converted: fewbit.to_ptq(model, "
    "calib_function, rules=[... act_static_scale=True ...]). Its rule is {rule!r}."
)
_MSG_LEARNED = (
    "'{path}': weight_calibration_method={method!r} makes a scale that is trained beside its "
    "weight, and Keras layers hold none. Write 'mse' (or leave it out) in a rule for Keras; "
    "learned scales are for Linen, NNX and functions. Its rule is {rule!r}."
)
SEED = "fewbit_rounding"


def training_choice(choice: Choice, emulate: bool) -> Choice:
    """What a rule means for a layer that trains."""
    return choice if choice.rule is None else replace(choice, kind="training", emulate=emulate)


def check_remembers(model: keras.Layer, planned: Sequence[LayerPlan]) -> None:
    """Raise for layers that would remember their steps where nothing comes out of a step."""
    layers = [model, *sublayers(model)]
    looped = {
        inside
        for layer in layers
        if isinstance(layer, keras.layers.RNN) and not layer.unroll
        for inside in sublayers(layer)
    }
    again = {
        inside for layer in layers if is_recomputed(layer) for inside in [layer, *sublayers(layer)]
    }
    for each in planned:
        rule, static = each.choice.rule, each.rule.act_static_scale
        method = each.rule.weight_calibration_method
        if method.startswith("learned"):
            raise ValueError(_MSG_LEARNED.format(path=each.path, method=method, rule=rule))
        if each.layer in looped and (static or getattr(rule, "delays", False)):
            field = "act_static_scale=True" if static else "'delayed'"
            raise ValueError(_MSG_LOOP.format(path=each.path, field=field, rule=rule))
        if each.layer in again and static:
            raise ValueError(_MSG_REMAT.format(path=each.path, rule=rule))


def step_through_cells(model: keras.Layer, planned: Sequence[LayerPlan]) -> None:
    """Let recurrent layers run their cells, where Keras would use the cells' weights directly."""
    cells = {each.layer for each in planned}
    for layer in sublayers(model):
        if hasattr(layer, "use_cudnn") and not cells.isdisjoint(sublayers(layer)):
            layer.use_cudnn = False


def train_quantized(each: LayerPlan) -> None:
    """Make one layer train quantized, in place; its variables stay what they are."""
    state = LayerState(each.path, each.rule, "training", each.program, each.choice.settings)
    remembered = beginning(each.runs, [s.name for s in each.plan.scales if is_fixed(s)])
    become(each.layer, state)
    add_seed(each.layer)
    state.remembered.add(each.layer, remembered)


def add_seed(layer: Any) -> None:
    """Where a rule rounds stochastically: a seed that every step changes, kept with the layer."""
    state: LayerState = layer._fewbit
    if state.kind == "training" and state.program.provider.draws_noise:
        if getattr(layer, SEED, None) is None:
            with unlocked(layer):
                setattr(layer, SEED, keras.random.SeedGenerator())
        state.seed = getattr(layer, SEED)


# --- Training a quantized model: what can be trained is, and the rest is said before it starts ----

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
    if any(map(adapters, layers)):
        return
    held = [
        layer.path or layer.name
        for layer in layers
        if is_quantized(layer) and layer._fewbit.stored and layer.trainable
    ]
    if held:
        more = f" and {len(held) - 1} more layers" if held[1:] else ""
        raise ValueError(_MSG_TRAIN.format(model=described(model), first=held[0], more=more))
