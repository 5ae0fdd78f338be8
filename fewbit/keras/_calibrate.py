"""Calibrate a Keras model: its layers report what they see while the user's own code runs it.

The code may call the model, `predict`, or `generate` inside a compiled loop. So what a layer sees
leaves the program through a callback, which no way of compiling the model can lose.
"""

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from fewbit._util import describe
from fewbit._util import progress as with_progress
from fewbit.calibration import (
    FINITE,
    HISTOGRAM,
    TAIL,
    CalibrationError,
    Entry,
    Observer,
    ObserverTap,
    Operand,
    Statistics,
    by_operand,
    combine_all,
    cure_by_rule,
    far_message,
    far_ranges,
    is_fixed,
    is_tiny,
    model_digest,
    observer_named,
    operands_of,
)
from fewbit.interpreter import Reading, Runner, Traced
from fewbit.keras._memory import Leftovers
from fewbit.keras._planning import LayerPlan
from fewbit.keras.layers._classes import run_by_fewbit
from fewbit.keras.layers._program import named_variables
from fewbit.planning import Decision, Plan, ScalePlan
from fewbit.tracing import scope_name

_MSG_NOT_FINITE = (
    "Calibration met NaN or infinity at the input of '{path}' ({cls}), in its call number {call}. "
    "Look at the data and at the float model first: fewbit cannot choose a range for such values."
)
_MOST_PENDING = 256


class Collector:
    """What one layer's observers have seen so far."""

    def __init__(self, layer_plan: LayerPlan, leftovers: Leftovers):
        self.layer_plan, self.leftovers = layer_plan, leftovers
        names = ["range", HISTOGRAM, TAIL]
        self.observers: dict[str, Observer] = {name: observer_named(name) for name in names}
        self.operands: dict[str, Operand] = {}
        self.calls = 0
        self.spoilt: int | None = None
        self._total: dict[str, Reading] = {}
        self._pending: list[dict[str, Reading]] = []
        self._lock = threading.Lock()
        self._compiled: dict[Runner, Any] = {}

    def run(self, layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's float call, observed."""
        program = self.layer_plan.program
        runner, dynamic, others = program.prepare(named_variables(layer), {}, {}, args, kwargs)
        if runner not in self._compiled:
            self._compiled[runner] = jax.jit(functools.partial(self._observed, runner))
        with jax.named_scope(scope_name(self.layer_plan.path, type(layer).__name__)):
            result, readings = self._compiled[runner](dynamic)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(readings)):
            self.leftovers.expect()
            jax.debug.callback(self.add, readings)
        else:
            self.add(readings)
            self._settle()
        return program.finish(result, others, args, kwargs)

    def _observed(self, runner: Runner, dynamic: list[Any]) -> Any:
        out, readings = runner.tapped(dynamic, self._tap)
        return out, by_operand(readings)

    def _tap(self, traced: Traced, decisions: dict[str, Decision]) -> ObserverTap:
        sites = traced.program.sites
        found = [operand for ts in sites for operand in operands_of(ts, decisions[ts.site.id])]
        tap = ObserverTap(found, self.observers, ["range", TAIL])
        self.operands |= {o.name: o for o in found if tap.observers_of(o)}
        return tap

    def add(self, readings: dict[str, Reading]) -> None:
        """Take what one call saw. Called from inside programs too: no JAX in here."""
        self.leftovers.give_back()
        held = jax.tree.map(np.asarray, readings)
        with self._lock:
            self.calls += 1
            finite = all(np.all(reading.value[FINITE]) for reading in held.values())
            if not finite and self.spoilt is None:
                self.spoilt = self.calls
            self._pending.append(held)

    def _settle(self, force: bool = False) -> None:
        if not force and len(self._pending) < _MOST_PENDING:
            return
        with self._lock:
            pending, self._pending = self._pending, []
        combine = combine_all(tuple(self.observers.items()))
        for readings in pending:
            shared = [name for name in readings if name in self._total]
            # By number: names differ from layer to layer, and each would compile its own program.
            both = combine(
                {str(k): self._total[name] for k, name in enumerate(shared)},
                {str(k): readings[name] for k, name in enumerate(shared)},
            )
            self._total |= readings | {name: both[str(k)] for k, name in enumerate(shared)}

    def entries(self) -> dict[str, Entry]:
        """What was seen, by operand."""
        self._settle(force=True)
        if self.spoilt is not None:
            where = dict(path=self.layer_plan.path, cls=type(self.layer_plan.layer).__name__)
            raise CalibrationError(_MSG_NOT_FINITE.format(**where, call=self.spoilt))
        found = {}
        for name, reading in self._total.items():
            operand, count = self.operands[name], np.asarray(reading.count)
            seen = {o: state for o, state in reading.value.items() if o != FINITE}
            states = {o: jax.tree.map(np.asarray, state) for o, state in seen.items()}
            found[name] = Entry(operand.site.id, operand.side, count, states, operand.range_method)
        return found


@contextlib.contextmanager
def observing(
    planned: Sequence[LayerPlan], layers: Sequence[keras.Layer]
) -> Iterator[list[Collector]]:
    """While the layers report to collectors; their classes are as before afterwards.

    `layers` are all of the model: recurrent ones step through their cells meanwhile, as they will
    when the cells are quantized.
    """
    leftovers = Leftovers()
    collectors = [Collector(each, leftovers) for each in planned]
    before: list[Any] = [type(each.layer) for each in planned]
    whole = [(layer, layer.use_cudnn) for layer in layers if hasattr(layer, "use_cudnn")]
    try:
        for layer, _ in whole:
            layer.use_cudnn = False
        for collector, original in zip(collectors, before, strict=True):
            seen: Any = collector.layer_plan.layer
            seen._fewbit = collector
            seen.__class__ = _observed_class(original)
        yield collectors
        jax.effects_barrier()
    finally:
        for layer, setting in whole:
            layer.use_cudnn = setting
        for each, cls in zip(planned, before, strict=True):
            each.layer.__class__ = cls
            del each.layer._fewbit


@functools.cache
def _observed_class(original: type[keras.Layer]) -> type[keras.Layer]:
    return type(f"Observed{original.__name__}", (original,), {"call": run_by_fewbit(original)})


def statistics(collectors: Sequence[Collector], plan: Plan) -> Statistics:
    """What all layers saw, as one value."""
    entries: dict[str, Entry] = {}
    for collector in collectors:
        entries |= collector.entries()
    calls = max((collector.calls for collector in collectors), default=0)
    return Statistics("keras", model_digest(plan), calls, entries)


# --- Data for calibration, in every form in which Keras takes data --------------------------------

_SIZE = 32  # samples of one array that the model is called on at once, as `predict` does

_MSG_FORM = (
    "Calibration data cannot be {found}. Give an array of samples, a dict of arrays by input name, "
    "a list of batches, a tf.data.Dataset, a keras.utils.PyDataset, or a function that runs the "
    "model: lambda model: model.predict(samples)."
)
_MSG_TEXT = (
    "Calibration data holds text ({found}), and the model is called on numbers. Give a function "
    "that runs it on text: lambda model: model.generate(prompts), or model.predict(texts)."
)
_MSG_EMPTY = (
    "There are no batches to calibrate with: {found} gave none. A generator gives its batches "
    "once: make a new one, or keep them in a list."
)
_MSG_NO_SAMPLES = "There are no samples to calibrate with: {found} has none."
_MSG_ENDLESS = (
    "{found} does not end, so calibration would not either. Give it an end: dataset.take(8), or "
    "itertools.islice(batches, 8)."
)
_MSG_UNBATCHED = (
    "Batch {number} of the calibration data has the shape {shape}, which is that of one sample: "
    "the model takes {wanted}. Put samples into batches: dataset.batch(32), or samples[None]."
)
_MSG_TWO_WAYS = (
    "{count} arrays of shapes {shapes} in a tuple may be batches, or inputs with labels. Write a "
    "list for batches, [a, b], or give the inputs alone."
)
_MSG_INPUTS = (
    "Batch {number} of the calibration data has {found} arrays, and {model} has {count} inputs: "
    "{names}. Give them as a dict by name, as a list, or, with labels, as (inputs, labels)."
)
_MSG_LENGTHS = "The arrays of calibration data have different numbers of samples: {lengths}."


def run_calibration(data: Any, model: keras.Layer, *, progress: bool = True) -> None:
    """Run the model on calibration data, or let the function that was given run it."""
    if callable(data) and not _is_array(data):
        data(model)
        return
    count = 0
    for batch in batches_of(data, model, progress=progress):
        count += 1
        inputs = _checked(_inputs(batch, model, count), model, count)
        if isinstance(model, keras.Model):
            model.predict_on_batch(inputs)
        else:
            model(inputs)
    if not count:
        raise CalibrationError(_MSG_EMPTY.format(found=describe(data)))


def batches_of(data: Any, model: keras.Layer, *, progress: bool = True) -> Iterator[Any]:
    """The batches in calibration data; whole arrays of samples are cut into some.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    >>> [batch.shape for batch in batches_of(np.zeros((40, 2)), model)]
    [(32, 2), (8, 2)]
    """
    if isinstance(data, str | bytes):
        raise TypeError(_MSG_TEXT.format(found=describe(data)))
    whole = _whole(data, model)
    if whole is not None:
        size = _batch_size(model)
        starts = range(0, _length(whole), size)
        for start in with_progress(starts, "Calibrating", show=progress):
            yield _each(lambda array, at=start: array[at : at + size], whole)
        return
    numbered = isinstance(data, keras.utils.PyDataset)
    if not numbered and not isinstance(data, Iterable):
        raise TypeError(_MSG_FORM.format(found=describe(data)))
    total = _total(data)
    found = map(data.__getitem__, range(total or 0)) if numbered else iter(data)
    yield from with_progress(found, "Calibrating", total, show=progress)


def _whole(data: Any, model: keras.Layer) -> Any:
    """All samples as what the model takes, where the data is arrays of samples; else None."""
    if _is_array(data) or isinstance(data, Mapping):
        return _each(_held, data)
    if not isinstance(data, list | tuple) or not data:
        return None
    if all(isinstance(each, int | float | list) for each in data) and not _holds_arrays(data):
        return np.asarray(data)  # numbers, in lists of lists
    count = _count(model)
    if _has_labels(data, count):
        return _each(_held, data[0])
    if not all(map(_is_array, data)):
        return None
    if count is not None and count > 1 and len(data) == count:
        return [_held(each) for each in data]
    if isinstance(data, list) or len(data) not in (2, 3):
        return None
    if len({tuple(each.shape[1:]) for each in data}) == 1:
        shapes = ", ".join(str(tuple(each.shape)) for each in data)
        raise ValueError(_MSG_TWO_WAYS.format(count=len(data), shapes=shapes))
    return _held(data[0])


def _has_labels(data: Sequence[Any], count: int | None) -> bool:
    """Whether data is inputs in a dict or a list, with labels, as `fit` takes them."""
    if not isinstance(data, tuple) or len(data) not in (2, 3) or not all(map(_is_array, data[1:])):
        return False
    if isinstance(data[0], Mapping):
        return True
    several = isinstance(data[0], list | tuple) and count is not None and len(data[0]) == count > 1
    return several and all(map(_is_array, data[0]))


def _inputs(batch: Any, model: keras.Layer, number: int) -> Any:
    """What the model is called on, of a batch with or without labels."""
    count = _count(model)
    if not isinstance(batch, list | tuple) or not batch:
        return batch
    several = count is not None and count > 1
    if several and len(batch) == count and all(map(_is_array, batch)):
        return list(batch)
    labelled = isinstance(batch, tuple) or (count == 1 and len(batch) > 1)
    if not labelled or not 1 <= len(batch) <= 3:
        return batch
    if several and _is_array(batch[0]):
        names = ", ".join(repr(each.name) for each in model.inputs)
        found = dict(found=len(batch), count=count, names=names, model=f"'{model.name}'")
        raise ValueError(_MSG_INPUTS.format(number=number, **found))
    return batch[0]


def _checked(inputs: Any, model: keras.Layer, number: int) -> Any:
    inputs = _each(_held, inputs)
    wanted = getattr(model, "inputs", None)
    if wanted and len(wanted) == 1 and _is_array(inputs):
        shape, own = tuple(inputs.shape), tuple(wanted[0].shape)
        fits = [a == b or b is None for a, b in zip(shape, own[1:], strict=False)]
        if len(shape) == len(own) - 1 and all(fits):
            raise ValueError(_MSG_UNBATCHED.format(number=number, shape=shape, wanted=own))
    return inputs


def _held(array: Any) -> Any:
    """An array as NumPy's or JAX's own, whichever library made it."""
    made = array if hasattr(array, "addressable_shards") else np.asarray(array)
    if made.dtype.kind in "OSU":
        raise TypeError(_MSG_TEXT.format(found=describe(array)))
    return made


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def _holds_arrays(value: Any) -> bool:
    return any(_is_array(leaf) for leaf in keras.tree.flatten(value))


def _each(do: Any, value: Any) -> Any:
    """The value with every array in it changed; a list of numbers is an array in a dict."""
    if isinstance(value, Mapping):
        return {name: _each(do, each) for name, each in value.items()}
    if isinstance(value, list | tuple) and _holds_arrays(value):
        return [_each(do, each) for each in value]
    return do(value)


def _length(whole: Any) -> int:
    arrays = keras.tree.flatten(whole)
    lengths = [array.shape[0] if array.shape else 0 for array in arrays]
    if not lengths or not all(lengths):
        raise CalibrationError(_MSG_NO_SAMPLES.format(found=describe(whole)))
    if len(set(lengths)) > 1:
        raise ValueError(_MSG_LENGTHS.format(lengths=", ".join(map(str, lengths))))
    return int(lengths[0])


def _count(model: keras.Layer) -> int | None:
    """How many inputs the model has, where it knows: those of your own classes do not."""
    inputs: Sequence[Any] | None = getattr(model, "inputs", None)
    return len(inputs) if isinstance(inputs, list | tuple) and inputs else None


def _batch_size(model: keras.Layer) -> int:
    inputs = getattr(model, "inputs", None)
    return int(inputs[0].shape[0] or _SIZE) if inputs else _SIZE


def _total(data: Any) -> int | None:
    """How many batches there are, if that is known."""
    cardinality = getattr(data, "cardinality", None)
    if isinstance(data, keras.utils.PyDataset):
        count = -1 if data.num_batches is None else data.num_batches
    elif callable(cardinality):  # a tf.data.Dataset: -1 is endless, -2 unknown
        count = int(cardinality())
    else:
        try:
            return len(data)
        except TypeError:  # a generator
            return None
    if count == -1:
        raise ValueError(_MSG_ENDLESS.format(found=describe(data)))
    return count if count >= 0 else None


# --- Which layers got a range, and what is said of the others and of odd ranges -------------------

_MSG_UNREACHED = (
    "Calibration never reached {count} of the layers that need a range: {paths}. Let the "
    "calibration function run the model in the way it will be used, {leave}."
)
_MSG_NONE = (
    " It reached none at all: the function has to run the model that it is given, which with "
    "inplace=False is a copy, and in no program that was compiled before."
)
_MSG_ZEROS = (
    "Calibration saw nothing but zeros at the inputs of {count} of the layers that need a range: "
    "{paths}. With a range of zero they would turn every input to zero. Calibrate on data like "
    "those of use, {leave}."
)
_MSG_TINY = (
    "Calibration saw nothing but numbers that are too small for a scale at the inputs of {count} "
    "of the layers that need a range: {paths}. They would all become zeros, with dynamic ranges "
    "too. Calibrate on data like those of use, multiply them by a power of two first, {leave}."
)
_LEAVE = (
    "exclude these layers (exclude_list), or pass strict=False in the config to leave them float"
)
_LEAVE_BY_RULE = "or give these layers a rule of their own, without act_static_scale"
_FLOAT_BY_RULE = "or give these layers a rule of their own, without act_qtype"
_MSG_DYNAMIC = "config + DynamicQuantConfig({types}, white_list=[{entries}])"


def with_ranges(
    planned: Sequence[LayerPlan], collectors: Sequence[Collector], stats: Any
) -> list[LayerPlan]:
    """The layers whose every range is known; the others are an error or stay float.

    A layer that can be called in several ways, such as a table that projects too, has the ranges of
    those it was called in. Another one is an error when it is called.
    """
    ran = [
        c.layer_plan for c in collectors if c.calls and c.operands.keys() <= stats.entries.keys()
    ]
    needing = [each for each in planned if _names(each)]
    missed = [each for each in needing if each not in ran]
    _judge(missed, _MSG_UNREACHED, _MSG_NONE if len(missed) == len(needing) else "")
    known = [each for each in needing if each not in missed]
    zeros = [each for each in known if any(_is_zero(state) for _, state in _seen(each, stats))]
    _judge(zeros, _MSG_ZEROS)
    known = [each for each in known if each not in zeros]
    # All numbers of an input would be lost to its scale.
    tiny = [each for each in known if any(is_tiny(*seen) for seen in _seen(each, stats))]
    _judge(tiny, _MSG_TINY, by_rule=_FLOAT_BY_RULE)
    _name_far(needing, collectors, stats)
    return [each for each in planned if each not in [*missed, *zeros, *tiny]]


def _name_far(needing: Sequence[LayerPlan], collectors: Sequence[Collector], stats: Any) -> None:
    """Warn of ranges that leave few codes for almost all values."""
    far = far_ranges(stats.entries)
    if not far:
        return
    layers = [each for each in needing if any(f.name in _names(each) for f in far)]
    layers = [each for each in layers if each.choice.config is not None]
    if layers:  # a config that measures each batch there
        config: Any = layers[0].choice.config
        types = f"{config.weight_dtype!r}, {config.activation_dtype!r}"
        entries = ", ".join(repr(f"^{re.escape(each.path)}$") for each in layers)
        cure = _MSG_DYNAMIC.format(types=types, entries=entries)
    else:
        operands = {name: operand for each in collectors for name, operand in each.operands.items()}
        cure = cure_by_rule(far, operands)
    warnings.warn(far_message(far, len(stats.entries), cure), stacklevel=4)


def _names(each: LayerPlan) -> list[str]:
    return [scale.name for scale in each.plan.scales if not is_fixed(scale)]


def _seen(each: LayerPlan, stats: Any) -> list[tuple[ScalePlan, Any]]:
    """The scales of a layer that data decides, with the ranges of what came."""
    scales = [s for s in each.plan.scales if not is_fixed(s) and s.name in stats.entries]
    return [(scale, stats.entries[scale.name].states["range"]) for scale in scales]


def _is_zero(state: Mapping[str, Any]) -> bool:
    """Whether a range holds nothing but zero."""
    edges = [value for key, value in state.items() if key.startswith(("max_", "min_"))]
    return all(np.all(value == 0) for value in edges)


def _judge(
    lost: Sequence[LayerPlan], message: str, more: str = "", by_rule: str = _LEAVE_BY_RULE
) -> None:
    if not lost:
        return
    paths = ", ".join(each.path for each in lost[:5]) + (", ..." if len(lost) > 5 else "")
    has_rule = any(each.choice.config is None for each in lost)
    leave = by_rule if has_rule else _LEAVE
    text = message.format(count=len(lost), paths=paths, leave=leave) + more
    if has_rule or any(each.choice.config.strict for each in lost if each.choice.config):
        raise CalibrationError(text)
    warnings.warn(text, stacklevel=5)
