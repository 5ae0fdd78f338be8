"""From a range to a scale and a zero point, and an array in units of its scale and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import (
    Format,
    QType,
    convert_from,
    convert_to,
    format_of,
    get_asymmetric_bound,
    get_symmetric_bound,
    wider,
)
from fewbit.tiling import map_tiles

# A power of two rounded down is on average too small; these factors move the rounding point to
# where clipping the largest value and losing resolution cost the same.
_MX_ROUNDING = {"mxfp4": 12 / 7, "mxfp8": 60 / 31, "mxfp8_16": 60 / 31}
SMALLEST_E4M3 = 2.0**-9


def scale_type(dtype: Any, scale_dtype: Any = None) -> np.dtype:
    """The dtype of an array's scales: the one asked for, else the array's own, float32 for float16.

    float16 ends at 6e-5, and a range over 127.5 gets there with activations below 0.008.

    >>> scale_type('bfloat16'), scale_type('float16'), scale_type('float32', 'float16')
    (dtype(bfloat16), dtype('float32'), dtype('float16'))
    """
    if scale_dtype is not None:
        return jnp.dtype(scale_dtype)
    own = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if own == jnp.float16 else own


def compute_scale_zero_point(
    calibration: Mapping[str, jax.Array], qtype: QType, scale_dtype: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Scale and zero point (None if symmetric) that map a range onto the codes of a type.

    The scale is returned as it will be stored, that is rounded to `scale_dtype`. For nvfp4 it is
    the float32 product of its two levels; `quantize_with_scale_zero_point` takes it apart again.

    >>> compute_scale_zero_point({'absmax': jnp.array([255.0])}, 'int8')
    (Array([2.], dtype=float32), None)
    """
    scale, zero_point, tensor_scale = compute_scales(calibration, qtype, scale_dtype)
    if tensor_scale is not None:
        scale = scale.astype(jnp.float32) * tensor_scale
    return scale, zero_point


def compute_scales(
    calibration: Mapping[str, jax.Array], qtype: QType, scale_dtype: Any = None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Scale, zero point and second-level scale, each None where the type has none.

    >>> compute_scales({'absmax': jnp.array([3e-6])}, 'nvfp4')[0]
    Array([256], dtype=float8_e4m3fn)
    """
    row = format_of(qtype)
    if "absmax" in calibration:
        absmax = calibration["absmax"]
        stored = scale_type(absmax.dtype, scale_dtype)
        scale = _divide(_widened(absmax, stored, row), get_symmetric_bound(row))
        if row.name == "nvfp4":
            levels, power = split_two_levels(scale)
            return levels, None, power
        if row.name in _MX_ROUNDING:
            scale = _power_of_two(_not_tiny(scale) * _MX_ROUNDING[row.name])
            return scale.astype(row.scale_dtype), None, None
        if row.kind == "sign":
            return _fitted(scale, stored).astype(stored), None, None
        return _stored(scale, stored), None, None
    qmin, qmax = get_asymmetric_bound(row)
    stored = scale_type(calibration["min"].dtype, scale_dtype)
    low, high = (_widened(calibration[key], stored, row) for key in ("min", "max"))
    scale = _stored(_divide(high - low, qmax - qmin), stored)
    return scale, convert_to(qmin - low / scale.astype(low.dtype), row), None


def split_two_levels(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float scale as float8_e4m3fn times one float32 power of two for the whole tensor.

    The power of two brings the largest scale into (224, 448], the top of e4m3, so that weights of
    any magnitude use its normal range; a power of two changes no mantissa.

    >>> split_two_levels(jnp.array([0.5, 0.25]))
    (Array([256, 128], dtype=float8_e4m3fn), Array([0.00195312], dtype=float32))
    """
    wide = scale.astype(jnp.float32)
    largest = jnp.max(wide, keepdims=True)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 448 is 1.75 * 2**8: a mantissa that e4m3 rounds to more has to land one binade lower.
    exponent = jnp.clip(exponent - jnp.where(mantissa <= 0x680000, 8, 7), 1, 254)
    power = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    power = jnp.where(largest > 0, power, 1.0)
    # A stored zero would divide by zero; tiles this small decode to zero anyway.
    levels = jnp.where(largest > 0, jnp.clip(wide / power, SMALLEST_E4M3, 448.0), 1.0)
    return levels.astype(jnp.float8_e4m3fn), power


def _widened(edge: jax.Array, stored: Any, row: Format) -> jax.Array:
    """Range in a type wide enough for the division: never narrower than the scale to be stored."""
    if edge.dtype == jnp.float16:
        edge = edge.astype(jnp.float32)
    return edge if row.scale_dtype is not None else edge.astype(wider(edge.dtype, stored))


def _divide(array: jax.Array, bound: float) -> jax.Array:
    # XLA turns a division by a shared number into a product with its reciprocal, except where it
    # does not see that the number is shared, so the last bit would depend on the shape, on jit and
    # on vmap. The product is what everybody's checkpoints were made with, so it is written out. The
    # barrier rounds the range to its dtype first and keeps it from being merged with the factor.
    wide = jnp.float32 if array.dtype == jnp.bfloat16 else array.dtype
    settled = jax.lax.optimization_barrier(array).astype(wide)
    return (settled * (1 / jnp.asarray(bound, wide))).astype(array.dtype)


def _not_tiny(scale: jax.Array) -> jax.Array:
    """A range of (almost) nothing gets the scale 1, so that nothing divides by zero."""
    info = jnp.finfo(scale.dtype)
    if scale.dtype == jnp.float16:
        # The square root of float16's tiny is 0.008, a scale that ordinary weights have.
        return jnp.where(scale == 0, 1, jnp.maximum(scale, float(info.tiny)))
    return jnp.where(scale < float(np.sqrt(float(info.tiny))), 1, scale)


def _stored(scale: jax.Array, dtype: Any) -> jax.Array:
    """The scale rounded to the dtype it is stored in, and still usable there."""
    return _not_tiny(_fitted(scale, dtype).astype(dtype))


def _fitted(scale: jax.Array, dtype: Any) -> jax.Array:
    """The scale where float16 holds it; losses outside `jit` are told (`_qarray_losses`)."""
    if jnp.dtype(dtype) != jnp.float16:
        return scale
    info = jnp.finfo(jnp.float16)
    clipped = jnp.clip(scale, float(info.tiny), float(info.max))
    return jnp.where((scale > 0) & jnp.isfinite(scale), clipped, scale)


def _power_of_two(scale: jax.Array) -> jax.Array:
    """Rounded down to a power of two, by clearing the mantissa of the bfloat16."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.bfloat16), jnp.uint16)
    power = jax.lax.bitcast_convert_type(bits & np.uint16(0x7F80), jnp.bfloat16)
    return power.astype(jnp.float32)


def units(
    array: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    tensor_scale: jax.Array | None,
    tile_shape: tuple[int, ...],
) -> jax.Array:
    """The array in units of its scale, zero point added: what rounding turns into codes."""
    if tensor_scale is not None:
        scale = scale.astype(jnp.float32) * tensor_scale
    wide = wider(array.dtype, scale.dtype) if scale.dtype.itemsize > 1 else array.dtype
    if tensor_scale is not None and array.dtype == jnp.bfloat16:
        wide = array.dtype  # an e4m3 number times a power of two is exact in bfloat16
    if wide == jnp.float16:
        wide = jnp.dtype(jnp.float32)  # float16 holds neither int16 codes nor what e8m0 can

    def divide(x, s, z):
        ratio = x.astype(wide) / s.astype(wide)
        return ratio if z is None else ratio + z.astype(wide)

    return map_tiles(divide, array, scale, zero_point, tile_shape=tile_shape)


def values(
    codes: jax.Array,
    qtype: QType,
    scale: jax.Array,
    zero_point: jax.Array | None,
    tensor_scale: jax.Array | None,
    tile_shape: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    """The numbers that codes stand for, computed in `dtype`: the inverse of `units`."""
    if tensor_scale is not None:
        scale = scale.astype(jnp.float32) * tensor_scale

    def decode(q, s, z):
        number = convert_from(q, qtype, dtype)
        if z is not None:
            number = number - z.astype(dtype)
        return number * s.astype(dtype)

    return map_tiles(decode, codes, scale, zero_point, tile_shape=tile_shape)
