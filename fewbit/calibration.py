"""From an array to a range: absmax, minmax, rms, fixed, percentile, mse.

A calibration is a small dict with the scale's shape: `{'absmax': a}` for a symmetric range,
`{'min': lo, 'max': hi}` for one with a zero point. Ranges always contain zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fewbit._histograms import MSE_RANGE
from fewbit._how import HowToQuantize, get_tile_shape
from fewbit._methods import Method as Method
from fewbit._methods import check_method as check_method
from fewbit._methods import history_length as history_length
from fewbit._methods import parse_method as parse_method
from fewbit._methods import start_method as start_method
from fewbit._scales import compute_scale_zero_point as compute_scale_zero_point
from fewbit._scales import compute_scales as compute_scales
from fewbit._scales import units, values
from fewbit._statistics import SimpleMovingAverage as SimpleMovingAverage
from fewbit.numerics import convert_to, format_of, should_quantize, wider
from fewbit.tiling import reduce_tiles

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
    check_method(method, how.qtype)
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
