"""Observers by name: our own (ranges, histograms, channels, Hessians), and those of others."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import nearest
from fewbit.calibration._observers import Observer, Operand, State
from fewbit.calibration._tails import Tail
from fewbit.interpreter import Reading, Readings, combine_readings, plain, whole_array
from fewbit.qarray import (
    BINS,
    calibrate,
    expand,
    get_tile_shape,
    group_numbers,
    histogram,
    parse_method,
)
from fewbit.tracing import TracedSite

_MSG_UNKNOWN = (
    "There is no observer {name!r}.{near} The observers are {names}; pass an object with init, "
    "observe, merge and finalize for one of your own, or make it known by name with "
    "fewbit.register_observer(observer)."
)
_MSG_NOT_ONE = (
    "{found!r} is no observer: it has no {missing}. An observer has a name and the functions "
    "wants(operand), init(operand), observe(operand, state, array), merge(first, second) and "
    "finalize(state)."
)
_MSG_TWICE = "Two observers are called {name!r}; give one of them another name."

_registry: dict[str, Observer] = {}

_MERGE = {"sum_of_": jnp.add, "max_of_": jnp.maximum, "min_of_": jnp.minimum}


def register_observer(observer: Observer) -> Observer:
    """Make an observer known by its name, to `calibrate` and to files of statistics."""
    _registry[_checked(observer).name] = observer
    return observer


def observer_named(name: str) -> Observer:
    """The observer of this name."""

    if name not in _registry:
        names = ", ".join(map(repr, _registry))
        raise ValueError(_MSG_UNKNOWN.format(name=name, near=nearest(name, _registry), names=names))
    return _registry[name]


def chosen(observers: Iterable[Any]) -> tuple[Observer, ...]:
    """Observers from names and objects."""
    if isinstance(observers, str) or not isinstance(observers, Iterable):
        observers = (observers,)
    found = [observer_named(o) if isinstance(o, str) else _checked(o) for o in observers]
    names = [observer.name for observer in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(_MSG_TWICE.format(name=name))
    return tuple(found)


def _checked(observer: Any) -> Any:
    wanted = ("name", "wants", "init", "observe", "merge", "finalize")
    missing = [part for part in wanted if not hasattr(observer, part)]
    if missing or isinstance(observer, type):
        missing = missing or ["instance"]
        raise TypeError(_MSG_NOT_ONE.format(found=observer, missing=", ".join(missing)))
    return observer


# --- the operands of a program --------------------------------------------------------------------


class Range:
    """The range of each batch: its sum over batches, for the mean, and the extremes seen.

    Along `act_batch_axes` sums are averaged and extremes cover all. Where a histogram is kept for
    'percentile' or 'mse', the range is that of all values.
    """

    name = "range"

    def wants(self, operand: Operand) -> bool:
        return operand.how is not None and _is_measured(operand)

    def init(self, operand: Operand) -> State:
        assert operand.how is not None and operand.scale_shape is not None
        method = parse_method(operand.how.calibration_method)
        names = ("min", "max") if method.asymmetric else ("absmax",)
        state: State = {}
        for name in names:
            state[f"sum_of_{name}"] = jnp.zeros(operand.scale_shape, jnp.float32)
            state[_extreme(name)] = jnp.zeros(operand.scale_shape, jnp.float32)
        return state

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State:
        assert operand.how is not None and operand.scale_shape is not None
        how = operand.how.replace(calibration_method=operand.range_method)
        new: State = {}
        for name, edge in calibrate(array, how).items():
            edge = edge.astype(jnp.float32)
            pairs = enumerate(zip(edge.shape, operand.scale_shape, strict=True))
            axes = tuple(axis for axis, (n, m) in pairs if n != m)
            furthest = jnp.min if name == "min" else jnp.max
            new[f"sum_of_{name}"] = jnp.mean(edge, axes, keepdims=True)
            new[_extreme(name)] = furthest(edge, axes, keepdims=True)
        return self.merge(state, new)

    def merge(self, first: State, second: State) -> State:
        return {name: _MERGE[name[:7]](first[name], second[name]) for name in first}

    def finalize(self, state: State) -> Mapping[str, Any]:
        return state


class Histogram:
    """How often each magnitude was seen, for every scale: what 'percentile' and 'mse' read."""

    name = "histogram"

    def wants(self, operand: Operand) -> bool:
        return operand.how is not None and _is_measured(operand)

    def init(self, operand: Operand) -> State:
        assert operand.scale_shape is not None
        return {"histogram": jnp.zeros((*operand.scale_shape, BINS), jnp.float32)}

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State:
        assert operand.how is not None and operand.scale_shape is not None
        shape = operand.scale_shape
        tiles = get_tile_shape(array.shape, operand.how)
        group = expand(group_numbers(shape), array.shape, tiles)
        counts = histogram(jnp.abs(whole_array(array)), group, math.prod(shape))
        return self.merge(state, {"histogram": counts.reshape(*shape, BINS)})

    def merge(self, first: State, second: State) -> State:
        return {"histogram": first["histogram"] + second["histogram"]}

    def finalize(self, state: State) -> Mapping[str, Any]:
        return state


class Channels:
    """The magnitude of each input channel of a weight: largest and mean, as AWQ and SmoothQuant
    read them. A channel is one index of the axes that the product sums over.
    """

    name = "channels"

    def wants(self, operand: Operand) -> bool:
        return operand.by_weight and bool(operand.contracting)

    def init(self, operand: Operand) -> State:
        shape = _kept(operand)
        zeros = jnp.zeros(shape, jnp.float32)
        return {"absmax": zeros, "sum_of_abs": zeros, "rows": jnp.zeros((), jnp.float32)}

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State:
        rows = _rows(operand, jnp.abs(array.astype(jnp.float32)))
        new = {
            "absmax": jnp.max(rows, axis=-2, initial=0),
            "sum_of_abs": jnp.sum(rows, axis=-2),
            "rows": jnp.array(rows.shape[-2], jnp.float32),
        }
        return self.merge(state, new)

    def merge(self, first: State, second: State) -> State:
        return {
            "absmax": jnp.maximum(first["absmax"], second["absmax"]),
            "sum_of_abs": first["sum_of_abs"] + second["sum_of_abs"],
            "rows": first["rows"] + second["rows"],
        }

    def finalize(self, state: State) -> Mapping[str, Any]:
        mean = state["sum_of_abs"] / jnp.maximum(state["rows"], 1)
        return {
            "channel_absmax": state["absmax"],
            "channel_absmean": mean,
            "channel_rows": state["rows"],
        }


class Hessian:
    """The mean of x xᵀ over the rows that a weight's product sees, as GPTQ reads it.

    Matrix products only: (groups..., channels, channels).
    """

    name = "hessian"

    def wants(self, operand: Operand) -> bool:
        is_product = operand.site.op in ("dot_general", "einsum")
        return operand.by_weight and is_product and bool(operand.contracting)

    def init(self, operand: Operand) -> State:
        *groups, width = _kept(operand)
        return {
            "sum_of_outer": jnp.zeros((*groups, width, width), jnp.float32),
            "rows": jnp.zeros((), jnp.float32),
        }

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State:
        rows = _rows(operand, array.astype(jnp.float32))
        outer = jnp.einsum("...ri,...rj->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST)
        return self.merge(
            state, {"sum_of_outer": outer, "rows": jnp.array(rows.shape[-2], jnp.float32)}
        )

    def merge(self, first: State, second: State) -> State:
        return {name: first[name] + second[name] for name in first}

    def finalize(self, state: State) -> Mapping[str, Any]:
        rows = state["rows"]
        return {"hessian": state["sum_of_outer"] / jnp.maximum(rows, 1), "hessian_rows": rows}


def _is_measured(operand: Operand) -> bool:
    """A fixed range needs no data."""
    return operand.how is not None and parse_method(operand.how.calibration_method).name != "fixed"


def _extreme(name: str) -> str:
    return "min_of_min" if name == "min" else f"max_of_{name}"


def _kept(operand: Operand) -> tuple[int, ...]:
    """(groups..., channels): the axes of an operand that its rows are made of."""
    groups = tuple(operand.shape[axis] for axis in operand.grouped)
    return (*groups, math.prod(operand.shape[axis] for axis in operand.contracting))


def _rows(operand: Operand, array: jax.Array) -> jax.Array:
    """(groups..., rows, channels)."""
    kept = (*operand.grouped, *operand.contracting)
    others = tuple(axis for axis in range(array.ndim) if axis not in kept)
    turned = jnp.transpose(whole_array(array), (*operand.grouped, *others, *operand.contracting))
    *groups, width = _kept(operand)
    return turned.reshape(*groups, math.prod(array.shape[axis] for axis in others), width)


for _observer in (Range(), Histogram(), Channels(), Hessian(), Tail()):
    register_observer(_observer)


# --- The tap of calibration: observers look at the operands of Sites while the float model runs ---

FINITE, HISTOGRAM = "all finite", "histogram"


class ObserverTap:
    """The tap of calibration: the observers of each operand, and whether all values are finite.

    Of the observers those that are `asked` for are used, and histograms where a method needs one.
    """

    def __init__(
        self, operands: Sequence[Operand], observers: Mapping[str, Observer], asked: Sequence[str]
    ):
        self.observers, self.asked = observers, asked
        self.operands: dict[str, list[Operand]] = {}
        for operand in operands:
            if self.observers_of(operand):
                self.operands.setdefault(operand.site.id, []).append(operand)

    def observers_of(self, operand: Operand) -> list[Observer]:
        needed = {*self.asked, *([HISTOGRAM] if operand.needs_histogram else ())}
        return [o for name, o in self.observers.items() if name in needed and o.wants(operand)]

    def wants(self, site: TracedSite) -> bool:
        return site.site.id in self.operands

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any:
        read: dict[str, Any] = {}
        for operand in self.operands[site.site.id]:
            array = jax.lax.stop_gradient(plain(operands[operand.side == "rhs"]))
            states = {
                o.name: o.observe(operand, o.init(operand), array)
                for o in self.observers_of(operand)
            }
            read[operand.name] = {FINITE: jnp.all(jnp.isfinite(array)), **states}
        return read

    def combine(self, site_id: str, first: Any, second: Any) -> Any:
        return {name: merge_states(self.observers, first[name], second[name]) for name in first}


def merge_states(observers: Mapping[str, Any], first: Any, second: Any) -> Any:
    """Two states of one operand, by observer."""
    return {
        name: first[name] & second[name]
        if name == FINITE
        else observers[name].merge(first[name], second[name])
        for name in first
    }


@functools.lru_cache(maxsize=16)
def combine_all(named: tuple[tuple[str, Observer], ...]) -> Callable[..., dict[str, Reading]]:
    """Readings of two runs, by operand, as one compiled function."""
    observers = dict(named)

    def combine(first: dict[str, Reading], second: dict[str, Reading]) -> dict[str, Reading]:
        merge = functools.partial(merge_states, observers)
        return {name: combine_readings(merge, first[name], second[name]) for name in first}

    return jax.jit(combine)


def by_operand(readings: Readings) -> dict[str, Reading]:
    """Readings by operand, of those by Site."""
    return {
        name: Reading(reading.count, value)
        for reading in readings.values()
        for name, value in reading.value.items()
    }
