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
from fewbit.keras._variables import sublayers, unlocked
from fewbit.static_statistics import is_fixed

_MSG_LOOP = (
    "'{path}' runs at every time step inside a loop, from which what {field} remembers cannot come "
    "out. Let its recurrent layer take the steps one by one (unroll=True), or give this path a "
    "rule of its own before this one, without it: {rule!r}."
)
SEED = "fewbit_rounding"


def training_choice(choice: Choice, emulate: bool, path: str, in_loop: bool) -> Choice:
    """What a rule means for a layer that trains."""
    rule = choice.rule
    if rule is None:
        return choice
    remembers = "act_static_scale=True" if rule.act_static_scale else "'delayed'"
    if in_loop and (rule.act_static_scale or getattr(rule, "delays", False)):
        raise ValueError(_MSG_LOOP.format(path=path, field=remembers, rule=rule))
    return replace(choice, kind="training", emulate=emulate)


def looped(model: keras.Layer) -> set[keras.Layer]:
    """The layers that a recurrent layer runs in a compiled loop: its cell, and what is in it."""
    return {
        inside
        for layer in [model, *sublayers(model)]
        if isinstance(layer, keras.layers.RNN) and not layer.unroll
        for inside in sublayers(layer)
    }


def train_planned(model: keras.Layer, planned: Sequence[LayerPlan]) -> None:
    """Make the layers of a plan train quantized, in place."""
    for each in planned:
        train_quantized(each)


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
