"""Learned scales (LSQ, Esser et al. 2020): the scale of a weight is a parameter with a gradient.

The parameter is stored as it is trained. What is used is its magnitude, at least the smallest
number that a scale may be, rounded to the dtype of stored scales: positive whatever an optimizer
does, and the same number in training as in the file that is served.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fewbit._methods import LSQ, start_method
from fewbit._scales import scale_type, units, values
from fewbit.calibration import calibrate
from fewbit.numerics import Format, convert_from, format_of, wider
from fewbit.qarray import (
    HowToQuantize,
    QArray,
    compute_scale_zero_point,
    get_tile_shape,
    quantize_with_scale_zero_point,
)
from fewbit.straight import with_derivative
from fewbit.tiling import map_tiles, reduce_tiles, uneven_tiles
from fewbit.training.paired import CHECKPOINT_NAME, Paired

QSCALE = "_qscale"
"""What the name of a learned scale adds to its weight's."""


def code_range(row: Format) -> tuple[float, float]:
    """The smallest and the largest code of a format, in units of the scale.

    >>> code_range(format_of('int2')), code_range(format_of('fp8'))
    ((-2.0, 1.0), (-448.0, 448.0))
    """
    if row.kind == "int" and row.asymmetric is not None:
        low, high = row.asymmetric
        return float(low), float(high)
    largest = float(jnp.finfo(row.storage).max)
    return -largest, largest


def parameter_dtype(dtype: Any) -> Any:
    """The dtype of a learned scale: 16 bits are too few for the steps of an optimizer.

    >>> parameter_dtype('bfloat16')
    dtype('float32')
    """
    return jnp.dtype(wider(jnp.dtype(dtype), jnp.float32))


def start_scale(array: jax.Array, how: HowToQuantize) -> jax.Array:
    """Where the learned scales of a weight begin, as `how` says: 'learned,<start>'.

    >>> how = HowToQuantize(qtype='int2', channelwise_axes=(1,), calibration_method='learned,lsq')
    >>> start_scale(jnp.array([[0.5, 1.0], [-1.5, 3.0]]), how)
    Array([[2., 4.]], dtype=float32)
    """
    return _start_scale(array, how.replace(rule=None))


@functools.partial(jax.jit, static_argnums=1)
def _start_scale(array: jax.Array, how: HowToQuantize) -> jax.Array:
    start = start_method(how.calibration_method, how.qtype)
    wide = array.astype(parameter_dtype(array.dtype))
    if start != LSQ:
        plain = how.replace(calibration_method=start, scale_dtype=None)
        scale, _ = compute_scale_zero_point(calibrate(wide, plain), how.qtype)
        return scale
    tiles = get_tile_shape(array.shape, how)
    mean = reduce_tiles(lambda x, axes: jnp.mean(x, axes, keepdims=True), jnp.abs(wide), tiles)
    scale = 2 * mean / np.sqrt(code_range(format_of(how.qtype))[1]).astype(wide.dtype)
    return jnp.where(mean > 0, scale, jnp.ones_like(scale))


def used_scale(parameter: jax.Array, how: HowToQuantize, dtype: Any) -> jax.Array:
    """The scale that a learned parameter stands for, in the dtype that is stored with the codes.

    >>> how = HowToQuantize(qtype='int4', scale_dtype='float16')
    >>> used_scale(jnp.array([-0.5, 0.0]), how, 'float32').tolist()
    [0.5, 6.103515625e-05]
    """
    stored = scale_type(dtype, how.scale_dtype)
    info = jnp.finfo(stored)
    low = float(info.tiny) if stored == jnp.float16 else float(np.sqrt(float(info.tiny)))
    return jnp.clip(jnp.abs(parameter), low, float(info.max)).astype(stored)


def quantize_learned(array: jax.Array, parameter: jax.Array, how: HowToQuantize) -> QArray:
    """The codes of a weight under its learned scales: in training, and what is stored after it.

    >>> how = HowToQuantize(qtype='int2', calibration_method='learned')
    >>> quantize_learned(jnp.array([0.6, -2.0, 0.1]), jnp.array([0.5]), how).qvalue
    Array([1, -2, 0], dtype=int4)
    """
    return _quantize_learned(array, parameter, how.replace(rule=None, roles=None))


@functools.partial(jax.jit, static_argnums=2)
def _quantize_learned(array: jax.Array, parameter: jax.Array, how: HowToQuantize) -> QArray:
    # The barrier keeps XLA from merging what made the scale into the division.
    scale = lax.optimization_barrier(used_scale(parameter, how, array.dtype))
    tiles = uneven_tiles(array.shape, scale.shape, get_tile_shape(array.shape, how))
    return quantize_with_scale_zero_point(array, how.qtype, scale, tiles=tiles)


def learned_pair(
    array: jax.Array, parameter: jax.Array, how: HowToQuantize, *, clip: bool = True
) -> Paired:
    """A weight and its codes under learned scales, with LSQ's gradients for both.

    With v the weight in units of its scale and q its code: the weight's gradient passes where v is
    among the codes and is zero outside; the scale's is the sum over its group of g * (q - v) inside
    and g * q outside, over the root of the group's size times the largest code, so that scales and
    weights move at the same pace. With `clip=False` the weight's gradient passes everywhere. The
    value of `array` is the rounded weight, which gradients of the other operand are made with.

    >>> how = HowToQuantize(qtype='int2', calibration_method='learned')
    >>> w, s = jnp.array([0.6, -2.0, 0.1]), jnp.array([0.5])
    >>> jax.grad(lambda w, s: learned_pair(w, s, how).array.sum(), (0, 1))(w, s)
    (Array([0., 0., 1.], dtype=float32), Array([-0.6928203], dtype=float32))
    """
    q = quantize_learned(lax.stop_gradient(array), lax.stop_gradient(parameter), how)
    q = jax.tree.map(lambda part: checkpoint_name(part, CHECKPOINT_NAME), q)
    return Paired(_rounded(clip, array, parameter, q), q)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rounded(clip: bool, array: jax.Array, parameter: jax.Array, q: QArray) -> jax.Array:
    wide = wider(array.dtype, jnp.float32)
    floats = values(q.qvalue, q.qtype, q.scale, None, None, q.tile_shape, wide)
    value = _placed_like(floats, array).astype(array.dtype)
    return with_derivative(value, functools.partial(_rounded, clip), array, parameter, q)


def _placed_like(result: jax.Array, array: jax.Array) -> jax.Array:
    """Where the array lies: on an explicit mesh, tiles that were cut open have been gathered."""
    wanted = jax.typeof(array).sharding
    if wanted.mesh.are_all_axes_explicit and jax.typeof(result).sharding != wanted:
        return jax.sharding.reshard(result, wanted)
    return result


@_rounded.defjvp
def _lsq_tangent(clip: bool, primals: Any, tangents: Any) -> Any:
    (array, parameter, q), (d_array, d_parameter, _) = primals, tangents
    low, high = code_range(format_of(q.qtype))
    wide = parameter_dtype(array.dtype)
    sign = jnp.where(parameter < 0, -jnp.ones_like(parameter), jnp.ones_like(parameter))
    step = (d_parameter * sign).astype(wide) * gradient_factor(array.shape, q, wide)
    v = units(array.astype(wide), q.scale.astype(wide), None, None, q.tile_shape)
    spread = map_tiles(lambda v, s: jnp.ones_like(v) * s, v, step, tile_shape=q.tile_shape)
    number, d = convert_from(q.qvalue, q.qtype, wide), d_array.astype(wide)
    v, spread, number = (_placed_like(part, array) for part in (v, spread, number))
    inside = (v >= low) & (v <= high)
    moved = jnp.where(inside, d, jnp.zeros_like(d)) if clip else d
    moved = moved + jnp.where(inside, number - v, number) * spread
    return _rounded(clip, array, parameter, q), moved.astype(array.dtype)


def gradient_factor(shape: Sequence[int], q: QArray, dtype: Any) -> Any:
    """1 / sqrt(elements * largest code) of each scale's group; an uneven last group is smaller.

    >>> from fewbit.qarray import quantize
    >>> q = quantize(jnp.ones((5, 2)), 'int2', tiled_axes={0: 4}, channelwise_axes=(1,))
    >>> gradient_factor((5, 2), q, 'float32')
    array([[0.5, 0.5],
           [1. , 1. ]], dtype=float32)
    """
    counts = np.ones((1,) * len(shape))
    for axis, (size, tile) in enumerate(zip(shape, q.tile_shape, strict=True)):
        own = [min(tile, size - begin) for begin in range(0, size, max(tile, 1))] or [1]
        counts = counts * np.reshape(own, [-1 if a == axis else 1 for a in range(len(shape))])
    high = code_range(format_of(q.qtype))[1]
    return (1 / np.sqrt(np.maximum(counts, 1) * high)).astype(dtype)
