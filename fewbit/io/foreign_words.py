"""Codes out of 32-bit words: how GPTQ, AWQ and compressed-tensors lay several codes in an int32."""

from collections.abc import Sequence

import numpy as np


def unpack_words(
    words: np.ndarray,
    bits: int,
    count: int,
    axis: int = -1,
    order: Sequence[int] | None = None,
) -> np.ndarray:
    """`count` codes along `axis` from words of `32 // bits` codes each, the lowest bits first.

    Field `i` of a word holds code `order[i]` of its share; without `order` code `i`.

    >>> unpack_words(np.array([0x76543210], np.int32), 4, 8)
    array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8)
    """
    source = np.moveaxis(np.ascontiguousarray(words).view(np.uint32), axis, -1)
    fields = 32 // bits
    shape = list(words.shape)
    shape[axis] *= fields
    codes = np.empty(shape, np.uint8)
    target = np.moveaxis(codes, axis, -1)
    for field in range(fields):
        place = field if order is None else order[field]
        shifted = source >> np.uint32(bits * field)
        target[..., place::fields] = (shifted & np.uint32(2**bits - 1)).astype(np.uint8)
    return codes.take(range(count), axis) if count != shape[axis] else codes


def unpack_stream(words: np.ndarray, bits: int, count: int, axis: int = -1) -> np.ndarray:
    """`count` codes along `axis` from a dense string of bits that runs through the words.

    >>> unpack_stream(np.array([-1, 0, 0], np.int32), 3, 12)
    array([7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 3, 0], dtype=uint8)
    """
    if 32 % bits == 0:
        return unpack_words(words, bits, count, axis)
    last = np.ascontiguousarray(np.moveaxis(words, axis, -1))
    raw = last.astype("<u4").view(np.uint8)
    single = np.unpackbits(raw, axis=-1, bitorder="little")[..., : count * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes = (single.reshape(*last.shape[:-1], count, bits) * weights).sum(-1, dtype=np.uint8)
    return np.moveaxis(codes, -1, axis)
