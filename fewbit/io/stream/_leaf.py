"""One parameter from its source to the bytes of a checkpoint, a slice at a time.

The source is read and quantized as it lies. Where the parameter is a transpose of it, packed codes
are moved instead of floats: there are eight times fewer bytes of them.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.io._encoding import KNOWN_DTYPES, encode
from fewbit.io._errors import CheckpointError
from fewbit.io._safetensors import raw_bytes
from fewbit.io._sources import Source
from fewbit.io.checkpoint._tree import Leaf, leaf_arrays
from fewbit.numerics import format_of, packed_length, to_bit_patterns
from fewbit.params import quantize_leaf
from fewbit.planning import LeafPlan
from fewbit.qarray import (
    IN_A_RULE,
    HowToQuantize,
    QArray,
    get_tile_shape,
    lost_groups,
    parse_method,
    quantize_with,
    slice_how,
    tell_lost,
    unpack,
)

SLICE_BYTES = 2 * 2**20
BLOCK_BYTES = 64 * 2**20  # read at once where slices do not lie one after another
_IN_FLIGHT = 4

_MSG_NOT_FINITE = "holds a number that is NaN or infinite"
_FIX_NOT_FINITE = (
    "One such number spoils every code that shares its scale. Check the checkpoint or the training "
    "run, or leave this parameter float with an earlier rule."
)

Append = Callable[[str, Any], None]
_Quantized = tuple[np.ndarray, QArray, tuple[int, float]]  # codes, the rest, what was lost

# --- Slices of a weight that can be quantized on their own, with the same result to the bit -------


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


# --- One parameter --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A parameter of the plan, the tensors it is made of, and how each of them is turned."""

    plan: LeafPlan
    stored: Leaf
    sources: tuple[str, ...]
    stack: tuple[int, ...] = ()
    perm: tuple[int, ...] | None = None


def stream_leaf(piece: Piece, source: Source, append: Append, pool: Executor) -> None:
    """Give all bytes of a parameter to `append(tensor, bytes)`, in the order of the file."""
    how = piece.plan.how
    if how is None:
        _stream_plain(piece, source, append)
        return
    tiles = get_tile_shape(piece.plan.shape, how)
    depth = len(piece.stack)
    alone = all(t == 1 or n == 1 for t, n in zip(tiles[:depth], piece.stack, strict=True))
    perm = piece.perm or tuple(range(len(piece.plan.shape) - depth))
    turned = [0] * len(perm)  # the tiles in the source's own axes
    for axis, tile in enumerate(tiles[depth:]):
        turned[perm[axis]] = tile
    cut, first = None, piece.sources[0]
    if alone and perm:
        cut = find_cut(source.shape(first), turned, how, perm[-1], source.itemsize(first))
    if cut is None:
        _stream_whole(piece, source, append)
    else:
        _Sliced(piece, how, source, append, pool, cut, turned, perm).run()


def write_ready(leaf: Leaf, append: Append) -> None:
    """Give the bytes of a leaf whose value is at hand, such as a static scale."""
    for tensor, array in zip(leaf.tensors, leaf_arrays(leaf.value), strict=True):
        _append_array(append, tensor, array)


@dataclass
class _Sliced:
    """A quantized parameter, slice by slice; `tiles` and `perm` speak of the source's axes."""

    piece: Piece
    how: HowToQuantize
    source: Source
    append: Append
    pool: Executor
    cut: Cut
    tiles: list[int]
    perm: tuple[int, ...]

    def __post_init__(self) -> None:
        self.bits = format_of(self.how.qtype).bits
        self.codes, *self.rest = self.piece.stored.tensors
        # Everything but the codes is small and follows them in the file.
        self.small = [np.empty(t.encoding.shape, KNOWN_DTYPES[t.encoding.dtype]) for t in self.rest]
        self.straight = self.cut.axis == 0 and self.perm == tuple(range(len(self.perm)))
        self.inverse = tuple(int(i) for i in np.argsort(self.perm))
        self.lost, self.largest = 0, 0.0  # scales that do not serve their numbers

    def run(self) -> None:
        for number, name in enumerate(self.piece.sources):
            index = np.unravel_index(number, self.piece.stack) if self.piece.stack else ()
            self._layer(name, tuple(int(i) for i in index))
        for tensor, array in zip(self.rest, self.small, strict=True):
            if tensor.name.endswith(".scale"):
                said: dict[str, Any] = dict(where=self.piece.plan.path, place=IN_A_RULE)
                tell_lost(self.lost, array.dtype, all=array.size, largest=self.largest, **said)
            _append_array(self.append, tensor, array)

    def _layer(self, name: str, index: tuple[int, ...]) -> None:
        """One source tensor; its codes leave in order, or after they have been put in order."""
        shape = self.source.shape(name)
        if not self.straight:
            stored = KNOWN_DTYPES[self.codes.encoding.dtype] if self.bits >= 8 else np.uint8
            packed = file_shape(shape, self.perm[-1], self.how.qtype)
            buffer = np.empty([packed[axis] for axis in self.perm], stored)
            as_source = buffer.transpose(self.inverse)
        for begin, end, codes, q, (lost, largest) in self._slices(name, shape):
            self.lost, self.largest = self.lost + lost, max(self.largest, largest)
            if self.straight:
                self.append(self.codes.name, raw_bytes(codes))
            else:
                first, last = begin, end
                if self.cut.axis == self.perm[-1] and self.bits < 8:
                    first, last = begin * self.bits // 8, -(-end * self.bits // 8)
                as_source[_along(len(shape), self.cut.axis, first, last)] = codes
            self._keep_small(q, index, begin, end)
        if not self.straight:
            self.append(self.codes.name, raw_bytes(buffer))

    def _keep_small(self, q: QArray, index: tuple[int, ...], begin: int, end: int) -> None:
        tile, axis = self.tiles[self.cut.axis], self.cut.axis
        first, last = begin // tile, -(-end // tile)
        for tensor, array in zip(self.rest, self.small, strict=True):
            part = np.asarray(getattr(q, tensor.name.rpartition(".")[2]))
            place = array[index].transpose(self.inverse)
            keep = _along(part.ndim, axis, 0, last - first)
            place[_along(part.ndim, axis, first, last)] = part[keep]

    def _slices(
        self, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[int, int, np.ndarray, QArray, tuple[int, float]]]:
        """Quantized slices in order; a few are under way at once."""
        waiting: deque[tuple[int, int, Future[_Quantized]]] = deque()
        try:
            for begin, end, read in self._reads(name, shape):
                waiting.append((begin, end, self.pool.submit(self._one, name, begin, end, read)))
                if len(waiting) >= _IN_FLIGHT:
                    first, last, future = waiting.popleft()
                    yield first, last, *future.result()
            while waiting:
                first, last, future = waiting.popleft()
                yield first, last, *future.result()
        finally:
            for _, _, future in waiting:
                future.cancel()

    def _reads(
        self, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[int, int, Callable[[], np.ndarray]]]:
        cut, dim = self.cut, shape[self.cut.axis]
        if cut.axis == 0 and self.source.slices:
            for begin, end in cut.slices(dim):
                yield begin, end, lambda b=begin, e=end: self.source.read(name, 0, b, e)  # type: ignore[misc]
            return
        each = max(1, self.source.nbytes(name) // dim)
        wide = max(cut.length, BLOCK_BYTES // each // cut.length * cut.length)
        if not self.source.slices:
            wide = dim
        for first, last in Cut(cut.axis, wide).slices(dim):
            block = self.source.read(name, cut.axis, first, last)
            for begin, end in cut.slices(last - first, first):
                part = block[_along(len(shape), cut.axis, begin - first, end - first)]
                yield begin, end, lambda p=part: p  # type: ignore[misc]

    def _one(self, name: str, begin: int, end: int, read: Callable[[], np.ndarray]) -> _Quantized:
        array = _numbers(read())
        axis, dtype = self.cut.axis, self.piece.plan.dtype
        unit = self.tiles[axis] if axis != self.perm[-1] else np.lcm(self.tiles[axis], 8)
        filled = padded(array, self.cut, int(unit))
        how = slice_how(filled.shape, self.tiles, self.how)
        codes, q, finite, (lost, _, largest) = quantize_slice(filled, how, dtype, self.perm[-1])
        if not bool(finite):
            offset = [begin if a == axis else 0 for a in range(array.ndim)]
            raise not_finite(self.source, name, self.piece.plan, array, offset)
        result = np.asarray(codes)
        if filled is not array:
            kept = file_shape(array.shape, self.perm[-1], self.how.qtype)
            result = result[tuple(slice(0, n) for n in kept)]
        return result, q, (int(lost), float(largest))


def _stream_whole(piece: Piece, source: Source, append: Append) -> None:
    """A parameter that cannot be cut: exactly what quantize_params makes of it."""
    for name in piece.sources:
        array = _numbers(source.read_all(name))
        if not np.isfinite(array.astype(np.float32, copy=False)).all():
            raise not_finite(source, name, piece.plan, array, [0] * array.ndim)
    value = jnp.asarray(_assembled(piece, source), piece.plan.dtype)
    made = quantize_leaf(piece.plan.path, value, piece.plan)
    arrays = leaf_arrays(unpack(made.array))
    for tensor, array in zip(piece.stored.tensors, arrays, strict=True):
        _append_array(append, tensor, array)


def _stream_plain(piece: Piece, source: Source, append: Append) -> None:
    """A parameter that stays as it is, in the plan's type."""
    (tensor,) = piece.stored.tensors
    dtype = KNOWN_DTYPES[tensor.encoding.dtype]
    simple = tensor.encoding.kind in ("plain", "bytes") and tensor.encoding.nbytes
    if piece.perm is not None or not simple or not source.slices:
        _append_array(append, tensor, _assembled(piece, source).astype(dtype, copy=False))
        return
    for name in piece.sources:
        shape = source.shape(name)
        rows = shape[0] if shape else 1
        each = max(1, source.nbytes(name) // max(rows, 1))
        for begin, end in Cut(0, max(1, SLICE_BYTES // each)).slices(rows):
            array = source.read(name, 0, begin, end) if shape else source.read_all(name)
            append(tensor.name, raw_bytes(array.astype(dtype, copy=False)))


def _assembled(piece: Piece, source: Source) -> np.ndarray:
    layers = [source.read_all(name) for name in piece.sources]
    if piece.perm is not None:
        layers = [layer.transpose(piece.perm) for layer in layers]
    if not piece.stack:
        return layers[0]
    return np.stack(layers).reshape(piece.plan.shape)


def not_finite(
    source: Source, name: str, plan: LeafPlan, array: np.ndarray, offset: list[int]
) -> CheckpointError:
    """An error that names the first number that is not finite, in the source's own axes."""
    bad = np.argwhere(~np.isfinite(array.astype(np.float32, copy=False)))
    if not len(bad):  # finite there, but not in the plan's type
        cast = np.asarray(jnp.asarray(array).astype(plan.dtype), np.float32)
        bad = np.argwhere(~np.isfinite(cast))
    first = tuple(int(i) + o for i, o in zip(bad[0], offset, strict=True))
    found = float(array[tuple(bad[0])])
    what = f"{_MSG_NOT_FINITE}: {found} at index {first} (parameter {plan.path})"
    return CheckpointError(source.path, what, tensor=name, fix=_FIX_NOT_FINITE)


def _numbers(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _append_array(append: Append, tensor: Any, array: np.ndarray) -> None:
    if not tensor.encoding.nbytes:
        append(tensor.name, b"")
        return
    for part in encode(array, tensor.encoding):
        append(tensor.name, part)


def _along(rank: int, axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return tuple(slice(begin, end) if a == axis else slice(None) for a in range(rank))
