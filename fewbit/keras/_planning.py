"""What will happen to each layer of a Keras model, as one Plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from fewbit._plan import LeafPlan, Plan, stored_bytes
from fewbit.engine import UntraceableModelError
from fewbit.keras._examples import example_calls
from fewbit.keras._program import LayerProgram
from fewbit.keras._state import layer_rule, named_variables
from fewbit.keras._variables import own_variables, sublayers
from fewbit.models.planning import plan_runs
from fewbit.modes.ptq import PtqProvider
from fewbit.rules import QuantizationRule


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer that will be quantized: its plan, and the program that was traced for it."""

    layer: keras.Layer
    path: str
    rule: QuantizationRule  # the layer's own; `of` is the one that it was made from
    of: QuantizationRule
    program: LayerProgram
    plan: Plan


def layers_of(model: keras.Layer) -> dict[str, keras.Layer]:
    """The layers of a model by path, each once; models inside it are looked into, not listed."""
    found: dict[str, keras.Layer] = {}
    for layer in [model, *sublayers(model)]:
        if isinstance(layer, keras.Model):
            continue
        path, number = layer.path or layer.name, 2
        while path in found:
            path, number = f"{layer.path or layer.name}#{number}", number + 1
        found[path] = layer
    return found


def has_weights(layer: keras.Layer) -> bool:
    """Whether the layer itself holds something that a product or a look-up could read."""
    return any(len(v.shape) >= 2 for v in own_variables(layer))


def plan_layer(layer: keras.Layer, path: str, rule: QuantizationRule) -> LayerPlan | str:
    """The plan of one layer, or why it is left alone."""
    calls = example_calls(layer)
    if not calls:
        return "it was built without a recorded input shape; see fewbit.keras.register_calls"
    own_rule = layer_rule(path, rule)
    program = LayerProgram(layer, type(layer).call, path, PtqProvider([own_rule]))
    own = named_variables(layer)
    runs = []
    for number, (args, kwargs) in enumerate(calls):
        method = "__call__" if number == 0 else f"call{number + 1}"
        runner, dynamic, _ = program.prepare(
            own, {}, {}, args, kwargs, abstract=True, method=method
        )
        runs.append((runner, dynamic))
    try:
        plan, _ = plan_runs(runs, kind="keras", strict=False)
    except UntraceableModelError as error:
        return str(error)
    return LayerPlan(layer, path, own_rule, rule, program, plan)


def merge(planned: Sequence[LayerPlan], model: keras.Layer, notes: Mapping[str, str]) -> Plan:
    """The plans of the layers as that of the model, with what stays float."""
    rules = list(dict.fromkeys(each.of for each in planned))
    sites: list[Any] = []
    leaves: dict[str, LeafPlan] = {}
    scales: list[Any] = []
    for each in planned:
        number = rules.index(each.of)
        sites += [replace(s, rule=None if s.rule is None else number) for s in each.plan.sites]
        leaves |= {leaf.path: leaf for leaf in each.plan.leaves}
        scales += each.plan.scales
    for path, layer in layers_of(model).items():
        for name, variable in named_variables(layer).items():
            full = f"{path}/{name}"
            if full not in leaves:
                shape, dtype = tuple(variable.shape), str(variable.dtype)
                size = stored_bytes(shape, None, dtype)
                leaves[full] = LeafPlan(full, shape, dtype, None, size, size, ())
    return Plan(
        tuple(rules),
        tuple(sites),
        tuple(leaves.values()),
        notes=tuple(f"{path}: {reason}" for path, reason in notes.items()),
        kind="keras",
        scales=tuple(scales),
    )
