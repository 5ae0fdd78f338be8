"""What will happen to each layer of a Keras model, as one Plan, and what was done to each.

The latter is read off its layers: a Plan again, its arrays by path, or lines to print.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
import numpy as np

from fewbit._util import describe
from fewbit.interpreter import UntraceableModelError, plan_runs
from fewbit.keras.config._choose import Choice
from fewbit.keras.layers._attention import is_attention
from fewbit.keras.layers._calls import Calls, Examples, NoExample, is_registered, is_rotary
from fewbit.keras.layers._classes import is_quantized, weight_scales
from fewbit.keras.layers._program import (
    INSIDE,
    PROBABILITIES,
    LayerProgram,
    layer_rule,
    named_variables,
    range_of_probabilities,
)
from fewbit.keras.layers._variables import direct_sublayers, own_variables, sublayers, value_of
from fewbit.planning import LeafPlan, Plan, PlanError, ScalePlan, stored_bytes
from fewbit.rules import QuantizationRule

_NOTE_UNBUILT = "it has not been built, so it has no weights: the model never called it"
_NOTE_IDLE = "the model never calls it, but reads its weights in another way"
_MSG_STUCK = (
    "{count} to be quantized cannot be called on examples of inputs: {layers}. Say how {cls} is "
    "called, with @fewbit.keras.register_calls({cls}) on a function of the layer that returns "
    "[(args, kwargs), ...] with jax.ShapeDtypeStruct for arrays."
)
_LEAVE = (
    " Or leave it float: exclude_list=[{path!r}]; strict=False in the config leaves all such "
    "layers float, with a warning."
)
_LEAVE_BY_RULE = (
    " Or leave it float, by a rule before the others: QuantizationRule(module_path={pattern!r}, "
    "weight_qtype=None)."
)
_NOTE_CHANNELS = "a scale per channel instead of per group ({why})"


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer that will be quantized: its plan, and the program that was traced for it."""

    layer: keras.Layer
    path: str
    rule: QuantizationRule  # the layer's own, made from the choice's
    choice: Choice
    program: LayerProgram
    plan: Plan
    note: str = ""
    runs: Sequence[tuple[Any, Any]] = ()  # the layer's calls: runners, and what to run them on


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


def model_variables(model: keras.Layer) -> dict[str, keras.Variable]:
    """The variables of all layers by path."""
    return {
        f"{path}/{name}": variable
        for path, layer in layers_of(model).items()
        for name, variable in named_variables(layer).items()
    }


def has_products(layer: keras.Layer, choice: Choice) -> bool:
    """Whether products of activations are asked for: attention scores and values, rotary angles."""
    if is_rotary(layer):
        asked = choice.config is not None and choice.config.quantize_rotary
        return asked and choice.kind != "weight_only"
    asked = choice.emulate
    if choice.config is not None and choice.config.quantize_attention is not None:
        asked = choice.config.quantize_attention
    return asked and choice.kind != "weight_only" and is_attention(layer)


def plan_layers(
    model: keras.Layer, layers: Mapping[str, keras.Layer], choices: Mapping[str, Choice]
) -> tuple[list[LayerPlan], Plan]:
    """The plan of each layer that will be quantized, and of the model."""
    planned: list[LayerPlan] = []
    notes: dict[str, str] = {}
    examples = Examples(model)
    for path, layer in layers.items():
        choice, own = choices[path], own_variables(layer)
        candidate = any(len(v.shape) >= 2 for v in own) or has_products(layer, choice)
        made: LayerPlan | str = choice.reason
        if candidate and choice.quantized:
            made = plan_layer(layer, path, choice, examples)
        if isinstance(made, LayerPlan):
            planned.append(made)
            if made.note:
                notes[path] = made.note
        elif candidate:
            notes[path] = made
        elif not (layer.built or own) and type(layer).build is not keras.Layer.build:
            notes[path] = _NOTE_UNBUILT
    stuck = {path: note for path, note in notes.items() if isinstance(note, Stuck)}
    _judge_stuck(stuck, layers, choices)
    notes |= {path: f"{note}; see fewbit.keras.register_calls" for path, note in stuck.items()}
    return planned, merge(planned, model, notes)


class Stuck(str):
    """Why a layer that was to be quantized cannot be called: a mistake, or something to be told."""


def _judge_stuck(
    stuck: Mapping[str, Stuck], layers: Mapping[str, keras.Layer], choices: Mapping[str, Choice]
) -> None:
    """Raise, or with strict=False warn, where layers would stay float for lack of an example."""
    if not stuck:
        return
    classes = {path: type(layers[path]).__name__ for path in stuck}
    shown = [f"'{path}' ({classes[path]}): {reason}" for path, reason in [*stuck.items()][:5]]
    shown += [f"and {len(stuck) - 5} more"] if len(stuck) > 5 else []
    first, count = next(iter(stuck)), "1 layer" if len(stuck) == 1 else f"{len(stuck)} layers"
    message = _MSG_STUCK.format(count=count, layers="; ".join(shown), cls=classes[first])
    configs = [choices[path].config for path in stuck]
    if any(config is None or config.strict for config in configs):
        leave = _LEAVE if all(config is not None for config in configs) else _LEAVE_BY_RULE
        raise PlanError(message + leave.format(path=first, pattern=re.escape(first)))
    warnings.warn(message + " They stay float.", stacklevel=5)


def plan_layer(
    layer: keras.Layer, path: str, choice: Choice, examples: Examples
) -> LayerPlan | str:
    """The plan of one layer, or why it is left alone."""
    assert choice.rule is not None
    try:
        return examples.first(
            layer, choice.rule, lambda calls: _on_calls(layer, path, choice, calls)
        )
    except NoExample as error:
        if error.__cause__ is None and examples.is_idle(layer):
            return _NOTE_IDLE
        return _stuck(layer, error.__cause__)


def _stuck(layer: keras.Layer, error: BaseException | None) -> Stuck:
    if error is None:
        return Stuck("it was built without a recorded input shape")
    if isinstance(error, UntraceableModelError):
        return Stuck(error)
    line = str(error).strip().split("\n")[0]
    on = "the calls registered for it" if is_registered(layer) else "its build shape"
    return Stuck(f"it cannot be called on {on} ({type(error).__name__}: {line})")


def _on_calls(layer: keras.Layer, path: str, choice: Choice, calls: Calls) -> LayerPlan | str:
    assert choice.rule is not None
    try:
        return _planned(layer, path, choice, layer_rule(path, choice.rule), calls)
    except PlanError as error:
        if choice.rule.tile_size is None:
            return str(error)
        first = error
    try:  # groups are for products; a convolution, or a weight they do not divide, has channels
        whole = layer_rule(path, choice.rule.replace(tile_size=None))
        made = _planned(layer, path, choice, whole, calls)
    except PlanError:
        return str(first)
    return made if isinstance(made, str) else replace(made, note=_NOTE_CHANNELS.format(why=first))


def _planned(
    layer: keras.Layer, path: str, choice: Choice, rule: QuantizationRule, calls: Calls
) -> LayerPlan | str:
    how: dict[str, Any] = dict(emulate=choice.emulate, fused=choice.fused, as_read=choice.as_read)
    trains = choice.kind == "training"
    program = LayerProgram(layer, type(layer).call, path, rule, trains=trains, **how)
    program.calls = calls
    runs = program.runs(calls, named_variables(layer))
    plan = layer_runs(runs)
    if not any(site.quantized for site in plan.sites):
        reasons = [f"{site.site.op_id}: {site.reason}" for site in plan.sites]
        return "; ".join(reasons) or "no product or look-up reads its weights"
    if getattr(program.provider, "attention", False):
        plan = replace(plan, scales=tuple(map(_with_known_range, plan.scales)))
    return LayerPlan(layer, path, rule, choice, program, plan, runs=runs)


def layer_runs(runs: Sequence[tuple[Any, Any]]) -> Plan:
    """The plan of one layer's calls. A layer that its rule does not meet is left alone, and the
    plan of the model says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A rule matches nothing", UserWarning)
        return plan_runs(runs, kind="keras", strict=False)[0]


def _with_known_range(scale: ScalePlan) -> ScalePlan:
    if not scale.name.endswith(f"/{PROBABILITIES}_rhs"):
        return scale
    method = range_of_probabilities(scale.how.qtype)
    return replace(scale, how=scale.how.replace(calibration_method=method))


def _shown_rule(each: LayerPlan) -> QuantizationRule:
    """The rule as the user knows it: a config has one for all layers."""
    assert each.choice.rule is not None
    return each.choice.rule.replace(module_path=".*") if each.choice.config else each.choice.rule


def merge(planned: Sequence[LayerPlan], model: keras.Layer, notes: Mapping[str, str]) -> Plan:
    """The plans of the layers as that of the model, with what stays float."""
    rules = list(dict.fromkeys(map(_shown_rule, planned)))
    sites: list[Any] = []
    leaves: dict[str, LeafPlan] = {}
    scales: list[Any] = []
    for each in planned:
        number = rules.index(_shown_rule(each))
        own = [s for s in each.plan.sites if not s.site.path.startswith(INSIDE)]
        sites += [replace(s, rule=None if s.rule is None else number) for s in own]
        leaves |= {f.path: f for f in each.plan.leaves if not f.path.startswith(INSIDE)}
        scales += each.plan.scales
    for path, variable in model_variables(model).items():
        if path not in leaves:
            shape, dtype = tuple(variable.shape), str(variable.dtype)
            size = stored_bytes(shape, None, dtype)
            leaves[path] = LeafPlan(path, shape, dtype, None, size, size, ())
    return Plan(
        tuple(rules),
        tuple(sites),
        tuple(leaves.values()),
        notes=tuple(f"{path}: {reason}" for path, reason in notes.items()),
        kind="keras",
        scales=tuple(scales),
    )


# --- What a quantized Keras model holds, and what was done to it, read off its layers -------------

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
    skipped = {id(part) for part in [*state.parts(), *state.remembered.variables.values()]}
    return {name: v for name, v in named.items() if id(v) not in skipped}


def plan_done(model: keras.Layer, quant_config: Any = None) -> Plan:
    """The plan of a model that is quantized: what was done to each layer."""
    examples, layers = Examples(model), quantized_layers(model)
    plan = merge([_layer_plan(path, each, examples) for path, each in layers.items()], model, {})
    notes = () if quant_config is None else (_NOTE_CONFIG,)
    parts = {
        f"{path}/{variable.name}"
        for path, layer in layers.items()
        for variable in named_variables(layer).values()
        if not any(variable is each for each in float_variables(layer).values())
    }
    leaves = tuple(leaf for leaf in plan.leaves if leaf.path not in parts)
    return replace(plan, leaves=leaves, notes=(*plan.notes, *notes))


def _layer_plan(path: str, layer: Any, examples: Examples) -> LayerPlan:
    """The plan of one layer, its weights seen as the floats that they stand for."""
    state = layer._fewbit
    stored = {n: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for n, v in state.hollow.items()}
    own = {**float_variables(layer), **state.hollow}
    beside = list(state.remembered.variables.values())

    def planned(calls: Calls) -> Plan:
        return layer_runs(state.program.runs(calls, own, stored, beside))

    plan = examples.first(layer, state.rule, planned, known=state.program.calls)
    plain = QuantizationRule()
    axes = plain.act_batch_axes if state.rule.act_static_scale else state.rule.act_batch_axes
    shown = state.rule.replace(module_path=".*", op_names=plain.op_names, act_batch_axes=axes)
    choice = Choice(rule=shown, kind=state.kind, **state.settings)
    return LayerPlan(layer, path, state.rule, choice, state.program, plan)


# --- The layers of a quantized model as lines: class, dotted path, scales -------------------------

_LOG = logging.getLogger("fewbit")
_FORMAT = "%(asctime)s [%(levelname)s][%(filename)s:%(lineno)s] %(message)s"
_MSG_NOT_KERAS = (
    "print_model takes a Keras model or layer, or a list of them, got {found}. For Flax models and "
    "plain functions: print(fewbit.plan(model, rules, *inputs))."
)
_MSG_WIDTHS = "str_length is two least widths, of class and path: (0, 0), not {found}."


def print_model(
    container: Any,
    max_lines: int = 999999,
    internal: bool = True,
    str_length: tuple[int, int] = (0, 0),
    path: str = "",
) -> str:
    """Print, log and return a line per layer: class, dotted path, a_scale, a_zero_point, w_scale.

    `container` is a model, a layer or a list of layers. `internal=False` leaves out the layers
    inside layers; `str_length` are the least widths of class and path; `path` is what paths begin
    with. A value that is a constant and no variable is marked `(attr)`.

    >>> import fewbit.keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name='up')])
    >>> config = fewbit.keras.StaticQuantConfig('fp8', const_scale=True)
    >>> samples = [np.ones((2, 8), 'float32')]
    >>> model = fewbit.keras.quantize_model(model, config, samples, progress=False)
    >>> text = print_model(model)
    InputLayer .input_layer...
    QStaticDense .up a_scale=[0.00223214] (attr) w_scale=[[...]]
    """
    if len(str_length) != 2:
        raise ValueError(_MSG_WIDTHS.format(found=str_length))
    rows = [row for each in _children(container) for row in _rows(each, path, internal)]
    wide, long = str_length
    lines = [f"{cls:{wide}} {place:{long}} {values}".rstrip() for cls, place, values in rows]
    if len(lines) > max_lines:
        lines = [*lines[:max_lines], f"... {len(lines) - max_lines} more layers"]
    text = "\n".join(lines)
    print(text)
    _listen()
    for line in lines:
        _LOG.debug("%s", line)
    return text


def _children(container: Any) -> list[keras.Layer]:
    """What to print: the layers of a model, or the layers themselves."""
    if isinstance(container, keras.Layer):
        inside = direct_sublayers(container)
        return [container] if is_quantized(container) or not inside else inside
    if isinstance(container, list | tuple) and all(isinstance(x, keras.Layer) for x in container):
        return list(container)
    raise TypeError(_MSG_NOT_KERAS.format(found=describe(container)))


def _rows(layer: keras.Layer, path: str, internal: bool) -> Iterator[tuple[str, str, str]]:
    place = f"{path}.{layer.name}"
    if is_quantized(layer):
        yield type(layer).__name__, place, " ".join(_values(layer))
    else:  # what only holds quantized layers goes by the name that its author gave it
        yield getattr(layer, "_fewbit_original", type(layer)).__name__, place, ""
    for child in direct_sublayers(layer) if internal else []:
        yield from _rows(child, place, internal)


def _values(layer: Any) -> Iterator[str]:
    state = layer._fewbit
    for field, end in (("a_scale", "_scale"), ("a_zero_point", "_zero_point")):
        found = {name: held for name, held in state.scales.items() if name.endswith(end)}
        for name, held in found.items():
            key = f"[{name.removesuffix(end)}]" if len(found) > 1 else ""
            yield f"{field}{key}={_text(np.ravel(value_of(held)), held)}"
    for name, scale in weight_scales(state).items():
        key = f"[{name}]" if len(state.stored) > 1 else ""
        yield f"w_scale{key}={_text(scale, state.stored[name].parts[0])}"


def _text(value: Any, held: Any) -> str:
    """Numbers on one line, the middle of many left out; marked if what is held is a constant."""
    array = np.asarray(value)
    array = array.astype(np.float32) if array.dtype.kind in "fV" else array
    text = np.array2string(array, threshold=8, edgeitems=2, max_line_width=10**9)
    return " ".join(text.split()) + " (attr)" * (not isinstance(held, keras.Variable))


def _listen() -> None:
    """Show log records if the environment asks for them and the program has set up nothing."""
    level = os.environ.get("LOGLEVEL", "").upper()
    if level in logging.getLevelNamesMapping() and not _LOG.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        _LOG.addHandler(handler)
        _LOG.setLevel(level)
