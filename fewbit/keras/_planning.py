"""What will happen to each layer of a Keras model, as one Plan."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from fewbit._plan import LeafPlan, Plan, ScalePlan, stored_bytes
from fewbit._plan_messages import PlanError
from fewbit.engine import UntraceableModelError
from fewbit.keras._attention import is_attention
from fewbit.keras._choices import Choice
from fewbit.keras._emulation import PROBABILITIES, range_of_probabilities
from fewbit.keras._examples import Examples, NoExample, is_registered, is_rotary
from fewbit.keras._model_calls import Calls
from fewbit.keras._program import INSIDE, LayerProgram
from fewbit.keras._state import layer_rule, named_variables
from fewbit.keras._variables import own_variables, sublayers
from fewbit.models.planning import plan_runs
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


def has_weights(layer: keras.Layer) -> bool:
    """Whether the layer itself holds something that a product or a look-up could read."""
    return any(len(v.shape) >= 2 for v in own_variables(layer))


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
        choice = choices[path]
        candidate = has_weights(layer) or has_products(layer, choice)
        made: LayerPlan | str = choice.reason
        if candidate and choice.quantized:
            made = plan_layer(layer, path, choice, examples)
        if isinstance(made, LayerPlan):
            planned.append(made)
            if made.note:
                notes[path] = made.note
        elif candidate:
            notes[path] = made
        elif not layer.built and _builds_weights(layer):
            notes[path] = _NOTE_UNBUILT
    stuck = {path: note for path, note in notes.items() if isinstance(note, Stuck)}
    _judge_stuck(stuck, choices)
    notes |= {path: f"{note}; see fewbit.keras.register_calls" for path, note in stuck.items()}
    return planned, merge(planned, model, notes)


class Stuck(str):
    """Why a layer that was to be quantized cannot be called: a mistake, or something to be told."""

    cls: str


def _judge_stuck(stuck: Mapping[str, Stuck], choices: Mapping[str, Choice]) -> None:
    """Raise, or with strict=False warn, where layers would stay float for lack of an example."""
    if not stuck:
        return
    shown = [f"'{path}' ({reason.cls}): {reason}" for path, reason in list(stuck.items())[:5]]
    more = f"; and {len(stuck) - 5} more" if len(stuck) > 5 else ""
    first = next(iter(stuck))
    message = _MSG_STUCK.format(
        count="1 layer" if len(stuck) == 1 else f"{len(stuck)} layers",
        layers="; ".join(shown) + more,
        cls=stuck[first].cls,
        path=first,
    )
    configs = [choices[path].config for path in stuck]
    if any(config is None or config.strict for config in configs):
        leave = _LEAVE if all(config is not None for config in configs) else _LEAVE_BY_RULE
        raise PlanError(message + leave.format(path=first, pattern=re.escape(first)))
    warnings.warn(message + " They stay float.", stacklevel=5)


def _builds_weights(layer: keras.Layer) -> bool:
    return type(layer).build is not keras.Layer.build and not own_variables(layer)


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
        reason = "it was built without a recorded input shape"
    elif isinstance(error, UntraceableModelError):
        reason = str(error)
    else:
        line = str(error).strip().split("\n")[0]
        on = "the calls registered for it" if is_registered(layer) else "its build shape"
        reason = f"it cannot be called on {on} ({type(error).__name__}: {line})"
    made = Stuck(reason)
    made.cls = type(layer).__name__
    return made


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
    program = LayerProgram(
        layer,
        type(layer).call,
        path,
        rule,
        emulate=choice.emulate,
        fused=choice.fused,
        trains=choice.kind == "training",
    )
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
