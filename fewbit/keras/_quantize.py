"""Quantize a Keras model: plan every layer, calibrate, convert the layers one by one."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras

from fewbit._util import progress as with_progress
from fewbit.calibration import fixed_scale, is_fixed, static_scale
from fewbit.keras._calibrate import observing, run_calibration, statistics, with_ranges
from fewbit.keras._memory import give_back, giving_back
from fewbit.keras._pairs import clone_model
from fewbit.keras._planning import LayerPlan, layers_of, plan_done, plan_layers, quantized_layers
from fewbit.keras.config._choose import Choice, choose
from fewbit.keras.layers._attention import is_attention
from fewbit.keras.layers._classes import become, is_quantized
from fewbit.keras.layers._program import LayerState, named_variables
from fewbit.keras.layers._variables import (
    QuantizedVariable,
    add_variable,
    own_variables,
    store,
    sublayers,
    unlocked,
)
from fewbit.keras.saving._format import keep_config
from fewbit.keras.saving._restore import make_saveable
from fewbit.keras.training._qat import (
    check_remembers,
    guard_training,
    step_through_cells,
    train_quantized,
    training_choice,
)
from fewbit.kernels import unpack
from fewbit.params import quantize_leaf
from fewbit.planning import LeafPlan, Plan, act_alone
from fewbit.providers import QuantizationProvider
from fewbit.qarray import WithAux, check_finite
from fewbit.rules import QtRule
from fewbit.training import QtProvider

# --- A model as it was, where quantizing it fails: nothing is half done ---------------------------

_MSG_LOST = (
    "The values of {what} of '{model}' are lost: {names}. Keras had handed them to a program that "
    "failed. Make the model again, or load its weights, before the next try."
)
_MSG_ROUNDED = (
    "'{model}' is float again, but {what} had been quantized and given up, and have the values "
    "that their codes stood for: {names}. For the exact ones make the model again, or load its "
    "weights."
)


@contextlib.contextmanager
def as_it_was_on_failure(model: keras.Layer) -> Iterator["Before"]:
    """While anything that is raised, an interrupt too, puts the model back."""
    before = Before(model)
    try:
        yield before
    except BaseException as error:
        lost, rounded = before.restore()
        for message, paths in ((_MSG_LOST, lost), (_MSG_ROUNDED, rounded)):
            if paths:
                names = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
                what = "1 variable" if len(paths) == 1 else f"{len(paths)} variables"
                error.add_note(message.format(what=what, model=model.name, names=names))
        raise


class Before:
    """A model at one moment, and the values of its variables for as long as they are kept."""

    def __init__(self, model: keras.Layer):
        self._layers = [model, *sublayers(model)]
        self._objects = [(each, type(each), dict(vars(each))) for each in self._parts()]
        self._tracked = [_tracked(each) for each in self._layers]
        self._variables = [
            (v, type(v), {name: held for name, held in vars(v).items() if name != "_value"})
            for v in self._all_variables()
        ]
        self._values = {id(v): vars(v).get("_value") for v, _, _ in self._variables}

    def look_again(self) -> None:
        """Keep the values of now: those of before may have been given away since."""
        for variable, _, _ in self._variables:
            if _is_usable(vars(variable).get("_value")):
                self._values[id(variable)] = variable._value

    def let_go(self, layer: keras.Layer) -> None:
        """Keep the floats of this layer no longer: they are needed elsewhere."""
        for variable in own_variables(layer):
            self._values[id(variable)] = None

    def restore(self) -> tuple[list[str], list[str]]:
        """Put everything back; the paths of variables whose values are nowhere any more, and of
        those that have the values that their codes stand for."""
        for layer in self._layers:
            _finish_run(layer)
        lost, rounded = [], []
        for variable, cls, _ in self._variables:
            held, now = self._values[id(variable)], vars(variable).get("_value")
            # What the user's own code has set since stays; what was given away comes back.
            if isinstance(variable, QuantizedVariable) and not issubclass(cls, QuantizedVariable):
                now = None
                if not _is_usable(held):
                    held = variable.value
                    rounded.append(variable.path)
            if not _is_usable(now) and held is not None and not _is_usable(held):
                lost.append(variable.path)
            self._values[id(variable)] = now if _is_usable(now) else held
        for each, cls, attributes in [*self._objects, *self._variables]:
            each.__class__ = cls
            for name in vars(each).keys() - attributes.keys():
                del vars(each)[name]
            vars(each).update(attributes)
        for layer, (stores, ids, locked) in zip(self._layers, self._tracked, strict=True):
            tracker: Any = layer._tracker
            for name, tracked in stores.items():
                tracker.config[name][1][:] = tracked
                tracker.stored_ids[name] = ids[name]
            tracker.locked = locked
        for variable, _, _ in self._variables:
            variable._value = self._values[id(variable)]
        return lost, rounded

    def _parts(self) -> list[Any]:
        """The layers, and what quantized ones know of themselves."""
        states = [s for s in (getattr(each, "_fewbit", None) for each in self._layers) if s]
        remembered = [state.remembered for state in states if hasattr(state, "remembered")]
        return [*self._layers, *states, *remembered]

    def _all_variables(self) -> list[keras.Variable]:
        found = list(self._layers[0].variables)
        for each in self._layers:
            if isinstance(each, keras.Model):
                found += each.metrics_variables
                found += getattr(getattr(each, "optimizer", None), "variables", [])
        return list({id(v): v for v in found}.values())


def _tracked(layer: Any) -> tuple[Any, Any, bool]:
    tracker = layer._tracker
    stores = {name: list(store) for name, (_, store) in tracker.config.items()}
    return stores, {name: set(ids) for name, ids in tracker.stored_ids.items()}, tracker.locked


def _finish_run(layer: Any) -> None:
    """Give variables the values that a run of Keras, broken off, was working with."""
    state = getattr(layer, "_jax_state", None)
    if not state or getattr(layer, "_jax_state_synced", True):
        return
    for name in ("trainable_variables", "non_trainable_variables", "metrics_variables"):
        for variable, value in zip(getattr(layer, name), state.get(name) or [], strict=False):
            if not _is_usable(variable._value) and _is_usable(value):
                variable._value = value


def _is_usable(value: Any) -> bool:
    return value is not None and not (isinstance(value, jax.Array) and value.is_deleted())


# --- What `compile` and `fit` left on a model, once its layers are others -------------------------


def forget_compiled(model: keras.Layer) -> None:
    """Drop what Keras compiled for the layers as they were."""
    for each in [model, *sublayers(model)]:
        for name in ("train_function", "test_function", "predict_function", "generate_function"):
            if getattr(each, name, None) is not None:
                setattr(each, name, None)


def renew_optimizers(model: keras.Layer, keep: bool = False) -> None:
    """Optimizers as before their first step: what they had was about floats that are gone.

    With `keep` they go on with what they had, and know the variables that came meanwhile.
    """
    for each in [model, *sublayers(model)]:
        optimizer = getattr(each, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.Optimizer) and optimizer.built:
            with warnings.catch_warnings():  # Keras' own, about NumPy
                warnings.simplefilter("ignore", DeprecationWarning)
                each.optimizer = type(optimizer).from_config(optimizer.get_config())
            each.optimizer.build(each.trainable_variables)
            before = {v.path: v for v in optimizer.variables} if keep else {}
            for variable in each.optimizer.variables:
                if variable.path in before:
                    variable.assign(before[variable.path].value)


# --- What is asked for and would not happen: said, instead of left out ----------------------------

_MSG_TRAINING_RULES = (
    "{rule!r} says how a model trains, and a list of rules makes one that only serves. To train, "
    "give the list to a provider: quantize_model(model, fewbit.QtProvider(rules)), fit, then "
    "fewbit.to_ptq(model). To serve now with the types of the forward pass, write "
    "fewbit.PtqProvider(rules)."
)
_MSG_FLOAT_ATTENTION = (
    "{config}: dot_product_attention_enable=True decides nothing. It is about quantized products "
    "inside attention, and those of {layers} stay float: Keras takes its fused operation for them "
    "wherever it can. Leave the field out, or quantize the products with quantize_attention=True."
)
_MSG_NO_ATTENTION = (
    "{config}: dot_product_attention_enable=True decides nothing, as none of the layers that the "
    "config quantizes is one of attention. Leave the field out."
)
_MSG_DATA = (
    "The calibration data was not used: {config} takes no range from data. Leave it out, or use "
    "StaticQuantConfig (in a rule: act_static_scale=True) for ranges that are measured once."
)


def check_rules(quant_config: Any) -> None:
    """Raise for rules of training that come without the provider that trains."""
    for rule in quant_config if isinstance(quant_config, list | tuple) else ():
        if isinstance(rule, QtRule):
            raise TypeError(_MSG_TRAINING_RULES.format(rule=rule))


def warn_of_attention(
    layers: Mapping[str, keras.Layer],
    choices: Mapping[str, Choice],
    planned: Sequence[LayerPlan],
) -> None:
    """Warn where a config decides how attention is computed and quantizes none."""
    decided = {id(each.choice.config) for each in planned if is_attention(each.layer)}
    for config in {id(choice.config): choice.config for choice in choices.values()}.values():
        if config is None or not config.dot_product_attention_enable or id(config) in decided:
            continue
        own = [path for path, choice in choices.items() if choice.config is config]
        paths = [f"'{path}'" for path in own if is_attention(layers[path])]
        shown = "".join(paths[:1]) + (f" and {len(paths) - 1} more" if paths[1:] else "")
        message = _MSG_FLOAT_ATTENTION if paths else _MSG_NO_ATTENTION
        warnings.warn(message.format(config=type(config).__name__, layers=shown), stacklevel=4)


def warn_of_data(quant_config: Any) -> None:
    """Warn that calibration data was given to what needs none."""
    many = isinstance(quant_config, list | tuple)
    name = "this list of rules" if many else type(quant_config).__name__
    warnings.warn(_MSG_DATA.format(config=name), stacklevel=3)


# --- Plan, calibrate, convert ---------------------------------------------------------------------

_KEPT = 2**22  # bytes of floats that are kept, to go back to, until all layers are quantized
_MSG_NOT_A_MODEL = (
    "fewbit.keras.quantize_model takes a Keras model or layer, got {found}. Flax models and plain "
    "functions go to fewbit.quantize_model(model, provider, *inputs)."
)
_MSG_TWICE = (
    "{model} is quantized already: '{path}' is a {cls}. Quantize the float model it came from; "
    "cfg1 + cfg2 or a list of rules gives layers different types in one call."
)
_MSG_UNBUILT = (
    "{model} has not been built, so it has no weights to quantize: {first} has none. Call it once "
    "on sample data, model(x), or model.build(input_shape), then quantize it."
)
_MSG_NO_CALIBRATION = (
    "Calibration function must be provided for static quantization. It gets the model and runs it "
    "on sample data: quantize_model(model, config, lambda model: model.predict(samples)); an array "
    "of samples or an iterable of batches does too. DynamicQuantConfig needs none."
)
_MSG_NOTHING = (
    "Nothing in {model} would be quantized. {why} fewbit.plan(model, config) shows every layer; "
    "strict=False in the config lets this pass."
)


def quantize_model(
    model: keras.Layer,
    quant_config: Any,
    calib_function: Callable[[Any], Any] | Iterable[Any] | None = None,
    inplace: bool = True,
    *,
    progress: bool = True,
) -> Any:
    """A Keras model with quantized layers; with `inplace` (the default) the model itself.

    `quant_config` is a `StaticQuantConfig`, a `DynamicQuantConfig`, a sum of them, or a list of
    `fewbit.QuantizationRule` whose `module_path` matches layer paths. Static ranges come from
    `calib_function(model)`, which runs the float model on sample data, or from the data itself: an
    array, a dict of arrays by input name, batches as for `fit`, a dataset.

    >>> import keras, numpy as np, fewbit.keras
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    >>> config = fewbit.keras.DynamicQuantConfig(weight_dtype='int8')
    >>> model = quantize_model(model, config)
    >>> type(model.layers[0]).__name__, model(np.ones((2, 64), 'float32')).shape
    ('QDynamicDense', (2, 64))
    """
    _check_model(model)
    check_rules(quant_config)
    if not inplace:
        model = clone_model(model)
    with as_it_was_on_failure(model) as before:
        planned, plan = plan_model(model, quant_config)
        trains = isinstance(quant_config, QtProvider)
        if calib_function is not None and (trains or not needs_calibration(planned)):
            warn_of_data(quant_config)
        if trains:
            _train(model, planned)
        else:
            quantize_planned(model, planned, plan, calib_function, before, progress=progress)
    return keep_config(model, quant_config)


def _train(model: keras.Layer, planned: Sequence[LayerPlan]) -> None:
    for each in planned:
        train_quantized(each)
    step_through_cells(model, planned)
    make_saveable(model)
    guard_training(model)
    forget_compiled(model)
    if any(each.layer._fewbit.remembered.histories for each in planned):
        renew_optimizers(model, keep=True)  # there are more trainable variables than before


def quantize_planned(
    model: keras.Layer,
    planned: Sequence[LayerPlan],
    plan: Plan,
    calib_function: Any,
    before: Before,
    absmax: Mapping[str, Any] = {},
    *,
    progress: bool = True,
) -> None:
    """Quantize the model as it was planned; `absmax` are the known ranges of weights, by path."""
    stats = None
    if needs_calibration(planned):
        check_calibration(calib_function)
        forget_compiled(model)
        give_back()
        with observing(_static(planned), sublayers(model)) as collectors:
            run_calibration(calib_function, model, progress=progress)
        forget_compiled(model)  # what reports to the collectors
        stats = statistics(collectors, plan)
        planned = with_ranges(planned, collectors, stats)
    convert_all(model, planned, before, stats, absmax, progress=progress)


def needs_calibration(planned: Sequence[LayerPlan]) -> bool:
    """Whether data decides any scale."""
    return any(not is_fixed(scale) for each in _static(planned) for scale in each.plan.scales)


def check_calibration(calib_function: Any) -> None:
    """Raise if there is no data."""
    if calib_function is None:
        raise ValueError(_MSG_NO_CALIBRATION)


def _static(planned: Sequence[LayerPlan]) -> list[LayerPlan]:
    return [each for each in planned if each.choice.kind == "static"]


def convert_all(
    model: keras.Layer,
    planned: Sequence[LayerPlan],
    before: Before,
    stats: Any = None,
    absmax: Mapping[str, Any] = {},
    *,
    progress: bool = True,
) -> None:
    """Quantize every planned layer.

    What can be wrong with weights and statistics is found while all are there. The floats of the
    smaller layers are kept to the end, to go back to; all of them would be too much.
    """
    scales = {each.path: _scales(each, stats) for each in planned}
    for each in planned:
        own = named_variables(each.layer)
        for leaf in each.plan.leaves:
            if leaf.how is not None:
                check_finite(own[leaf.path.rpartition("/")[2]].value, leaf.path)
    before.look_again()
    total, kept = sum(map(_bytes, planned)), 0
    # The largest layers last: what the others gave up makes room for them.
    layers = with_progress(sorted(planned, key=_bytes), "Quantizing", show=progress)
    for each in giving_back(layers, _bytes, total):
        kept += _bytes(each)
        if kept > max(_KEPT, total // 32):
            before.let_go(each.layer)
        convert(each, scales[each.path], absmax)
    make_saveable(model)
    guard_training(model)
    forget_compiled(model)
    renew_optimizers(model)


def plan(model: keras.Layer, quant_config: Any = None) -> Plan:
    """What `quantize_model` would do to every layer, as a table to read; nothing is changed.

    Of a model that is quantized: what was done to it, which needs no config.

    >>> import keras, fewbit.keras
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    >>> made = plan(model, fewbit.keras.DynamicQuantConfig('int4', group_size=32))
    >>> [(row.site.op_id, row.weight_qtype, row.granularity) for row in made.sites]
    [('dot_general0', 'int4', 'tile 32')]
    """
    if isinstance(model, keras.Layer) and quantized_layers(model):
        return plan_done(model, quant_config)
    _check_model(model)
    check_rules(quant_config)
    return plan_model(model, quant_config)[1]


def plan_model(model: keras.Layer, quant_config: Any) -> tuple[list[LayerPlan], Plan]:
    """What would be done to each layer, and the plan of the whole."""
    layers = layers_of(model)
    trains = isinstance(quant_config, QtProvider)
    emulate = trains and quant_config.emulate
    if isinstance(quant_config, QuantizationProvider):
        quant_config = list(quant_config.rules)
    choices = choose(quant_config, [(path, type(layer)) for path, layer in layers.items()])
    if trains:
        choices = {path: training_choice(each, emulate) for path, each in choices.items()}
    planned, plan = plan_layers(model, layers, choices)
    if trains:
        check_remembers(model, planned)
    configs = [choice.config for choice in choices.values()]
    if not planned and any(config is None or config.strict for config in configs):
        why = [f"{note}." for note in plan.notes[:3]]
        rules = enumerate(quant_config if isinstance(quant_config, list | tuple) else ())
        alone = [act_alone(i, rule) for i, rule in rules if rule.switched_off and rule.act_qtype]
        raise ValueError(_MSG_NOTHING.format(model=model.name, why=" ".join(alone[:1] or why)))
    warn_of_attention(layers, choices, planned)
    return planned, plan


def convert(
    each: LayerPlan,
    scales: Mapping[str, Any],
    absmax: Mapping[str, Any] = {},
    ready: Mapping[str, WithAux] = {},
) -> None:
    """Give one layer its quantized weights, its static scales and its class.

    `absmax` has the ranges of weights that are known, by path; `ready` the weights that are
    quantized already, by name.
    """
    layer, choice, config = each.layer, each.choice, each.choice.config
    own = named_variables(layer)
    settings = {**choice.settings, "packed": choice.packed}
    state = LayerState(each.path, each.rule, str(choice.kind), each.program, settings)
    for leaf in each.plan.leaves:
        if leaf.how is None:
            continue
        name = leaf.path.rpartition("/")[2]
        value = ready.get(name)
        if value is None:
            value = _quantized(own[name], leaf, choice, absmax.get(leaf.path))
        constant = config is not None and config.const_weight
        state.stored[name] = store(layer, own[name], value, constant=constant)
        state.hollow[name] = own[name]
    constant = config is not None and config.const_scale
    for name, value in scales.items():
        with unlocked(layer):
            state.scales[name] = value if constant else add_variable(layer, name, value)
    become(layer, state)


def _scales(each: LayerPlan, stats: Any) -> dict[str, Any]:
    """The static scales of a layer, by '<op_id>_lhs_scale'."""
    found: dict[str, Any] = {}
    for scale in each.plan.scales:
        if is_fixed(scale):
            made = fixed_scale(scale)
        elif scale.name in stats.entries:
            made = static_scale(scale, stats.statistic(scale.name))
        else:
            continue  # of a way of calling the layer that calibration did not take
        name = scale.name.rpartition("/")[2]
        found |= {name + end: value for end, value in made.items()}
    return found


def _bytes(each: LayerPlan) -> int:
    return sum(variable.value.nbytes for variable in named_variables(each.layer).values())


def _quantized(
    variable: keras.Variable, leaf: LeafPlan, choice: Choice, absmax: Any = None
) -> WithAux:
    """The variable's value as the plan's leaf says."""
    assert leaf.how is not None
    # One scale for all, kept once per channel: the form that kernels read.
    one = choice.granularity == "per_tensor" and not leaf.how.tiled_axes
    measured = leaf.how.replace(channelwise_axes=()) if one else None
    made = quantize_leaf(leaf.path, variable.value, leaf, measured, absmax=absmax)
    made = made if choice.packed else unpack(made)
    return jax.block_until_ready(made)  # or floats of many layers would be held until they ran


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Layer):
        raise TypeError(_MSG_NOT_A_MODEL.format(found=type(model).__name__))
    name = f"{type(model).__name__} '{model.name}'"
    for path, layer in layers_of(model).items():
        if is_quantized(layer):
            raise ValueError(_MSG_TWICE.format(model=name, path=path, cls=type(layer).__name__))
    if not model.variables:
        first = next((p for p, layer in layers_of(model).items() if not layer.built), model.name)
        raise ValueError(_MSG_UNBUILT.format(model=name, first=f"'{first}'"))
