"""Which slices of a weight can be quantized on their own, with the same result to the bit.

A code depends on its tile alone, so slices that end where tiles end are independent, provided the
range of a tile does not depend on the order of a sum (absmax, minmax). Small slices are also much
faster: the several passes of quantization find them in the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._how import slice_how as slice_how
from fewbit._methods import parse_method
from fewbit._qarray_losses import lost_groups
from fewbit.numerics import format_of
from fewbit.packing import packed_length, to_bit_patterns
from fewbit.qarray import HowToQuantize, QArray, quantize_with

SLICE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Cut:
    """How an array is cut: along `axis`, `length` indices at a time."""

    axis: int
    length: int

    def slices(self, dim: int, begin: int = 0) -> Iterator[tuple[int, int]]:
        """Begin and end of each slice of `dim` indices from `begin` on."""
        for start in range(begin, begin + dim, self.length):
            yield start, min(start + self.length, begin + dim)


def find_cut(
    shape: Sequence[int],
    tiles: Sequence[int],
    how: HowToQuantize,
    pack_axis: int,
    itemsize: int,
    most: int = SLICE_BYTES,
) -> Cut | None:
    """How to cut an array of this shape and these tiles; None where it must stay whole.

    `pack_axis` is the axis along which codes are packed in the file, so that a slice of it has to
    fill whole bytes.

    >>> how = HowToQuantize(qtype='int4', channelwise_axes=(1,), tiled_axes={0: 32})
    >>> find_cut((4096, 4096), (32, 1), how, 1, 4)
    Cut(axis=0, length=128)
    >>> find_cut((64, 64), (64, 64), HowToQuantize(qtype='int4'), 1, 4) is None
    True
    """
    row = format_of(how.qtype)
    if parse_method(how.calibration_method).name not in ("absmax", "minmax"):
        return None
    # The second scale of nvfp4 is the tensor's, and the scale of a sign is a mean.
    if how.noise_fn is not None or row.name == "nvfp4" or row.kind == "sign":
        return None
    for axis, (dim, tile) in enumerate(zip(shape, tiles, strict=True)):
        if tile >= dim or (row.tile is not None and dim % row.tile and tile > 1):
            continue
        unit = math.lcm(tile, 8) if axis == pack_axis and row.bits < 8 else tile
        each = max(1, math.prod(shape) // dim * itemsize)
        length = max(unit, most // each // unit * unit)
        return Cut(axis, min(length, -(-dim // unit) * unit))
    return None


@functools.partial(jax.jit, static_argnames=("how", "dtype", "pack_axis"))
def quantize_slice(
    array: jax.Array, how: HowToQuantize, dtype: str, pack_axis: int
) -> tuple[jax.Array, QArray, jax.Array, tuple[jax.Array, ...]]:
    """The codes as they lie in a file, the QArray they belong to, whether all is finite, and how
    many scales do not serve their numbers (`lost_groups`)."""
    array = array.astype(dtype)
    q = quantize_with(array, how)
    codes, finite = packed_along(q, pack_axis), jnp.isfinite(array).all()
    return codes, q.replace(qvalue=None), finite, lost_groups(array, q.scale, how)


def packed_along(q: QArray, axis: int) -> jax.Array:
    """Codes at their true width along an axis, each row of it starting on a byte.

    >>> q = QArray(jnp.array([[1, 2], [-1, 3]], jnp.int4), jnp.ones((1, 1)))
    >>> packed_along(q, 0), packed_along(q, 1)
    (Array([[241,  50]], dtype=uint8), Array([[33], [63]], dtype=uint8))
    """
    row = format_of(q.qtype)
    codes = q.qvalue
    if row.bits >= 8:
        return codes
    if row.kind == "sign":
        codes = (codes < 0).astype(jnp.uint8)
    patterns = to_bit_patterns(codes, row.bits)
    length = patterns.shape[axis]
    missing = -length % 8
    if missing:
        padding = [(0, missing if a == axis else 0, 0) for a in range(patterns.ndim)]
        patterns = jax.lax.pad(patterns, jnp.zeros((), patterns.dtype), padding)
    before, after = patterns.shape[:axis], patterns.shape[axis + 1 :]
    groups = patterns.reshape(*before, -1, 8, *after)
    # Eight codes fill `bits` bytes: each is a fixed combination of shifted codes.
    pieces = []
    for byte in range(row.bits):
        value = jnp.zeros((*before, groups.shape[axis], *after), jnp.uint8)
        for code in range(8):
            shift = code * row.bits - 8 * byte
            if -row.bits < shift < 8:
                part = jax.lax.index_in_dim(groups, code, axis + 1, keepdims=False)
                by = np.uint8(abs(shift))
                value = value | (part << by if shift >= 0 else part >> by)
        pieces.append(value)
    flat = jnp.stack(pieces, axis=axis + 1).reshape(*before, -1, *after)
    return jax.lax.slice_in_dim(flat, 0, packed_length(length, row.bits), axis=axis)


def padded(array: np.ndarray, cut: Cut, unit: int) -> np.ndarray:
    """A last, shorter slice filled up with zeros, so that one compiled program serves all.

    Only whole tiles are added, which change no other.
    """
    length = array.shape[cut.axis]
    if length == cut.length or length % unit:
        return array
    shape = list(array.shape)
    shape[cut.axis] = cut.length
    whole = np.zeros(shape, array.dtype)
    whole[tuple(slice(0, n) for n in array.shape)] = array
    return whole


def file_shape(shape: Sequence[int], axis: int, qtype: Any) -> tuple[int, ...]:
    """The shape of codes that are packed along an axis.

    >>> file_shape((10, 4), 0, 'int3')
    (4, 4)
    """
    bits = format_of(qtype).bits
    sizes = list(shape)
    if bits < 8:
        sizes[axis] = packed_length(sizes[axis], bits)
    return tuple(sizes)
