"""Quantize a Keras model: plan every layer, calibrate, convert the layers one by one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import keras

from fewbit._plan import LeafPlan, Plan
from fewbit._progress import progress as with_progress
from fewbit.keras._calibration import observing, statistics
from fewbit.keras._calibration_data import run_calibration
from fewbit.keras._choices import Choice, choose
from fewbit.keras._classes import become, is_quantized
from fewbit.keras._cloning import clone_model
from fewbit.keras._compiled import forget_compiled, renew_optimizers
from fewbit.keras._freed import give_back, giving_back
from fewbit.keras._planning import LayerPlan, layers_of, plan_layers
from fewbit.keras._qat import (
    check_remembers,
    step_through_cells,
    train_quantized,
    training_choice,
)
from fewbit.keras._ranges import with_ranges
from fewbit.keras._reading import plan_done, quantized_layers
from fewbit.keras._serial_config import keep_config
from fewbit.keras._serial_holders import make_saveable
from fewbit.keras._state import LayerState, named_variables
from fewbit.keras._training import guard_training
from fewbit.keras._undo import Before, as_it_was_on_failure
from fewbit.keras._unheeded import check_rules, warn_of_attention, warn_of_data
from fewbit.keras._variables import add_variable, store, sublayers, unlocked
from fewbit.layouts import unpack
from fewbit.modes.provider import QuantizationProvider
from fewbit.modes.qt import QtProvider
from fewbit.params import quantize_leaf
from fewbit.qarray import WithAux, check_finite
from fewbit.static_statistics import fixed_scale, is_fixed, static_scale
from fewbit.stored_checks import act_alone

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
        _check_weights(each)
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
    if not planned and any(
        choice.config is None or choice.config.strict for choice in choices.values()
    ):
        why = [f"{note}." for note in plan.notes[:3]]
        rules = enumerate(quant_config if isinstance(quant_config, list | tuple) else ())
        alone = [act_alone(i, rule) for i, rule in rules if rule.switched_off and rule.act_qtype]
        raise ValueError(_MSG_NOTHING.format(model=model.name, why=" ".join(alone[:1] or why)))
    warn_of_attention(layers, choices, planned)
    return planned, plan


def convert(each: LayerPlan, scales: Mapping[str, Any], absmax: Mapping[str, Any] = {}) -> None:
    """Give one layer its quantized weights, its static scales and its class.

    `absmax` has the ranges of weights that are known, by path.
    """
    layer, choice = each.layer, each.choice
    own = named_variables(layer)
    settings = {
        "granularity": choice.granularity,
        "emulate": choice.emulate,
        "fused": choice.fused,
        "packed": choice.packed,
    }
    state = LayerState(each.path, each.rule, str(choice.kind), each.program, settings)
    config = choice.config
    for leaf in each.plan.leaves:
        if leaf.how is None:
            continue
        name = leaf.path.rpartition("/")[2]
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


def _check_weights(each: LayerPlan) -> None:
    """Raise if a weight cannot be quantized for its values."""
    own = named_variables(each.layer)
    for leaf in each.plan.leaves:
        if leaf.how is not None:
            check_finite(own[leaf.path.rpartition("/")[2]].value, leaf.path)


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
