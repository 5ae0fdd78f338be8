"""Rows of a QArray by index: take, gather, and `q[...]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fewbit.numerics import convert_to, dtype_bits
from fewbit.qarray import _layout_moves
from fewbit.qarray._layout_moves import CannotMove
from fewbit.qarray._tiles import expand, uneven_tiles
from fewbit.qarray._type import QArray


def take_rows(
    q: QArray, indices: Any, axis: int = 0, mode: str | None = None, fill_value: Any = None
) -> QArray:
    """Entries of an axis by an array of indices, with the modes and the defaults of `jnp.take`.

    >>> q = QArray(jnp.zeros((4, 3), jnp.int8), jnp.ones((4, 1)))
    >>> take_rows(q, jnp.array([0, 2]), mode='clip')
    QArray(qvalue=int8[2,3], scale=float32[2,1], qtype=int8)
    """
    return gather(q, **row_lookup(q.shape, indices, axis, mode), fill_value=fill_value)


def row_lookup(shape: Sequence[int], indices: Any, axis: int, mode: str | None) -> dict[str, Any]:
    """`jnp.take` as the arguments of the gather it is."""
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise CannotMove(f"indices are {indices.dtype}, not integers")
    rank = len(shape)
    axis = _layout_moves.axis_of(axis, rank)
    indices = indices.astype(np.promote_types(indices.dtype, np.int32))
    if mode == "wrap":
        indices = indices % shape[axis]
    elif mode != "clip":
        indices = jnp.where(indices < 0, indices + shape[axis], indices)
    offset = tuple(a if a < axis else a + indices.ndim - 1 for a in range(rank) if a != axis)
    return dict(
        start_indices=indices[..., None],
        dimension_numbers=lax.GatherDimensionNumbers(
            offset_dims=offset, collapsed_slice_dims=(axis,), start_index_map=(axis,)
        ),
        slice_sizes=[1 if a == axis else n for a, n in enumerate(shape)],
        mode="clip" if mode in ("clip", "wrap") else (mode or "fill"),
    )


def gather(
    q: QArray,
    start_indices: Any,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any = None,
    fill_value: Any = None,
) -> QArray:
    """`lax.gather` in its look-up form: single entries of the indexed axes, the others whole.

    Where the mode fills, rows that do not exist decode to `fill_value` (NaN unless told), as the
    same gather from the float table would give.

    >>> q = QArray(jnp.ones((4, 3), jnp.int8), jnp.ones((4, 1)))
    >>> numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> rows = gather(q, jnp.array([[1], [9]]), dimension_numbers=numbers, slice_sizes=(1, 3))
    >>> rows.scale
    Array([[ 1.],
           [nan]], dtype=float32)
    """
    numbers, sizes = dimension_numbers, tuple(slice_sizes)
    indexed, batching = tuple(numbers.start_index_map), tuple(numbers.operand_batching_dims)
    single = {*indexed, *batching}
    for axis, (size, dim) in enumerate(zip(sizes, q.shape, strict=True)):
        if axis in single and size != 1:
            raise CannotMove(f"axis {axis} is indexed in windows of {size}")
        if axis not in single and size != dim:
            raise CannotMove(f"axis {axis} is cut to {size} of its {dim} elements")
    mode = lax.GatherScatterMode.from_any(mode)
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    rank = start_indices.ndim - 1 + len(numbers.offset_dims)
    kept = [a for a in range(q.ndim) if a not in (*numbers.collapsed_slice_dims, *batching)]
    place = dict(zip(kept, numbers.offset_dims, strict=True))
    last = q.ndim - 1
    q = _layout_moves.settle(q, last in indexed or place.get(last) != rank - 1)
    ids = jnp.asarray(start_indices)
    # Narrow indices could not be compared with a long axis; uint32 beside int32 would be int64.
    ids = ids.astype(np.promote_types(ids.dtype, np.int32)) if ids.dtype != jnp.uint32 else ids
    top = jnp.broadcast_to(jnp.array([q.shape[a] - 1 for a in indexed], ids.dtype), ids.shape)
    # A row that does not exist reads another one here; `_fill` makes of it what the mode says.
    inside = jnp.clip(ids, 0, top)

    def rows_of(part, part_ids):
        part_sizes = [1 if a in single else n for a, n in enumerate(part.shape)]
        return lax.gather(part, part_ids, numbers, part_sizes, mode="clip")

    batch_places = [a for a in range(rank) if a not in numbers.offset_dims]

    def move(part, tiles):
        # One number for every row needs no look-up. Where rows are filled each has its own scale.
        if not fills and all(part.shape[a] == 1 for a in single):
            part = lax.squeeze(part, [a for a in range(q.ndim) if a not in kept])
            return lax.expand_dims(part, batch_places)
        columns = []
        for column, axis in enumerate(indexed):
            tile = q.shape[axis] if part.shape[axis] == 1 else tiles[axis]
            columns.append(inside[..., column] // np.array(tile, ids.dtype))
        # A batch axis is indexed by its own position, so it has to have every one of them.
        for axis in batching:
            wide = [q.shape[a] if a == axis else n for a, n in enumerate(part.shape)]
            own = [tiles[a] if a == axis else 1 for a in range(q.ndim)]
            part = expand(part, wide, own)
        part_ids = jnp.stack(columns, axis=-1) if columns else inside
        return rows_of(part, part_ids)

    tile_shape = [1] * rank
    for axis, position in place.items():
        tile_shape[position] = q.tile_shape[axis]
    result = _layout_moves.rebuild(q, rows_of(q.data, inside), tile_shape, move)
    if not fills:
        return result
    missing = jnp.any((ids < 0) | (ids > top), axis=-1)
    return _fill(result, lax.expand_dims(missing, numbers.offset_dims), fill_value)


def _fill(q: QArray, missing: jax.Array, fill_value: Any) -> QArray:
    """Make the entries where `missing` decode to the fill value, whatever their codes are."""
    rows = jnp.broadcast_to(missing, np.broadcast_shapes(missing.shape, q.scale.shape))
    scale = jnp.broadcast_to(q.scale, rows.shape)
    tiles = uneven_tiles(q.shape, rows.shape, q.tile_shape)
    if fill_value is None or np.isnan(fill_value):
        nan = jnp.full(rows.shape, jnp.nan, scale.dtype)
        return q.replace(scale=jnp.where(rows, nan, scale), tiles=tiles)
    fill = np.asarray(fill_value, q.dtype)
    if dtype_bits(scale.dtype) < 16 or np.asarray(fill, scale.dtype) != fill:
        raise CannotMove(f"the scale's type {scale.dtype} cannot hold the fill value {fill}")
    # Any other value is the code of one times a scale of that value.
    q = _layout_moves.settle(q, True)
    one = convert_to(jnp.ones((), jnp.float32), q.qtype)
    codes = jnp.where(jnp.broadcast_to(missing, q.shape), one, q.data)
    zero_point = q.zero_point
    if zero_point is not None:
        zero_point = jnp.broadcast_to(zero_point, rows.shape)
        zero_point = jnp.where(rows, jnp.zeros((), zero_point.dtype), zero_point)
    scale = jnp.where(rows, jnp.asarray(fill, scale.dtype), scale)
    return q.replace(qvalue=codes, scale=scale, zero_point=zero_point, tiles=tiles)


def getitem(q: QArray, key: Any) -> QArray:
    """`q[key]` for integers (traced ones too), slices, `...`, None and one array of indices.

    >>> q = QArray(jnp.zeros((4, 6, 3), jnp.int8), jnp.ones((4, 2, 1)))
    >>> getitem(q, (..., slice(3, 6), None, 0)).shape
    (4, 3, 1)
    """
    keys = _spelled_out(key if isinstance(key, tuple) else (key,), q)
    by_axis = [k for k in keys if k is not None]
    arrays = [k for k in by_axis if _is_array(k)]
    if arrays and sum(not isinstance(k, slice) for k in by_axis) > 1:
        raise CannotMove("an index array beside another index; index one axis at a time")
    ranges = [
        range(*k.indices(n)) if isinstance(k, slice) else range(n)
        for k, n in zip(by_axis, q.shape, strict=True)
    ]
    # Slices of the primitive go forward; what was asked for backward is turned afterwards.
    forward = [r if r.step > 0 else r[::-1] for r in ranges]
    out = _layout_moves.slice_(
        q,
        [r.start if len(r) else 0 for r in forward],
        [r[-1] + 1 if len(r) else 0 for r in forward],
        [r.step for r in forward],
    )
    backward = [a for a, r in enumerate(ranges) if r.step < 0]
    if backward:
        out = _layout_moves.rev(out, backward)
    # From the last axis on: what one index does to the rank leaves the axes before it in place.
    for axis in reversed(range(q.ndim)):
        if _is_array(by_axis[axis]):
            out = take_rows(out, by_axis[axis], axis, mode="promise_in_bounds")
        elif not isinstance(by_axis[axis], slice):
            out = _layout_moves.index(out, by_axis[axis], axis)
    new, at = [], 0
    for k in keys:
        if k is None:
            new.append(at)
        at += 1 if k is None or isinstance(k, slice) else np.ndim(k)
    return _layout_moves.expand_dims(out, new) if new else out


def _is_array(key: Any) -> bool:
    return not isinstance(key, slice) and np.ndim(key) > 0


def _spelled_out(keys: tuple[Any, ...], q: QArray) -> list[Any]:
    """The key with `...` replaced by full slices, one entry per axis besides None."""
    for k in keys:
        if isinstance(k, bool) or getattr(k, "dtype", None) == np.dtype(bool):
            raise CannotMove("a boolean mask selects a number of entries not known here")
    keys = tuple(jnp.asarray(k) if isinstance(k, (list, np.ndarray)) else k for k in keys)
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    given = sum(k is not None and k is not Ellipsis for k in keys)
    if given > q.ndim or len(dots) > 1:
        raise IndexError(f"Index {keys} has too many entries for {q!r}.")
    rest = [slice(None)] * (q.ndim - given)
    at = dots[0] if dots else len(keys)
    return [*keys[:at], *rest, *keys[at + len(dots) :]]
