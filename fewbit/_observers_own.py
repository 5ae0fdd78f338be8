"""fewbit's own observers: ranges, histograms, channels and Hessians. (`tails` has one more.)"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import _histograms
from fewbit.calibration import calibrate, parse_method
from fewbit.observers import Operand, State, register_observer
from fewbit.qarray import get_tile_shape
from fewbit.tails import Tail
from fewbit.taps import whole_array
from fewbit.tiling import expand

_MERGE = {"sum_of_": jnp.add, "max_of_": jnp.maximum, "min_of_": jnp.minimum}


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
        return {"histogram": jnp.zeros((*operand.scale_shape, _histograms.BINS), jnp.float32)}

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State:
        assert operand.how is not None and operand.scale_shape is not None
        shape = operand.scale_shape
        tiles = get_tile_shape(array.shape, operand.how)
        group = expand(_histograms.group_numbers(shape), array.shape, tiles)
        counts = _histograms.histogram(jnp.abs(whole_array(array)), group, math.prod(shape))
        return self.merge(state, {"histogram": counts.reshape(*shape, _histograms.BINS)})

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
