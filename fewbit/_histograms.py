"""Histograms of magnitudes, and the ranges that percentile and mse calibration read from them.

Bins are those of the float32 numbers themselves: 64 to every power of two from 2**-40 to 2**24, and
one below for everything smaller. They do not depend on the data, so histograms of any batches,
shards and processes add up, and outliers do not make the bins of ordinary values wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._how import HowToQuantize
from fewbit._methods import parse_method
from fewbit._scales import compute_scales, units, values
from fewbit.numerics import convert_to

_PER_OCTAVE_BITS = 6
_LOWEST, _HIGHEST = -40, 24
BINS = ((_HIGHEST - _LOWEST) << _PER_OCTAVE_BITS) + 1
_SHIFT = 23 - _PER_OCTAVE_BITS
_FIRST = (127 + _LOWEST) << _PER_OCTAVE_BITS  # a float's leading bits, of the smallest in bin 1

_POINTS = 8  # at which the error of a bin's values is measured
# Clip factors that the 'mse' search tries, besides 1. Below 0.3 even two bits only lose.
MSE_RANGE = (0.3, 1.15)


def bin_of(magnitude: jax.Array) -> jax.Array:
    """The bin of each non-negative number.

    >>> bin_of(jnp.array([0.0, 1.0, 1.02, 2.0])) - bin_of(jnp.array([1.0]))
    Array([-2561,     0,     1,    64], dtype=int32)
    """
    bits = jax.lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    first = jnp.array(_FIRST - 1, jnp.int32)
    key = jax.lax.shift_right_logical(bits, jnp.full_like(bits, _SHIFT)) - first
    return jnp.clip(key, 0, BINS - 1)


def bin_edges() -> np.ndarray:
    """The BINS + 1 edges.

    >>> [float(edge) for edge in bin_edges()[[0, 1, -1]]]
    [0.0, 9.094947017729282e-13, 16777216.0]
    """
    keys = np.arange(_FIRST, _FIRST + BINS, dtype=np.int32) << _SHIFT
    return np.concatenate([np.zeros(1, np.float32), keys.view(np.float32)])


def histogram(magnitude: jax.Array, group: jax.Array, groups: int) -> jax.Array:
    """(groups, BINS) counts of an array's numbers; `group` tells which group each belongs to."""
    place = group.astype(jnp.int32) * BINS + bin_of(magnitude)
    counts = jnp.zeros((groups * BINS,), jnp.float32).at[place.ravel()].add(1.0)
    return counts.reshape(groups, BINS)


def range_from_histogram(counts: jax.Array, absmax: jax.Array, how: HowToQuantize) -> jax.Array:
    """The absmax that 'percentile' or 'mse' asks for, of histograms along the last axis.

    `absmax` is the true one of each. A range is never wider, but for the search of 'mse', which may
    go 15 percent beyond it.

    >>> counts = histogram(jnp.arange(1.0, 101.0), jnp.zeros((100,), jnp.int32), 1)
    >>> how = HowToQuantize(qtype='int8', calibration_method='percentile,50')
    >>> bool(abs(range_from_histogram(counts, jnp.array([100.0]), how)[0] - 50.5) < 1)
    True
    """
    method = parse_method(how.calibration_method)
    flat = counts.reshape(-1, BINS), absmax.astype(jnp.float32).ravel()
    if method.name == "percentile":
        found = _percentiles(*flat, method.args[0])
    else:
        steps = int(method.args[0])
        found = jax.lax.map(lambda one: _least_error(one[0], one[1], how, steps), flat)
    return found.reshape(absmax.shape)


def _percentiles(counts: jax.Array, absmax: jax.Array, percent: float) -> jax.Array:
    if percent == 100:
        return absmax
    # Counted from the top, where few values lie: sums of float32 are exact there.
    above = jnp.cumsum(counts[:, ::-1], axis=1)[:, ::-1] - counts
    total = jnp.sum(counts, axis=1, keepdims=True)
    rank = (total - 1) * ((100 - percent) / 100)
    place = jnp.argmax(above <= rank, axis=1, keepdims=True)
    inside, before = (jnp.take_along_axis(x, place, 1) for x in (counts, above))
    edges = jnp.asarray(bin_edges())
    low, high = edges[place], edges[place + 1]
    share = (rank - before + 0.5) / jnp.maximum(inside, 1)
    return jnp.minimum((high - (high - low) * jnp.clip(share, 0, 1))[:, 0], absmax)


def _least_error(counts: jax.Array, absmax: jax.Array, how: HowToQuantize, steps: int) -> jax.Array:
    """The multiple of absmax with the least squared error over the histogram."""
    edges = bin_edges()
    inner = (np.arange(_POINTS, dtype=np.float32) + 0.5) / _POINTS
    points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * inner
    x = jnp.minimum(jnp.asarray(points.ravel()), absmax)  # the top bin is not full
    weight = jnp.repeat(counts / jnp.maximum(jnp.sum(counts), 1), _POINTS) / _POINTS

    def error(factor: jax.Array) -> jax.Array:
        edge = {"absmax": (absmax * factor)[None]}
        parts = compute_scales(edge, how.qtype, how.scale_dtype)
        codes = convert_to(units(x, *parts, x.shape), how.qtype)
        again = values(codes, how.qtype, *parts, x.shape, jnp.float32)
        return jnp.sum(weight * jnp.square(x - again))

    factors = candidate_factors(steps)
    errors = jax.lax.map(error, factors)
    return absmax * factors[jnp.argmin(errors)]


def candidate_factors(steps: int) -> jax.Array:
    """The clip factors that are tried: 1 first, so that only what is better wins."""
    return jnp.concatenate([jnp.ones(1), jnp.linspace(*MSE_RANGE, steps)]).astype(jnp.float32)


def group_numbers(scale_shape: Sequence[int]) -> jax.Array:
    """A number for each scale, in the scale's shape."""
    return jnp.arange(int(np.prod(scale_shape)), dtype=jnp.int32).reshape(scale_shape)
