"""Moves of a PanelArray that leave its bytes where they are; None where that is not possible."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit import _lookups
from fewbit._layout_moves import CannotMove, axis_of
from fewbit._qarray_atoms import reshape_axes, whole_axes
from fewbit._qarray_panels import PanelArray
from fewbit._qarray_type import QArray
from fewbit._reshape import fill_in
from fewbit.packing_panels import COLUMNS


def transpose(p: PanelArray, perm: Sequence[int]) -> PanelArray | None:
    """Another order of the axes behind the stack axes."""
    stack, perm = len(p.lead), [axis_of(a, p.ndim) for a in perm]
    if perm[:stack] != list(range(stack)):
        return None
    return p.see(tuple(p.panels.axes[a - stack] for a in perm[stack:]))


def reshape(p: PanelArray, new_shape: Sequence[int]) -> PanelArray | None:
    """Other groups of the atoms behind the stack axes, if the scales can follow."""
    stack, new = len(p.lead), fill_in(p.shape, new_shape)
    axes = reshape_axes(p.panels.axes, new[stack:]) if new[:stack] == p.lead else None
    if axes is None:
        return None
    moved = p.see(axes)
    try:
        jax.eval_shape(PanelArray.plain, moved)
    except CannotMove:
        return None
    return moved


def expand_dims(p: PanelArray, dims: Sequence[int]) -> PanelArray | None:
    """New axes of size 1 behind the stack axes."""
    shape, rank = list(p.shape), p.ndim + len(dims)
    for dim in sorted(axis_of(d, rank) for d in dims):
        if dim < len(p.lead):
            return None
        shape.insert(dim, 1)
    return reshape(p, shape)


def squeeze(p: PanelArray, dims: Sequence[int]) -> PanelArray | None:
    """Axes of size 1 behind the stack axes removed."""
    gone = {axis_of(d, p.ndim) for d in dims}
    if any(d < len(p.lead) for d in gone):
        return None
    return reshape(p, [n for a, n in enumerate(p.shape) if a not in gone])


def broadcast_in_dim(
    p: PanelArray, shape: Sequence[int], broadcast_dimensions: Sequence[int]
) -> PanelArray | None:
    """A broadcast that only opens axes of size 1."""
    places = list(broadcast_dimensions)
    kept = places == sorted(places) and [shape[d] for d in places] == list(p.shape)
    if not kept or any(n != 1 for d, n in enumerate(shape) if d not in places):
        return None
    return reshape(p, shape)


def index(p: PanelArray, i: Any, axis: int = 0) -> PanelArray | None:
    """Entry `i` of the first stack axis, as a number beside the bytes."""
    if not p.lead or axis_of(axis, p.ndim) != 0:
        return None
    size = p.lead[0]
    if not isinstance(i, jax.core.Tracer) and not -size <= operator.index(i) < size:
        raise IndexError(f"Index {i} is out of range for axis 0 of {p!r}.")
    i = jnp.asarray(i).astype(jnp.int32)
    i = jnp.where(i < 0, i + size, i)
    at = i if p.layer is None else p.layer * size + i
    panels = dataclasses.replace(p.panels, indexed=p.panels.indexed + 1)
    return p.with_view(panels=panels, layer=at)


def dynamic_slice(
    p: PanelArray, start_indices: Sequence[Any], sizes: Sequence[int]
) -> PanelArray | None:
    """One entry of a stack with one axis left, which stays as an axis of size 1."""
    if len(p.lead) != 1 or tuple(sizes) != (1, *p.shape[1:]):
        return None
    start = jnp.clip(jnp.asarray(start_indices[0]).astype(jnp.int32), 0, p.lead[0] - 1)
    entry = index(p, start)
    assert entry is not None
    return entry.see(((), *entry.panels.axes))


def slice_(
    p: PanelArray, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] | None = None
) -> PanelArray | None:
    """One entry of a stack at a known place."""
    sizes = [b - a for a, b in zip(start, limit, strict=True)]
    if strides is not None and any(s != 1 for s in strides):
        return None
    return dynamic_slice(p, start, sizes)


def getitem(p: PanelArray, key: Any) -> QArray | None:
    """`q[i]` of a stack."""
    if isinstance(key, bool) or isinstance(key, tuple | slice) or key is None or key is Ellipsis:
        return None
    return index(p, key) if jnp.ndim(key) == 0 else None


def gather(
    p: PanelArray,
    start_indices: Any,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any = None,
    fill_value: Any = None,
) -> QArray | None:
    """Rows of a table: only those are unpacked, then gathered from in their new order."""
    numbers = dimension_numbers
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    if tuple(slice_sizes) != tuple(1 if a == axis else n for a, n in enumerate(p.shape)):
        return None
    ids = jnp.asarray(start_indices).astype(jnp.int32)
    flat, top = ids.reshape(-1), p.shape[axis] - 1
    rows = take_columns(p, jnp.clip(flat, 0, top), axis) if flat.size else None
    if rows is None:
        return None
    order = jnp.arange(flat.size, dtype=jnp.int32)
    order = jnp.where(flat < 0, -1, jnp.where(flat > top, flat.size, order))
    if lax.GatherScatterMode.from_any(mode) != lax.GatherScatterMode.FILL_OR_DROP:
        order = jnp.arange(flat.size, dtype=jnp.int32)
    sizes = [1 if a == axis else n for a, n in enumerate(rows.shape)]
    return _lookups.gather(
        rows,
        order.reshape(ids.shape),
        dimension_numbers=numbers,
        slice_sizes=sizes,
        mode=mode,
        fill_value=fill_value,
    )


def take_rows(
    p: PanelArray, indices: Any, axis: int = 0, mode: str | None = None, fill_value: Any = None
) -> QArray | None:
    """As `jnp.take`, through the gather it is."""
    lookup = _lookups.row_lookup(p.shape, indices, axis, mode)
    return gather(p, **lookup, fill_value=fill_value)


def take_columns(p: PanelArray, ids: jax.Array, axis: int) -> QArray | None:
    """Entries `ids` (a vector, all in range) of a column axis: the rows of a tied table.

    They become columns of new panels, which then unpack like any other; the table itself does not.
    """
    view = p.panels
    single = view.axes == whole_axes(view.dims) and sorted(view.roles) == ["k", "n"]
    if p.lead or not single or view.roles[axis] != "n":
        return None
    panel, column = ids // COLUMNS, ids % COLUMNS

    def taken(part, behind):
        if part is None:
            return None
        picked = part[panel, ..., column, :] if behind else part[panel, ..., column]
        picked = jnp.moveaxis(picked, 0, -1 - behind)
        at = picked.ndim - 1 - behind
        widths = [(0, 0, 0)] * picked.ndim
        widths[at] = (0, -len(ids) % COLUMNS, 0)
        picked = jax.lax.pad(picked, jnp.ones((), picked.dtype), widths)
        shape = (*picked.shape[:at], -1, COLUMNS, *picked.shape[at + 1 :])
        return jnp.moveaxis(picked.reshape(shape), at, 0)

    data, scale, zero, tensor_scale = (p.entry(part) for part in p.packed_parts)
    dims = tuple(len(ids) if a == axis else d for a, d in enumerate(view.dims))
    scale_dims = tuple(min(n, len(ids)) if a == axis else n for a, n in enumerate(view.scale_dims))
    rows = dataclasses.replace(
        view, dims=dims, scale_dims=scale_dims, axes=whole_axes(dims), indexed=0
    )
    parts = taken(data, 1), taken(scale, 0), taken(zero, 0), tensor_scale
    return PanelArray(*parts, static=(*p._static[:4], rows)).plain()
