"""Quantize a Keras model: plan every layer, calibrate, convert the layers one by one."""

from typing import Any

import keras

from fewbit.keras._classes import become
from fewbit.keras._planning import LayerPlan, has_weights, layers_of, merge, plan_layer
from fewbit.keras._state import LayerState, named_variables
from fewbit.keras._variables import store
from fewbit.params import quantize_leaf


def plan_model(model: keras.Layer, choices: dict[str, Any]) -> tuple[list[LayerPlan], Any]:
    layers = layers_of(model)
    planned, notes = [], {}
    for path, layer in layers.items():
        choice = choices[path]
        if choice is None:
            continue
        if not has_weights(layer):
            continue
        made = plan_layer(layer, path, choice)
        if isinstance(made, str):
            notes[path] = made
        else:
            planned.append(made)
    return planned, merge(planned, model, notes)


def convert(layer_plan: LayerPlan, kind: str, statistics: Any = None) -> None:
    """Give one layer its quantized weights and its class."""
    layer, plan = layer_plan.layer, layer_plan.plan
    own = named_variables(layer)
    state = LayerState(layer_plan.path, layer_plan.rule, kind, layer_plan.program)
    for leaf in plan.leaves:
        if leaf.how is None:
            continue
        name = leaf.path.rpartition("/")[2]
        value = quantize_leaf(leaf.path, own[name].value, leaf)
        state.stored[name] = store(layer, own[name], value)
        state.hollow[name] = own[name]
    become(layer, state)
