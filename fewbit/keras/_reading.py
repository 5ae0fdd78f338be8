"""What a quantized Keras model holds, and what was done to it, read off its layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import keras

from fewbit._plan import Plan
from fewbit.keras._choices import Choice
from fewbit.keras._classes import is_quantized
from fewbit.keras._examples import Examples
from fewbit.keras._planning import LayerPlan, layer_runs, layers_of, merge
from fewbit.keras._state import named_variables
from fewbit.keras._variables import value_of
from fewbit.rules import QuantizationRule

_NOTE_CONFIG = (
    "the model is quantized already, so this is what was done to it; the config given with it was "
    "not used"
)


def quantized_layers(model: keras.Layer) -> dict[str, Any]:
    """The quantized layers of a model by path."""
    return {path: layer for path, layer in layers_of(model).items() if is_quantized(layer)}


def parameters(model: keras.Layer) -> dict[str, Any]:
    """Every array of a model by path: a quantized parameter whole, as `WithAux`.

    >>> import fewbit.keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> config = fewbit.keras.DynamicQuantConfig('int8')
    >>> model = fewbit.keras.quantize_model(model, config, progress=False)
    >>> [(path.split('/')[-1], type(value).__name__) for path, value in parameters(model).items()]
    [('kernel', 'WithAux'), ('bias', 'ArrayImpl')]
    """
    found: dict[str, Any] = {}
    for path, layer in layers_of(model).items():
        if is_quantized(layer):
            found |= {f"{path}/{name}": each.value() for name, each in layer._fewbit.stored.items()}
        found |= {f"{path}/{n}": v.value for n, v in float_variables(layer).items()}
    return found


def scales(model: keras.Layer) -> dict[str, Any]:
    """The static scales of a model by path."""
    return {
        f"{path}/{name}": value_of(held)
        for path, layer in quantized_layers(model).items()
        for name, held in layer._fewbit.scales.items()
    }


def float_variables(layer: Any) -> Mapping[str, keras.Variable]:
    """A layer's own variables by name, without the parts of quantized ones, static scales, and
    what it remembers of training."""
    named = named_variables(layer)
    if not is_quantized(layer):
        return named
    state = layer._fewbit
    ours = [part for stored in state.stored.values() for part in stored.parts]
    ours += state.remembered.variables.values()
    skipped = {id(variable) for variable in [*ours, *state.scales.values()]}
    return {name: v for name, v in named.items() if id(v) not in skipped}


def plan_done(model: keras.Layer, quant_config: Any = None) -> Plan:
    """The plan of a model that is quantized: what was done to each layer."""
    examples = Examples(model)
    planned = [_planned(path, layer, examples) for path, layer in quantized_layers(model).items()]
    plan = merge(planned, model, {})
    notes = () if quant_config is None else (_NOTE_CONFIG,)
    parts = {
        f"{path}/{variable.name}"
        for path, layer in quantized_layers(model).items()
        for variable in named_variables(layer).values()
        if not any(variable is each for each in float_variables(layer).values())
    }
    leaves = tuple(leaf for leaf in plan.leaves if leaf.path not in parts)
    return replace(plan, leaves=leaves, notes=(*plan.notes, *notes))


def _planned(path: str, layer: Any, examples: Examples) -> LayerPlan:
    """The plan of one layer, its weights seen as the floats that they stand for."""
    state = layer._fewbit
    stored = {
        name: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for name, v in state.hollow.items()
    }
    own = {**float_variables(layer), **state.hollow}
    beside = list(state.remembered.variables.values())
    plan = examples.first(
        layer,
        state.rule,
        lambda calls: layer_runs(state.program.runs(calls, own, stored, beside)),
        known=state.program.calls,
    )
    plain = QuantizationRule()
    axes = plain.act_batch_axes if state.rule.act_static_scale else state.rule.act_batch_axes
    shown = state.rule.replace(module_path=".*", op_names=plain.op_names, act_batch_axes=axes)
    choice = Choice(rule=shown, kind=state.kind, **state.settings)
    return LayerPlan(layer, path, state.rule, choice, state.program, plan)
