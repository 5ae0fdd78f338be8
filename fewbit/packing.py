"""Codes as a dense string of bits: int3 takes three bits, not the four or eight of its dtype.

Along the last axis, code `i` occupies bits `i*bits` to `(i+1)*bits`, counted from the lowest bit of
the first byte. Integers are stored as the low bits of their two's complement, floats as their bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import dtype_bits


def packed_length(length: int, bits: int) -> int:
    """Bytes that `length` codes of `bits` bits fill.

    >>> packed_length(10, 3)
    4
    """
    return -(-length * bits // 8)


@functools.partial(jax.jit, static_argnames=("bits",))
def pack_bits(codes: jax.Array, bits: int) -> jax.Array:
    """Pack codes densely along the last axis, `bits` bits for each, into uint8.

    >>> pack_bits(jnp.array([1, 2, -1], jnp.int8), 4)
    Array([33, 15], dtype=uint8)
    """
    _check(bits)
    patterns = to_bit_patterns(codes, bits)
    length = codes.shape[-1]
    if bits == 16:
        pairs = jax.lax.bitcast_convert_type(patterns, jnp.uint8)
        return pairs.reshape(*codes.shape[:-1], 2 * length)
    # Eight codes fill exactly `bits` bytes, so each byte of such a group is a fixed
    # combination of shifted codes and no array of single bits is ever made.
    groups = _grouped(patterns, 8)
    packed = []
    for byte in range(bits):
        value = jnp.zeros(groups.shape[:-1], jnp.uint8)
        for code in range(8):
            shift = code * bits - 8 * byte
            if -bits < shift < 8:
                value = value | _shift(groups[..., code], shift)
        packed.append(value)
    flat = jnp.stack(packed, axis=-1).reshape(*codes.shape[:-1], groups.shape[-2] * bits)
    return flat[..., : packed_length(length, bits)]


@functools.partial(jax.jit, static_argnames=("bits", "length"))
def unpack_bits(packed: jax.Array, bits: int, length: int) -> jax.Array:
    """The bit patterns (uint8, or uint16 for 16 bits) of the `length` packed codes.

    >>> unpack_bits(jnp.array([33, 15], jnp.uint8), 4, 3)
    Array([ 1,  2, 15], dtype=uint8)
    """
    _check(bits)
    if packed.shape[-1] != packed_length(length, bits):
        raise ValueError(
            f"{length} codes of {bits} bits fill {packed_length(length, bits)} bytes, but the last "
            f"axis of the packed array has {packed.shape[-1]}."
        )
    if bits == 16:
        return jax.lax.bitcast_convert_type(
            packed.reshape(*packed.shape[:-1], length, 2), jnp.uint16
        )
    groups = _grouped(packed, bits)
    mask = np.uint8(2**bits - 1)
    codes = []
    for code in range(8):
        value = jnp.zeros(groups.shape[:-1], jnp.uint8)
        for byte in range(bits):
            shift = 8 * byte - code * bits
            if -8 < shift < bits:
                value = value | _shift(groups[..., byte], shift)
        codes.append(value & mask)
    flat = jnp.stack(codes, axis=-1).reshape(*packed.shape[:-1], groups.shape[-2] * 8)
    return flat[..., :length]


def to_bit_patterns(codes: jax.Array, bits: int) -> jax.Array:
    """The low `bits` bits of each code, as uint8 (uint16 for 16-bit codes).

    >>> to_bit_patterns(jnp.array([-1, 3], jnp.int4), 3)
    Array([7, 3], dtype=uint8)
    """
    if jnp.issubdtype(codes.dtype, jnp.floating):
        if dtype_bits(codes.dtype) == 4:
            return _float4_patterns(codes)
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    if bits == 16:
        return jax.lax.bitcast_convert_type(codes, jnp.uint16)
    if jnp.issubdtype(codes.dtype, jnp.signedinteger):
        codes = jax.lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)
    return codes.astype(jnp.uint8) & np.uint8(2**bits - 1)


def _float4_patterns(codes: jax.Array) -> jax.Array:
    """The bits of e2m1 floats, from their values.

    XLA's CPU compilers fail where a cast to four bits and a look at these bits meet in one kernel.
    """
    x = codes.astype(jnp.float32)
    size = jnp.abs(x)  # 0, 1/2, 1, 3/2, 2, 3, 4, 6
    index = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
    return index.astype(jnp.uint8) | (jnp.signbit(x).astype(jnp.uint8) << np.uint8(3))


def from_bit_patterns(patterns: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Codes of a storage dtype from their bit patterns: signs extended, float bits reread.

    >>> from_bit_patterns(jnp.array([7, 3], jnp.uint8), 3, jnp.int4)
    Array([-1, 3], dtype=int4)
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        if dtype_bits(dtype) == 4:
            patterns = patterns.astype(jnp.uint4)
        return jax.lax.bitcast_convert_type(patterns, dtype)
    if bits == 16:
        return jax.lax.bitcast_convert_type(patterns, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        unused = np.int8(8 - bits)
        signed = jax.lax.bitcast_convert_type(patterns << np.uint8(8 - bits), jnp.int8)
        return (signed >> unused).astype(dtype)
    return patterns.astype(dtype)


def _check(bits: int) -> None:
    if bits not in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        raise ValueError(f"Codes of {bits!r} bits cannot be packed: use 1 to 8, or 16.")


def _shift(value: jax.Array, left: int) -> jax.Array:
    return value << np.uint8(left) if left >= 0 else value >> np.uint8(-left)


def _grouped(array: jax.Array, size: int) -> jax.Array:
    """The last axis cut into groups of `size`, zeros filling up the last one."""
    length = array.shape[-1]
    missing = -length % size
    padding = [(0, 0, 0)] * (array.ndim - 1) + [(0, missing, 0)]
    padded = jax.lax.pad(array, jnp.zeros((), array.dtype), padding)
    return padded.reshape(*array.shape[:-1], (length + missing) // size, size)
