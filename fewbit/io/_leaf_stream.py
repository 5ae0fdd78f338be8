"""One parameter from its source to the bytes of a checkpoint, a slice at a time.

The source is read and quantized as it lies. Where the parameter is a transpose of it, packed codes
are moved instead of floats: there are eight times fewer bytes of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._plan import LeafPlan
from fewbit._qarray_losses import IN_A_RULE, tell_lost
from fewbit.io._encoding import KNOWN_DTYPES, encode
from fewbit.io._slices import (
    SLICE_BYTES,
    Cut,
    file_shape,
    find_cut,
    padded,
    quantize_slice,
    slice_how,
)
from fewbit.io._tree import Leaf, leaf_arrays
from fewbit.io.errors import CheckpointError
from fewbit.io.stream_sources import Source
from fewbit.numerics import format_of
from fewbit.params import quantize_leaf
from fewbit.qarray import QArray, get_tile_shape, unpack

BLOCK_BYTES = 64 * 2**20  # read at once where slices do not lie one after another
_IN_FLIGHT = 4

_MSG_NOT_FINITE = "holds a number that is NaN or infinite"
_FIX_NOT_FINITE = (
    "One such number spoils every code that shares its scale. Check the checkpoint or the training "
    "run, or leave this parameter float with an earlier rule."
)

Append = Callable[[str, Any], None]


@dataclass(frozen=True)
class Piece:
    """A parameter of the plan, the tensors it is made of, and how each of them is turned."""

    plan: LeafPlan
    stored: Leaf
    sources: tuple[str, ...]
    stack: tuple[int, ...] = ()
    perm: tuple[int, ...] | None = None

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.plan.shape[len(self.stack) :]


def stream_leaf(piece: Piece, source: Source, append: Append, pool: Executor) -> None:
    """Give all bytes of a parameter to `append(tensor, bytes)`, in the order of the file."""
    if piece.plan.how is None:
        _stream_plain(piece, source, append)
        return
    how = piece.plan.how
    tiles = get_tile_shape(piece.plan.shape, how)
    depth = len(piece.stack)
    alone = all(t == 1 or n == 1 for t, n in zip(tiles[:depth], piece.stack, strict=True))
    perm = piece.perm or tuple(range(len(piece.layer_shape)))
    shape = tuple(source.shape(piece.sources[0]))
    turned = [0] * len(perm)  # the tiles in the source's own axes
    for axis, tile in enumerate(tiles[depth:]):
        turned[perm[axis]] = tile
    itemsize = source.itemsize(piece.sources[0])
    cut = find_cut(shape, turned, how, perm[-1], itemsize) if alone and perm else None
    if cut is None:
        _stream_whole(piece, source, append)
    else:
        _Sliced(piece, source, append, pool, cut, turned, perm).run()


def write_ready(leaf: Leaf, append: Append) -> None:
    """Give the bytes of a leaf whose value is at hand, such as a static scale."""
    for tensor, array in zip(leaf.tensors, leaf_arrays(leaf.value), strict=True):
        _append_array(append, tensor, array)


_Quantized = tuple[np.ndarray, QArray, tuple[int, float]]  # codes, the rest, what was lost


class _Sliced:
    """A quantized parameter, slice by slice; `tiles` and `perm` speak of the source's axes."""

    def __init__(
        self,
        piece: Piece,
        source: Source,
        append: Append,
        pool: Executor,
        cut: Cut,
        tiles: list[int],
        perm: tuple[int, ...],
    ):
        self.piece, self.source, self.append, self.pool = piece, source, append, pool
        self.cut, self.tiles, self.perm = cut, tiles, perm
        assert piece.plan.how is not None
        self.how = piece.plan.how
        self.bits = format_of(self.how.qtype).bits
        self.codes, *self.rest = piece.stored.tensors
        # Everything but the codes is small and follows them in the file.
        self.small = [np.empty(t.encoding.shape, KNOWN_DTYPES[t.encoding.dtype]) for t in self.rest]
        in_order = perm == tuple(range(len(perm)))
        self.straight = cut.axis == 0 and in_order
        self.inverse = tuple(int(i) for i in np.argsort(perm))
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
                self.append(self.codes.name, _flat(codes))
            else:
                axis, bits = self.cut.axis, self.bits
                first, last = begin, end
                if axis == self.perm[-1] and bits < 8:
                    first, last = begin * bits // 8, -(-end * bits // 8)
                as_source[_along(len(shape), axis, first, last)] = codes
            self._keep_small(q, index, begin, end)
        if not self.straight:
            self.append(self.codes.name, _flat(buffer))

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
            append(tensor.name, _flat(array.astype(dtype, copy=False)))


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
        bad = np.argwhere(
            ~np.isfinite(np.asarray(jnp.asarray(array).astype(plan.dtype), np.float32))
        )
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


def _flat(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _along(rank: int, axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return tuple(slice(begin, end) if a == axis else slice(None) for a in range(rank))
