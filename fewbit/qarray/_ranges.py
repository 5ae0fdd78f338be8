"""From an array to a range: absmax, minmax, rms, fixed, percentile, mse.

A calibration is a small dict with the scale's shape: `{'absmax': a}` for a symmetric range,
`{'min': lo, 'max': hi}` for one with a zero point. Ranges always contain zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    should_quantize,
    wider,
)
from fewbit.qarray._how import (
    HowToQuantize,
    check_method,
    get_tile_shape,
    parse_method,
)
from fewbit.qarray._tiles import map_tiles, reduce_tiles

# --- From a range to a scale and a zero point, and an array in units of its scale and back --------

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
    """The scale where float16 holds it; losses outside `jit` are told (`tell_losses`)."""
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


def rounded(product: jax.Array) -> jax.Array:
    """The product as it is, safe from being joined with a sum that follows.

    XLA's CPU compiler rounds a multiplication and a sum in one loop once or twice, depending on
    what else is in the loop. Then the program that trains and the one that serves, or one device
    and several, would differ in the last bit. That this selects nothing is more than compilers see
    (a test would tell).

    >>> rounded(jnp.array([1.5, -jnp.inf]))
    Array([ 1.5, -inf], dtype=float32)
    """
    largest = jnp.finfo(product.dtype).max
    return jnp.where(product > largest, jnp.asarray(jnp.inf, product.dtype), product)


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
        return ratio if z is None else rounded(ratio) + z.astype(wide)

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


# --- Histograms of magnitudes, and the ranges that percentile and mse calibration read from them --

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


# --- From an array to a range: absmax, minmax, rms, fixed, percentile, mse ------------------------

Calibration = dict[str, jax.Array]

_MSG_LEARNED = (
    "calibration_method={method!r}: a learned scale is a parameter that training fits, and cannot "
    "be told from an array alone. Train with QtProvider([QtRule(weight_calibration_method="
    "'learned', ...)]) and convert with fewbit.to_ptq, or write 'mse'."
)
_MSG_DELAYED = (
    "{method!r} takes the range from the steps before, and an array alone has none. Use 'absmax' "
    "here; a QtRule of a model that trains may say 'delayed'."
)


def calibrate(array: jax.Array, how: HowToQuantize) -> Calibration:
    """The range that `how` asks for, one per scale, in the array's dtype; of float16 in float32.

    >>> x = jnp.array([[1.0, -4.0], [2.0, 0.5]])
    >>> calibrate(x, HowToQuantize(qtype='int8', channelwise_axes=(0,)))['absmax']
    Array([[4.],
           [2.]], dtype=float32)
    """
    if not should_quantize(array.dtype):
        raise ValueError(
            f"Refuse to quantize: {array.dtype}. Only bfloat16, float16, float32 and float64 "
            "arrays are quantized; cast the array first if it holds real numbers."
        )
    method = parse_method(how.calibration_method)
    check_method(how.calibration_method, how.qtype)
    if method.learned:
        raise ValueError(_MSG_LEARNED.format(method=how.calibration_method))
    if method.name == "delayed":
        raise ValueError(_MSG_DELAYED.format(method=how.calibration_method))
    if array.dtype == jnp.float16:
        array = array.astype(jnp.float32)  # a multiple of the largest number may not be a float16
    tile_shape = get_tile_shape(array.shape, how)
    # Sums of 16-bit numbers are made in float32, or they would depend on what XLA fuses.
    wide = array.astype(wider(array.dtype, jnp.float32))
    if format_of(how.qtype).kind == "sign":
        # The magnitude that minimises the squared error of a sign is the mean one.
        return {"absmax": _mean(jnp.abs(wide), tile_shape).astype(array.dtype)}
    if method.name == "fixed":
        shape = (1,) * array.ndim
        low, high = (jnp.full(shape, edge, array.dtype) for edge in method.args)
        return {"min": low, "max": high} if method.asymmetric else {"absmax": high}
    factor = method.args[0]
    if method.name == "minmax":
        low = reduce_tiles(_min, array, tile_shape)
        high = reduce_tiles(_max, array, tile_shape)
        return {"min": jnp.minimum(low, 0) * factor, "max": jnp.maximum(high, 0) * factor}
    if method.name == "rms":
        mean = _settled(_mean(_settled(jnp.square(wide), array.dtype), tile_shape), array.dtype)
        rms = _settled(jnp.sqrt(mean), array.dtype)
        return {"absmax": (rms * factor).astype(array.dtype)}
    if method.name == "percentile":
        quantile = lambda x, axes: jnp.quantile(x, factor / 100, axes, keepdims=True)  # noqa: E731
        return {"absmax": reduce_tiles(quantile, jnp.abs(wide), tile_shape).astype(array.dtype)}
    absmax = reduce_tiles(_max, jnp.abs(array), tile_shape)
    if method.name == "mse":
        return {"absmax": _search(array, absmax, how, tile_shape, int(factor))}
    return {"absmax": absmax * factor}


# A range always holds zero, which is also the range of nothing (an empty contraction).
# XLA's vectorised maximum may lose a NaN, which would then pass for a zero: so it is asked for.
def _max(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return _or_nan(jnp.max(x, axes, keepdims=True, initial=0), x, axes)


def _min(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return _or_nan(jnp.min(x, axes, keepdims=True, initial=0), x, axes)


def _or_nan(extreme: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    spoilt = jnp.any(jnp.isnan(x), axes, keepdims=True)
    return jnp.where(spoilt, jnp.array(jnp.nan, x.dtype), extreme)


def _settled(wide: jax.Array, dtype: Any) -> jax.Array:
    """Each step of a bfloat16 computation rounded to it, which XLA would skip where it fuses."""
    return jax.lax.reduce_precision(wide, 8, 7) if dtype == jnp.bfloat16 else wide


def _mean(array: jax.Array, tile_shape: tuple[int, ...]) -> jax.Array:
    return reduce_tiles(lambda x, axes: jnp.mean(x, axes, keepdims=True), array, tile_shape)


def _search(
    array: jax.Array, absmax: jax.Array, how: HowToQuantize, tile_shape: tuple[int, ...], steps: int
) -> jax.Array:
    """The multiple of absmax, per scale, that gives the least squared error."""
    wide = wider(array.dtype, jnp.float32)

    def error(factor):
        edge = absmax * factor.astype(absmax.dtype)
        scale, zero_point, tensor_scale = compute_scales(
            {"absmax": edge}, how.qtype, how.scale_dtype
        )
        codes = convert_to(units(array, scale, zero_point, tensor_scale, tile_shape), how.qtype)
        again = values(codes, how.qtype, scale, zero_point, tensor_scale, tile_shape, wide)
        square = jnp.square(array.astype(wide) - again)
        return reduce_tiles(lambda x, axes: jnp.sum(x, axes, keepdims=True), square, tile_shape)

    def step(i, best):
        least, factor = best
        candidate = factors[i]
        now = error(candidate)
        better = now < least
        return jnp.where(better, now, least), jnp.where(better, candidate, factor)

    factors = jnp.linspace(*MSE_RANGE, steps, dtype=wide)
    # The search starts from absmax itself and moves only to what is strictly better.
    least = error(jnp.ones((), wide))
    _, factor = jax.lax.fori_loop(0, steps, step, (least, jnp.ones_like(least)))
    return absmax * factor.astype(absmax.dtype)
