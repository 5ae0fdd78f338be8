"""What a format can express, and how a number becomes a code and back.

Everything above asks the same questions about a quantized type: which range can it express, and
what does a code mean. Scales are not this room's business: `convert_to` rounds numbers that were
divided by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics._formats import FORMATS, QType, dtype_bits, format_of

NoiseFn = Callable[[tuple[int, ...]], jax.Array]

# NormalFloat4 of the QLoRA paper: quantiles of a normal distribution, with an exact zero.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def get_symmetric_bound(qtype: QType) -> float:
    """The value that the edge of a symmetric range is divided down to.

    >>> get_symmetric_bound('int8'), get_symmetric_bound('nf4')
    (127.5, 1.0)
    """
    row = format_of(qtype)
    if row.bound is None:
        raise ValueError(
            f"{row.name} doesn't support symmetric quantization: it has no negative codes, so half "
            f"of the values would be lost. Use calibration_method='minmax', or {row.name[1:]}."
        )
    return row.bound


def get_asymmetric_bound(qtype: QType) -> tuple[int, int]:
    """The smallest and the largest code of a type that can carry a zero point.

    >>> get_asymmetric_bound('int4'), get_asymmetric_bound('uint8')
    ((-8, 7), (0, 255))
    """
    row = format_of(qtype)
    if row.asymmetric is None:
        can = ", ".join(name for name, other in FORMATS.items() if other.asymmetric)
        raise ValueError(
            f"{row.name} doesn't support asymmetric quantization. Use a symmetric method such as "
            f"'absmax', or a type with a zero point: {can}."
        )
    return row.asymmetric


def should_quantize(dtype: Any) -> bool:
    """Whether arrays of this dtype are quantized at all: the ordinary floats are.

    >>> should_quantize(jnp.bfloat16), should_quantize(jnp.int32)
    (True, False)
    """
    return jnp.dtype(dtype).name in ("bfloat16", "float16", "float32", "float64")


def can_dequant_on_output(qtype: QType) -> bool:
    """Whether codes may be multiplied first and scaled afterwards: not for table indices.

    >>> can_dequant_on_output('int4'), can_dequant_on_output('nf4')
    (True, False)
    """
    return format_of(qtype).kind != "table"


def convert_to(array: jax.Array, qtype: QType, noise_fn: NoiseFn | None = None) -> jax.Array:
    """Round numbers in units of the scale to codes: half to even, saturating.

    `noise_fn(shape)` returns noise in [-0.5, 0.5) that broadcasts to the array and turns the
    rounding into a stochastic one, for every format.

    >>> convert_to(jnp.array([0.5, 1.5, 200.0, -3.2]), 'int8')
    Array([  0,   2, 127,  -3], dtype=int8)
    """
    row = format_of(qtype)
    noise = None
    if noise_fn is not None:
        array = array.astype(jnp.float32)
        noise = jnp.broadcast_to(noise_fn(array.shape).astype(jnp.float32), array.shape)
    if row.kind == "table":
        return fp_to_nf4(array, noise)
    if row.kind == "sign":
        if noise is not None:
            array = array + 2 * noise
        return jnp.where(array < 0, -1, 1).astype(row.storage)
    if row.kind == "float":
        largest = float(jnp.finfo(row.storage).max)
        array = jnp.clip(array, -largest, largest)
        if noise is not None:
            array = _round_on_grid(array, noise, row.storage)
        elif dtype_bits(row.storage) == 4:
            # Some of XLA's ways to cast to four bits round twice, which moves numbers near a tie.
            array = _round_on_grid(array.astype(jnp.float32), 0.0, row.storage)
        return array.astype(row.storage)
    if noise is not None:
        array = array + noise
    # Saturated before the cast: where codes go straight back to floats and into a sum, XLA's CPU
    # compiler drops both casts, and with them the saturation of the first.
    return jnp.clip(jnp.round(array), *get_asymmetric_bound(row)).astype(row.storage)


def _round_on_grid(array: jax.Array, noise: jax.Array | float, dtype: np.dtype) -> jax.Array:
    """Round float32 to one of its two neighbours on the narrow float's grid; noise: unbiased."""
    info = jnp.finfo(dtype)
    exponent = jnp.frexp(array)[1] - 1  # |array| in [2**exponent, 2**(exponent+1))
    exponent = jnp.maximum(exponent, int(info.minexp)) - int(info.nmant)
    step = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    largest = float(info.max)
    return jnp.clip(jnp.round(array / step + noise) * step, -largest, largest)


def convert_from(codes: jax.Array, qtype: QType, dtype: Any = None) -> jax.Array:
    """The numbers, in units of the scale, that codes stand for (float32 unless told).

    >>> convert_from(jnp.array([0, 7, 15], jnp.uint4), 'nf4')
    Array([-1.,  0.,  1.], dtype=float32)
    """
    dtype = jnp.float32 if dtype is None else dtype
    if format_of(qtype).kind == "table":
        return nf4_to_fp(codes, dtype)
    return codes.astype(dtype)


def get_nf4_buckets() -> jax.Array:
    """The sixteen values of nf4, ascending, in float32.

    >>> get_nf4_buckets()[7:9]
    Array([0.       , 0.0795803], dtype=float32)
    """
    return jnp.array(NF4, jnp.float32)


def fp_to_nf4(array: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    """Index of the nearest nf4 value, the smaller one on ties.

    >>> fp_to_nf4(jnp.array([-2.0, 0.01, 1.0]))
    Array([0, 7, 15], dtype=uint4)
    """
    values = np.array(NF4, np.float64)
    wide = jnp.clip(array.astype(jnp.float32), -1.0, 1.0)
    index = jnp.zeros(wide.shape, jnp.uint8)
    # Counting the thresholds below x fuses into one pass; a distance to each of the sixteen
    # values would need sixteen times the memory.
    for low, high in zip(values[:-1], values[1:], strict=True):
        if noise is None:
            above = wide > np.float32((low + high) / 2)
        else:
            above = (wide - np.float32(low)) / np.float32(high - low) > noise + 0.5
        index = index + above.astype(jnp.uint8)
    return index.astype(jnp.uint4)


def nf4_to_fp(codes: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """The nf4 values of the given indices.

    >>> nf4_to_fp(jnp.array([0, 7, 15], jnp.uint4), jnp.bfloat16)
    Array([-1, 0, 1], dtype=bfloat16)
    """
    table, places = get_nf4_buckets().astype(dtype), codes.astype(jnp.int32)
    placed = jax.typeof(codes).sharding
    if all(axis is None for axis in placed.spec):
        return table[places]
    return table.at[places].get(out_sharding=placed)  # an explicit mesh asks where results go
