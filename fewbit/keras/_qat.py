"""Keras models that train quantized: `fit` as always, products on few bits, variables float."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from fewbit.keras._choices import Choice
from fewbit.keras._classes import become
from fewbit.keras._planning import LayerPlan
from fewbit.keras._remembered import beginning
from fewbit.keras._state import LayerState
from fewbit.keras._variables import is_recomputed, sublayers, unlocked
from fewbit.static_statistics import is_fixed

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
    choice = each.choice
    settings = {"granularity": choice.granularity, "emulate": choice.emulate, "fused": choice.fused}
    state = LayerState(each.path, each.rule, "training", each.program, settings)
    remembered = beginning(each.runs, [s.name for s in each.plan.scales if is_fixed(s)])
    become(each.layer, state)
    add_seed(each.layer)
    state.remembered.add(each.layer, remembered)


def add_seed(layer: Any) -> None:
    """Where a rule rounds stochastically: a seed that every step changes, kept with the layer."""
    state: LayerState = layer._fewbit
    if state.kind != "training" or not state.program.provider.draws_noise:
        return
    if getattr(layer, SEED, None) is None:
        with unlocked(layer):
            setattr(layer, SEED, keras.random.SeedGenerator())
    state.seed = getattr(layer, SEED)
