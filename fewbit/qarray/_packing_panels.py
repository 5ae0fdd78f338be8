"""Panels: the byte order in which the native kernels read a weight, the same for every width.

A matrix of codes [K, N] is cut into panels of 64 columns and blocks of 32 rows. A block holds
`bits` rows of 64 words of 32 bits, one word per column: a kernel streams a panel from front to back
and finds four consecutive rows of one column in the four bytes of a word (a *quad*).

    data[N/64][K/32][bits][64 columns][4 bytes]

Eight bits are eight quads. Other widths are sums of planes of 4, 2 and 1 bits, the widest plane
holding the lowest bits: in a plane of p bits, bits t*p.. of byte i of word j belong to row
(8/p * j + t) * 4 + i of the block. Integers are stored without a sign, as code + 2^(bits-1).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import format_of, from_bit_patterns, to_bit_patterns

COLUMNS = 64
ROWS = 32
_QUADS = ROWS // 4
_ZERO_OF_NF4 = 7  # the table's index of 0.0


def planes(bits: int) -> tuple[int, ...]:
    """The widths of the planes that codes of `bits` bits are made of.

    >>> planes(8), planes(7), planes(3)
    ((8,), (4, 2, 1), (2, 1))
    """
    return (8,) if bits == 8 else tuple(p for p in (4, 2, 1) if bits & p)


def padded(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`.

    >>> padded(65, COLUMNS)
    128
    """
    return -(-size // unit) * unit


def offset(qtype: Any) -> int:
    """What is added to a code to make it unsigned; also the zero point of a symmetric type.

    >>> offset('int4'), offset('uint4'), offset('nf4')
    (8, 0, 0)
    """
    row = format_of(qtype)
    return 2 ** (row.bits - 1) if row.kind == "int" and row.name.startswith("int") else 0


@functools.partial(jax.jit, static_argnames="qtype")
def pack_panels(codes: jax.Array, qtype: Any) -> jax.Array:
    """Codes [..., K, N] as bytes [..., N/64, K/32, bits, 64, 4]; padding stands for zero.

    >>> pack_panels(jnp.ones((40, 3), jnp.int8), 'int8').shape
    (1, 2, 8, 64, 4)
    """
    row = format_of(qtype)
    unsigned = _unsigned(codes, row)
    *lead, k, n = codes.shape
    rows, columns = padded(k, ROWS), padded(n, COLUMNS)
    filler = _ZERO_OF_NF4 if row.kind == "table" else offset(row)
    widths = [(0, 0, 0)] * len(lead) + [(0, rows - k, 0), (0, columns - n, 0)]
    unsigned = jax.lax.pad(unsigned, np.uint8(filler), widths)
    # [lead, blocks, quad, byte, panels, columns] -> [lead, panels, blocks, quad, columns, byte]
    quads = unsigned.reshape(*lead, rows // ROWS, _QUADS, 4, columns // COLUMNS, COLUMNS)
    d = len(lead)
    quads = quads.transpose(*range(d), d + 3, d, d + 1, d + 4, d + 2)
    words, low = [], 0
    for width in planes(row.bits):
        part = (quads >> np.uint8(low)) & np.uint8(2**width - 1)
        per_word = 8 // width
        part = part.reshape(*part.shape[:-3], _QUADS // per_word, per_word, *part.shape[-2:])
        words.append(jnp.sum(part << _shifts(width, part.ndim), axis=-3, dtype=jnp.uint8))
        low += width
    return jnp.concatenate(words, axis=-3)


@functools.partial(jax.jit, static_argnames=("qtype", "k", "n"))
def unpack_panels(data: jax.Array, qtype: Any, k: int, n: int) -> jax.Array:
    """The codes [..., K, N], in the format's storage type, of bytes made by `pack_panels`.

    >>> data = pack_panels(jnp.arange(-6, 6, dtype=jnp.int8).reshape(4, 3), 'int5')
    >>> unpack_panels(data, 'int5', 4, 3)[0]
    Array([-6, -5, -4], dtype=int8)
    """
    row = format_of(qtype)
    total = jnp.zeros((*data.shape[:-3], _QUADS, COLUMNS, 4), jnp.uint8)
    first, low = 0, 0
    for width in planes(row.bits):
        per_word = 8 // width
        count = _QUADS // per_word
        words = data[..., first : first + count, None, :, :]
        part = (words >> _shifts(width, words.ndim)) & np.uint8(2**width - 1)
        total = total | (part.reshape(total.shape) << np.uint8(low))
        first, low = first + count, low + width
    *lead, panels, blocks, quads, columns, _ = total.shape
    d = len(lead)
    codes = total.transpose(*range(d), d + 1, d + 2, d + 4, d, d + 3)
    codes = codes.reshape(*lead, blocks * quads * 4, panels * columns)
    codes = jax.lax.slice_in_dim(codes, 0, k, axis=d)
    return _signed(jax.lax.slice_in_dim(codes, 0, n, axis=d + 1), row)


def pack_parts(part: jax.Array, filler: float) -> jax.Array:
    """Scales or zero points [..., G, N] as [..., N/64, G, 64], padded columns holding `filler`.

    >>> pack_parts(jnp.ones((3, 2, 65)), 1.0).shape
    (3, 2, 2, 64)
    """
    *lead, groups, n = part.shape
    columns = padded(n, COLUMNS)
    widths = [(0, 0, 0)] * (len(lead) + 1) + [(0, columns - n, 0)]
    part = jax.lax.pad(part, jnp.asarray(filler, jnp.float32).astype(part.dtype), widths)
    part = part.reshape(*lead, groups, columns // COLUMNS, COLUMNS)
    return jnp.swapaxes(part, -2, -3)


def unpack_parts(part: jax.Array, n: int) -> jax.Array:
    """The inverse of `pack_parts`.

    >>> unpack_parts(pack_parts(jnp.ones((3, 2, 65)), 1.0), 65).shape
    (3, 2, 65)
    """
    part = jnp.swapaxes(part, -2, -3)
    part = part.reshape(*part.shape[:-2], part.shape[-2] * COLUMNS)
    return jax.lax.slice_in_dim(part, 0, n, axis=part.ndim - 1)


def _shifts(width: int, ndim: int) -> np.ndarray:
    """Where each of the codes that share a byte begins, along the third axis from the end."""
    return np.arange(0, 8, width, dtype=np.uint8).reshape((1,) * (ndim - 3) + (-1, 1, 1))


def _unsigned(codes: jax.Array, row: Any) -> jax.Array:
    if row.kind == "sign":
        return (codes > 0).astype(jnp.uint8)
    if offset(row):
        return (codes.astype(jnp.int16) + np.int16(offset(row))).astype(jnp.uint8)
    return to_bit_patterns(codes, row.bits)


def _signed(unsigned: jax.Array, row: Any) -> jax.Array:
    if row.kind == "sign":
        return (2 * unsigned.astype(jnp.int8) - 1).astype(row.storage)
    if offset(row):
        return (unsigned.astype(jnp.int16) - np.int16(offset(row))).astype(row.storage)
    return from_bit_patterns(unsigned, row.bits, row.storage)
