"""Codes as a dense string of bits: int3 takes three bits, not the four or eight of its dtype.

Along the last axis, code `i` occupies bits `i*bits` to `(i+1)*bits`, counted from the lowest bit of
the first byte. Integers are stored as the low bits of their two's complement, floats as their bits.
JAX packs what a model holds, NumPy what goes to files and comes from them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fewbit.numerics._formats import dtype_bits

_PIECE = 2**20  # codes packed at a time: a multiple of 8, so that pieces end on whole bytes
_SIGNED = {np.dtype(np.int8), np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.int2)}


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
    return _recut(patterns, bits, 8)[..., : packed_length(length, bits)]


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
    return _recut(packed, 8, bits, np.uint8(2**bits - 1))[..., :length]


def _recut(array: jax.Array, old: int, new: int, mask: np.uint8 | None = None) -> jax.Array:
    """The last axis, in pieces of `old` bits, cut into pieces of `new` bits.

    `new` old pieces hold as many bits as `old` new ones, so each new piece of such a group is a
    fixed combination of shifted old ones and no array of single bits is ever made.
    """
    *lead, length = array.shape
    missing = -length % new
    padding = [(0, 0, 0)] * len(lead) + [(0, missing, 0)]
    padded = jax.lax.pad(array, jnp.zeros((), array.dtype), padding)
    groups = padded.reshape(*lead, (length + missing) // new, new)
    pieces = []
    for to in range(old):
        value = jnp.zeros(groups.shape[:-1], jnp.uint8)
        for source in range(new):
            left = source * old - to * new
            if -old < left < new:
                part = groups[..., source]
                value = value | (part << np.uint8(left) if left >= 0 else part >> np.uint8(-left))
        pieces.append(value if mask is None else value & mask)
    return jnp.stack(pieces, axis=-1).reshape(*lead, groups.shape[-2] * old)


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
    floating = jnp.issubdtype(dtype, jnp.floating)
    if floating and dtype_bits(dtype) == 4:
        patterns = patterns.astype(jnp.uint4)
    if floating or bits == 16:
        return jax.lax.bitcast_convert_type(patterns, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        signed = jax.lax.bitcast_convert_type(patterns << np.uint8(8 - bits), jnp.int8)
        return (signed >> np.int8(8 - bits)).astype(dtype)
    return patterns.astype(dtype)


def _check(bits: int) -> None:
    if bits not in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        raise ValueError(f"Codes of {bits!r} bits cannot be packed: use 1 to 8, or 16.")


# --- The same bits in NumPy, for files: any shape without compiling, a piece at a time ------------


def pack_pieces(codes: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    """The packed bytes of an array of codes (one byte each), in order, piece by piece.

    >>> [piece.tolist() for piece in pack_pieces(np.array([[1, 2, -1]], np.int8), 4)]
    [[33, 15]]
    """
    length = codes.shape[-1] if codes.ndim else 1
    flat = codes.reshape(-1, length) if codes.size else codes.reshape(0, 1)
    for piece in _pieces(len(flat), length):
        yield _pack(flat[piece], bits).reshape(-1)


def unpack(packed: np.ndarray, bits: int, length: int, dtype: Any) -> np.ndarray:
    """Codes of a one-byte dtype from packed rows; integers get their signs, floats their bits.

    >>> unpack(np.array([33, 15], np.uint8), 4, 3, ml_dtypes.int4)
    array([1, 2, -1], dtype=int4)
    """
    dtype = np.dtype(dtype)
    out = np.empty((*packed.shape[:-1], length), np.uint8)
    rows, to = packed.reshape(-1, packed.shape[-1]), out.reshape(-1, length)
    for some, columns in _pieces(len(rows), length):
        count, first = columns.stop - columns.start, columns.start * bits // 8
        piece = rows[some, first : first + packed_length(count, bits)]
        to[some, columns] = _unpack(piece, bits, count)
    if dtype in _SIGNED and bits < 8:
        # In place: shifting up drops what is above the sign, shifting down repeats it.
        np.left_shift(out, 8 - bits, out=out)
        signed = out.view(np.int8)
        np.right_shift(signed, 8 - bits, out=signed)
    return out.view(dtype)


def _pieces(rows: int, length: int) -> Iterator[tuple[slice, slice]]:
    at_once = max(1, _PIECE // max(length, 1))
    for row in range(0, rows, at_once):
        for begin in range(0, length, _PIECE):
            yield slice(row, row + at_once), slice(begin, min(begin + _PIECE, length))


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    patterns = np.ascontiguousarray(codes).view(np.uint8) & np.uint8(2**bits - 1)
    rows, length = patterns.shape
    if bits == 1:
        return np.packbits(patterns, axis=-1, bitorder="little")
    missing = -length % 8
    if missing:
        patterns = np.pad(patterns, ((0, 0), (0, missing)))
    if bits == 4:
        return (patterns[:, ::2] | (patterns[:, 1::2] << 4))[:, : packed_length(length, bits)]
    # Eight codes fill `bits` bytes, the low ones of one 64-bit word.
    words = np.zeros((rows, patterns.shape[1] // 8), "<u8")
    for i in range(8):
        words |= patterns[:, i::8].astype("<u8") << np.uint64(i * bits)
    taken = words.view(np.uint8).reshape(*words.shape, 8)[..., :bits]
    return taken.reshape(rows, -1)[:, : packed_length(length, bits)]


def _unpack(packed: np.ndarray, bits: int, length: int) -> np.ndarray:
    if bits == 1:
        return np.unpackbits(packed, axis=-1, count=length, bitorder="little")
    rows = len(packed)
    if bits == 4:
        halves = np.empty((rows, packed.shape[1], 2), np.uint8)
        np.bitwise_and(packed, 15, out=halves[..., 0])
        np.right_shift(packed, 4, out=halves[..., 1])
        return halves.reshape(rows, -1)[:, :length]
    groups = -(-length // 8)
    padded = np.zeros((rows, groups * bits), np.uint8)
    padded[:, : packed.shape[1]] = packed
    words = np.zeros((rows, groups, 8), np.uint8)
    words[..., :bits] = padded.reshape(rows, groups, bits)
    wide = words.view("<u8")[..., 0]
    codes = np.empty((rows, groups, 8), np.uint8)
    for i in range(8):
        codes[..., i] = (wide >> np.uint64(i * bits)) & np.uint64(2**bits - 1)
    return codes.reshape(rows, -1)[:, :length]
