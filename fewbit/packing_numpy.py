"""The bits of `packing` in NumPy, for files: any shape without compiling, a piece at a time.

The layout is the same: along the last axis, code `i` occupies bits `i*bits` to `(i+1)*bits`,
counted from the lowest bit of the first byte; every row starts on a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from fewbit.packing import packed_length

_PIECE = 2**20  # codes packed at a time: a multiple of 8, so that pieces end on whole bytes
_SIGNED = {np.dtype(np.int8), np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.int2)}


def pack_pieces(codes: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    """The packed bytes of an array of codes (one byte each), in order, piece by piece.

    >>> [piece.tolist() for piece in pack_pieces(np.array([[1, 2, -1]], np.int8), 4)]
    [[33, 15]]
    """
    length = codes.shape[-1] if codes.ndim else 1
    flat = codes.reshape(-1, length) if codes.size else codes.reshape(0, 1)
    at_once = max(1, _PIECE // max(length, 1))
    for row in range(0, len(flat), at_once):
        for begin in range(0, length, _PIECE):
            yield _pack(flat[row : row + at_once, begin : begin + _PIECE], bits).reshape(-1)


def unpack(packed: np.ndarray, bits: int, length: int, dtype: Any) -> np.ndarray:
    """Codes of a one-byte dtype from packed rows; integers get their signs, floats their bits.

    >>> unpack(np.array([33, 15], np.uint8), 4, 3, ml_dtypes.int4)
    array([1, 2, -1], dtype=int4)
    """
    dtype = np.dtype(dtype)
    out = np.empty((*packed.shape[:-1], length), np.uint8)
    rows, to = packed.reshape(-1, packed.shape[-1]), out.reshape(-1, length)
    at_once = max(1, _PIECE // max(length, 1))
    for row in range(0, len(rows), at_once):
        for begin in range(0, length, _PIECE):
            some = slice(begin, min(begin + _PIECE, length))
            count = some.stop - some.start
            first = begin * bits // 8
            piece = rows[row : row + at_once, first : first + packed_length(count, bits)]
            to[row : row + at_once, some] = _unpack(piece, bits, count)
    if dtype in _SIGNED and bits < 8:
        # In place: shifting up drops what is above the sign, shifting down repeats it.
        np.left_shift(out, 8 - bits, out=out)
        signed = out.view(np.int8)
        np.right_shift(signed, 8 - bits, out=signed)
    return out.view(dtype)


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
