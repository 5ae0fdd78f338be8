"""Transposes, slices, reshapes and their kin on a QArray; `_moves` says what they promise."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit.qarray._tiles import infer_tile_shape, uneven_tiles
from fewbit.qarray._type import QArray

# (part, its tile per axis) -> the moved part
PartMove = Callable[[jax.Array, tuple[int, ...]], jax.Array]


class CannotMove(ValueError):
    """The scales of a QArray cannot follow a layout change; dequantize first."""


def rebuild(q: QArray, data: Any, tile_shape: Sequence[int], move: PartMove) -> QArray:
    """A QArray from moved codes, moving each other part; `tile_shape` is the result's."""
    parts: dict[str, Any] = {}
    for name in ("scale", "zero_point", "tensor_scale"):
        part = getattr(q, name)
        if part is None:
            continue
        if name == "tensor_scale" and set(part.shape) <= {1}:
            # The same object where possible: `concatenate` knows by it that pieces were one.
            parts[name] = part if part.ndim == data.ndim else part.reshape((1,) * data.ndim)
        else:
            parts[name] = move(part, infer_tile_shape(q.shape, part.shape, q.tiles))
    moved = q.replace(qvalue=data, tiles=(), **parts)
    return moved.replace(tiles=uneven_tiles(moved.shape, moved.scale.shape, tile_shape))


def settle(q: QArray, moves_last: bool) -> QArray:
    """Packed codes can be moved as bytes as long as the last axis stays whole; else unpack."""
    if q.layout == "plain" or not moves_last:
        return q
    return q.replace(qvalue=q.qvalue, layout="plain", last_dim=None)


def transpose(q: QArray, perm: Sequence[int]) -> QArray:
    """The axes permuted.

    >>> q = QArray(jnp.zeros((2, 3), jnp.int8), jnp.ones((1, 3)))
    >>> transpose(q, (1, 0))
    QArray(qvalue=int8[3,2], scale=float32[3,1], qtype=int8)
    """
    perm = tuple(axis_of(a, q.ndim) for a in perm)
    q = settle(q, bool(perm) and perm[-1] != q.ndim - 1)
    tile_shape = [q.tile_shape[a] for a in perm]
    return rebuild(q, lax.transpose(q.data, perm), tile_shape, lambda p, _: lax.transpose(p, perm))


def expand_dims(q: QArray, dims: Sequence[int]) -> QArray:
    """New axes of size 1 at the given places of the result.

    >>> q = QArray(jnp.zeros((2, 3), jnp.int8), jnp.ones((1, 3)))
    >>> expand_dims(q, (0,)).shape
    (1, 2, 3)
    """
    rank = q.ndim + len(dims)
    dims = sorted(axis_of(d, rank) for d in dims)
    q = settle(q, rank - 1 in dims)
    tile_shape = list(q.tile_shape)
    for dim in dims:
        tile_shape.insert(dim, 1)
    moved = lax.expand_dims(q.data, dims)
    return rebuild(q, moved, tile_shape, lambda p, _: lax.expand_dims(p, dims))


def squeeze(q: QArray, dims: Sequence[int]) -> QArray:
    """Axes of size 1 removed.

    >>> squeeze(QArray(jnp.zeros((1, 3), jnp.int8), jnp.ones((1, 3))), (0,)).shape
    (3,)
    """
    dims = tuple(sorted(axis_of(d, q.ndim) for d in dims))
    q = settle(q, q.ndim - 1 in dims)
    tile_shape = [t for a, t in enumerate(q.tile_shape) if a not in dims]
    return rebuild(q, lax.squeeze(q.data, dims), tile_shape, lambda p, _: lax.squeeze(p, dims))


def broadcast_in_dim(
    q: QArray, shape: Sequence[int], broadcast_dimensions: Sequence[int]
) -> QArray:
    """New axes inserted and axes of size 1 widened; scales stay one wide there.

    >>> q = QArray(jnp.zeros((1, 3), jnp.int8), jnp.ones((1, 3)))
    >>> broadcast_in_dim(q, (2, 4, 3), (1, 2)).scale.shape
    (1, 1, 3)
    """
    shape, places = tuple(shape), tuple(broadcast_dimensions)
    for axis, place in enumerate(places):
        if q.shape[axis] not in (1, shape[place]):
            raise CannotMove(f"axis {axis} of size {q.shape[axis]} cannot widen to {shape[place]}")
    last = q.ndim - 1
    keeps_last = places[-1:] == (len(shape) - 1,) and q.shape[last] == shape[-1]
    q = settle(q, not keeps_last)
    data_shape = shape if q.layout == "plain" else (*shape[:-1], q.data.shape[-1])
    tile_shape = list(shape)
    for axis, place in enumerate(places):
        if q.shape[axis] == shape[place]:
            tile_shape[place] = q.tile_shape[axis]

    def move(part, _):
        part_shape = [1] * len(shape)
        for axis, place in enumerate(places):
            part_shape[place] = part.shape[axis]
        return lax.broadcast_in_dim(part, part_shape, places)

    return rebuild(q, lax.broadcast_in_dim(q.data, data_shape, places), tile_shape, move)


def slice_(
    q: QArray, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] | None = None
) -> QArray:
    """A static slice. A tiled axis may be cut at the start of a tile, or inside a single one.

    >>> q = QArray(jnp.zeros((64, 3), jnp.int8), jnp.ones((2, 1)))
    >>> slice_(q, (32, 0), (64, 3)).scale.shape
    (1, 1)
    """
    strides = (1,) * q.ndim if strides is None else tuple(strides)
    cuts = list(zip(start, limit, strides, strict=True))
    q = settle(q, bool(cuts) and cuts[-1] != (0, q.shape[-1], 1))
    data_cuts = cuts if q.layout == "plain" else [*cuts[:-1], (0, q.data.shape[-1], 1)]

    def move(part, tiles):
        rows = enumerate(zip(part.shape, tiles, cuts, strict=True))
        return _sliced(part, [_part_cut(axis, count, t, cut) for axis, (count, t, cut) in rows])

    new_shape = [_length(cut) for cut in cuts]
    tile_shape = [t if t < d else d for t, d in zip(q.tile_shape, new_shape, strict=True)]
    return rebuild(q, _sliced(q.data, data_cuts), tile_shape, move)


def _part_cut(axis: int, count: int, tile: int, cut: tuple[int, int, int]) -> tuple[int, int, int]:
    start, limit, stride = cut
    size = _length(cut)
    if count == 1 or size == 0:
        return 0, 1, 1
    if tile == 1:
        return cut
    last = start + (size - 1) * stride
    if start // tile == last // tile:
        return start // tile, start // tile + 1, 1
    if start % tile or stride != 1:
        raise CannotMove(
            f"axis {axis} has tiles of {tile}, which the slice {start}:{limit}:{stride} cuts open"
        )
    return start // tile, last // tile + 1, 1


def _length(cut: tuple[int, int, int]) -> int:
    start, limit, stride = cut
    return max(0, -(-(limit - start) // stride))


def _sliced(x: jax.Array, cuts: Sequence[tuple[int, int, int]]) -> jax.Array:
    return lax.slice(x, *zip(*cuts, strict=True)) if cuts else x


def dynamic_slice(q: QArray, start_indices: Sequence[Any], sizes: Sequence[int]) -> QArray:
    """A slice at traced places, clamped to the array as the primitive does it.

    On a tiled axis the slice is the whole axis or one element, or its start is a known number.

    >>> q = QArray(jnp.zeros((4, 3), jnp.int8), jnp.ones((4, 1)))
    >>> dynamic_slice(q, (jnp.int32(1), 0), (1, 3)).scale.shape
    (1, 1)
    """
    sizes, shape = tuple(sizes), q.shape
    starts: list[Any] = []
    for start, size, dim in zip(start_indices, sizes, shape, strict=True):
        known = _known_int(start)
        if size == dim:
            starts.append(0)
        elif known is not None:
            starts.append(min(max(known, 0), dim - size))
        else:
            starts.append(jnp.clip(jnp.asarray(start).astype(jnp.int32), 0, dim - size))
    if all(isinstance(s, int) for s in starts):
        return slice_(q, starts, [s + n for s, n in zip(starts, sizes, strict=True)])
    q = settle(q, sizes[-1] != shape[-1])
    data_sizes = sizes if q.layout == "plain" else (*sizes[:-1], q.data.shape[-1])

    def move(part, tiles):
        cuts: list[tuple[Any, int]] = []
        rows = enumerate(zip(starts, sizes, part.shape, tiles, strict=True))
        for axis, (start, size, count, tile) in rows:
            if isinstance(start, int):
                first, after, _ = _part_cut(axis, count, tile, (start, start + size, 1))
                cuts.append((jnp.int32(first), after - first))
            elif count == 1:
                cuts.append((jnp.int32(0), 1))
            elif tile == 1 or size == 1:
                cuts.append((start // tile, size))
            else:
                raise CannotMove(
                    f"axis {axis} has tiles of {tile}, which {size} elements from a start that is "
                    "known only at run time may cut open"
                )
        return lax.dynamic_slice(part, *zip(*cuts, strict=True))

    data = lax.dynamic_slice(q.data, [jnp.int32(s) for s in starts], data_sizes)
    tile_shape = [t if t < d else d for t, d in zip(q.tile_shape, sizes, strict=True)]
    return rebuild(q, data, tile_shape, move)


def split(q: QArray, sizes: Sequence[int], axis: int) -> list[QArray]:
    """Cut an axis into pieces of the given sizes.

    >>> q = QArray(jnp.zeros((2, 6), jnp.int8), jnp.ones((1, 6)))
    >>> [piece.shape for piece in split(q, (2, 4), 1)]
    [(2, 2), (2, 4)]
    """
    axis = axis_of(axis, q.ndim)
    pieces, at = [], 0
    for size in sizes:
        start, limit = [0] * q.ndim, list(q.shape)
        start[axis], limit[axis] = at, at + size
        pieces.append(slice_(q, start, limit))
        at += size
    return pieces


def index(q: QArray, i: Any, axis: int = 0) -> QArray:
    """Entry `i`, which may be traced, of an axis; the axis is gone from the result.

    >>> q = QArray(jnp.zeros((4, 3), jnp.int8), jnp.ones((4, 1)))
    >>> index(q, jnp.int32(2)).shape
    (3,)
    """
    axis = axis_of(axis, q.ndim)
    dim, known = q.shape[axis], _known_int(i)
    if known is not None:
        if not -dim <= known < dim:
            raise IndexError(f"Index {known} is out of range for axis {axis} of {q!r}.")
        at: Any = known % dim
    else:
        at = jnp.asarray(i)
        at = jnp.where(at < 0, at + dim, at)
    starts, sizes = [0] * q.ndim, list(q.shape)
    starts[axis], sizes[axis] = at, 1
    return squeeze(dynamic_slice(q, starts, sizes), (axis,))


def concatenate(qs: Sequence[QArray], axis: int) -> QArray:
    """QArrays of one granularity joined along an axis.

    Pieces that share a scale along the axis become tiles of it, so they must be equally long.

    >>> q = QArray(jnp.zeros((4, 3), jnp.int8), jnp.ones((1, 3)))
    >>> concatenate([q, q], 0)
    QArray(qvalue=int8[8,3], scale=float32[2,3], qtype=int8)
    """
    first, axis = qs[0], axis_of(axis, qs[0].ndim)
    others = [a for a in range(first.ndim) if a != axis]
    tile = first.tile_shape[axis]
    for n, q in enumerate(qs):
        last = n == len(qs) - 1
        if (q.qtype, q.dtype, q.scale.dtype) != (first.qtype, first.dtype, first.scale.dtype):
            raise CannotMove(f"piece {n} is {q!r}, the first one {first!r}")
        if any(q.tile_shape[a] != first.tile_shape[a] for a in others):
            raise CannotMove(
                f"piece {n} has tiles {q.tile_shape}, the first one {first.tile_shape}"
            )
        whole = q.tile_shape[axis] == tile and (q.shape[axis] % tile == 0 or last)
        if not whole and not (last and q.scale.shape[axis] == 1 and q.shape[axis] < tile):
            raise CannotMove(
                f"along axis {axis} piece {n} has {q.shape[axis]} elements in tiles of "
                f"{q.tile_shape[axis]}, which does not continue tiles of {tile}"
            )
        if (q.zero_point is None) != (first.zero_point is None):
            raise CannotMove(f"piece {n} differs from the first one in having a zero point")
        if q.zero_point is not None and q.zero_point.shape != q.scale.shape:
            raise CannotMove(f"piece {n} has another granularity for its zero point")
        if q.tensor_scale is not first.tensor_scale:
            raise CannotMove(f"piece {n} has its own scale for the whole tensor")
    packed = axis != first.ndim - 1 and all(q.layout == "bits" for q in qs)
    qs = [settle(q, not packed) for q in qs]
    join = lambda name: jnp.concatenate([getattr(q, name) for q in qs], axis)  # noqa: E731
    moved = qs[0].replace(
        qvalue=join("data"),
        scale=join("scale"),
        zero_point=None if first.zero_point is None else join("zero_point"),
        tiles=(),
    )
    return moved.replace(tiles=uneven_tiles(moved.shape, moved.scale.shape, first.tile_shape))


def rev(q: QArray, dims: Sequence[int]) -> QArray:
    """Axes reversed; not where the last tile is shorter than the others.

    >>> q = QArray(jnp.array([1, 2], jnp.int8), jnp.array([1.0, 3.0]))
    >>> rev(q, (0,)).scale
    Array([3., 1.], dtype=float32)
    """
    dims = tuple(axis_of(d, q.ndim) for d in dims)
    for axis in dims:
        if q.scale.shape[axis] > 1 and q.shape[axis] % q.tile_shape[axis]:
            raise CannotMove(f"axis {axis} would begin with its shorter last tile when reversed")
    q = settle(q, q.ndim - 1 in dims)
    return rebuild(q, lax.rev(q.data, dims), q.tile_shape, lambda p, _: lax.rev(p, dims))


def axis_of(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"Axis {axis} is out of range for an array with {rank} axes.")
    return axis % rank


def _known_int(value: Any) -> int | None:
    if isinstance(value, jax.core.Tracer):
        return None
    return operator.index(value)


# --- Reshaping: which new shapes leave every scale a block of its own -----------------------------


def reshape(q: QArray, new_shape: Sequence[int]) -> QArray:
    """Another shape in which each scale still covers a block of its axes.

    >>> q = QArray(jnp.zeros((4, 6), jnp.int8), jnp.ones((1, 2)))
    >>> reshape(q, (4, 2, 3)).scale.shape
    (1, 2, 1)
    """
    shape, new = q.shape, fill_in(q.shape, new_shape)
    q = settle(q, new[-1:] != shape[-1:])
    data_shape = new if q.layout == "plain" else (*new[:-1], q.data.shape[-1])
    tile_shape = [tile for _, tile in _regroup(shape, q.scale.shape, q.tile_shape, new)]

    def move(part, tiles):
        return part.reshape([count for count, _ in _regroup(shape, part.shape, tiles, new)])

    return rebuild(q, q.data.reshape(data_shape), tile_shape, move)


def fill_in(shape: tuple[int, ...], new_shape: Sequence[int]) -> tuple[int, ...]:
    """The new shape with -1 replaced."""
    new = [operator.index(n) for n in new_shape]
    if -1 in new:
        rest = math.prod(n for n in new if n != -1)
        new[new.index(-1)] = math.prod(shape) // rest if rest else 0
    if math.prod(new) != math.prod(shape):
        raise ValueError(f"Cannot reshape {shape} into {tuple(new_shape)}: the sizes differ.")
    return tuple(new)


def _regroup(
    shape: tuple[int, ...], part_shape: tuple[int, ...], tiles: Sequence[int], new: tuple[int, ...]
) -> list[tuple[int, int]]:
    """(count, tile) of the part on each new axis.

    The old axes are written as a string of factors, outermost first: `own` ones, over which the
    part has numbers of its own, and `shared` ones, over which it repeats. A new axis can take a run
    of own factors followed by a run of shared ones; that is what a tile is.
    """
    fail = f"Cannot reshape {shape} into {new} for {part_shape}."
    if 0 in shape:
        if set(part_shape) <= {1}:
            return [(1, n) for n in new]
        raise CannotMove(f"{fail} The array is empty.")
    factors: list[list[Any]] = []
    for dim, count, tile in zip(shape, part_shape, tiles, strict=True):
        pieces = [("own", count), ("shared", tile)] if count * tile == dim else [("uneven", dim)]
        for kind, size in pieces:
            if size > 1 and factors and factors[-1][0] == kind != "uneven":
                factors[-1][1] *= size
            elif size > 1:
                factors.append([kind, size, count, tile])
    result = []
    for axis, dim in enumerate(new):
        left, own, shared = dim, 1, 1
        while left > 1:
            kind, size, count, tile = factors[0]
            if kind == "uneven":
                if left != dim or size != dim:
                    raise CannotMove(f"{fail} The last tile of {tile} of an axis is shorter.")
                factors.pop(0)
                own, shared, left = count, tile, 1
                continue
            if kind == "own" and shared > 1:
                raise CannotMove(f"{fail} New axis {axis} would repeat its scales in a pattern.")
            # As much of the factor as the new axis can hold, if one is a multiple of the other.
            taken = math.gcd(left, size)
            if taken not in (left, size):
                raise CannotMove(f"{fail} New axis {axis} would cut tiles open.")
            factors[0][1] //= taken
            if factors[0][1] == 1:
                factors.pop(0)
            left //= taken
            own, shared = (own * taken, shared) if kind == "own" else (own, shared * taken)
        result.append((own, shared))
    return result
