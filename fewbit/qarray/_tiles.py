"""Tiles: blocks of an axis that share one scale.

A scale has the rank of its array. On each axis it holds one number per tile, where the tile is the
whole axis (1 number), one element (as many numbers as elements), or a block in between. The last
tile of an axis may be shorter than the others. All code that pairs numbers with their scales goes
through two functions: `map_tiles` (elementwise) and `reduce_tiles` (one number per tile).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def scale_dims(shape: Sequence[int], tile_shape: Sequence[int]) -> tuple[int, ...]:
    """The scale's shape for an array cut into tiles, an uneven last tile counting as one.

    >>> scale_dims((100, 64), (32, 64))
    (4, 1)
    """
    return tuple(_count(d, t) for d, t in zip(shape, tile_shape, strict=True))


def infer_tile_shape(
    shape: Sequence[int], scale_shape: Sequence[int], tiles: Sequence[tuple[int, int]] = ()
) -> tuple[int, ...]:
    """Tile per axis from the two shapes; `tiles` holds (negative axis, tile) of uneven axes.

    >>> infer_tile_shape((100, 64), (4, 2), ((-2, 32),))
    (32, 32)
    """
    known = {axis + len(shape): tile for axis, tile in tiles}
    result = []
    for axis, (dim, count) in enumerate(zip(shape, scale_shape, strict=True)):
        tile = known.get(axis)
        if count == 1:
            result.append(dim)
        elif count == dim:  # also an empty axis with a scale per index, and a symbolic one
            result.append(1)
        elif tile is not None and -(-dim // tile) == count:
            result.append(tile)
        else:
            result.append(dim // count)
    return tuple(result)


def uneven_tiles(
    shape: Sequence[int], scale_shape: Sequence[int], tile_shape: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The (negative axis, tile) pairs that `infer_tile_shape` cannot work out by itself.

    >>> uneven_tiles((100, 64), (4, 2), (32, 32))
    ((-2, 32),)
    """
    rank = len(shape)
    return tuple(
        (axis - rank, tile)
        for axis, (dim, count, tile) in enumerate(zip(shape, scale_shape, tile_shape, strict=True))
        if tile != 1 and tile != dim and count * tile != dim
    )


def map_tiles(
    fn: Callable[..., jax.Array],
    array: jax.Array,
    *parts: jax.Array | None,
    tile_shape: Sequence[int],
) -> jax.Array:
    """Apply the elementwise `fn(array, *parts)`, each part spread over its tiles.

    Parts are views with ones where they are shared, never copies of the array's size. None stays
    None.

    >>> x = jnp.arange(5.0)
    >>> map_tiles(lambda x, s: x * s, x, jnp.array([1.0, 10.0, 100.0]), tile_shape=(2,))
    Array([  0.,   1.,  20.,  30., 400.], dtype=float32)
    """
    axis = _first_uneven(array.shape, tile_shape)
    if axis is not None:
        given, array = array, _whole_along(axis, array)
        parts = tuple(part if part is None else _whole_along(axis, part) for part in parts)
        even = array.shape[axis] // tile_shape[axis]
        body_parts = [_cut(part, axis, 0, even) for part in parts]
        tail_parts = [_cut(part, axis, even, even + 1) for part in parts]
        body, tail, tail_tiles = _even_and_rest(array, axis, tile_shape)
        mapped = [
            map_tiles(fn, body, *body_parts, tile_shape=tile_shape),
            map_tiles(fn, tail, *tail_parts, tile_shape=tail_tiles),
        ]
        joined = jnp.concatenate(mapped, axis=axis)
        return (
            joined if array is given else jax.sharding.reshard(joined, jax.typeof(given).sharding)
        )
    view = split_shape(array.shape, tile_shape)
    views = [None if part is None else _part_view(part, array.shape, tile_shape) for part in parts]
    return _joined(fn(_split(array, view), *views), array.shape)


def reduce_tiles(
    fn: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    array: jax.Array,
    tile_shape: Sequence[int],
) -> jax.Array:
    """One number per tile: `fn(view, axes)` reduces the given axes, keeping them as ones.

    >>> reduce_tiles(lambda x, axes: x.max(axes, keepdims=True), jnp.arange(5.0), (2,))
    Array([1., 3., 4.], dtype=float32)
    """
    axis = _first_uneven(array.shape, tile_shape)
    if axis is not None:
        body, tail, tail_tiles = _even_and_rest(_whole_along(axis, array), axis, tile_shape)
        return jnp.concatenate(
            [reduce_tiles(fn, body, tile_shape), reduce_tiles(fn, tail, tail_tiles)], axis=axis
        )
    view = split_shape(array.shape, tile_shape)
    # Axes are split into (tiles, tile) pairs, so the tiles are the odd ones.
    reduced = fn(_split(array, view), tuple(range(1, len(view), 2)))
    return _joined(reduced, scale_dims(array.shape, tile_shape))


def split_shape(shape: Sequence[int], tile_shape: Sequence[int]) -> tuple[int, ...]:
    """Every axis as a (tiles, tile) pair; tiles must be even.

    >>> split_shape((64, 10), (32, 10))
    (2, 32, 1, 10)
    """
    view: list[int] = []
    for dim, tile in zip(shape, tile_shape, strict=True):
        view += [_count(dim, tile), tile]
    return tuple(view)


def expand(part: jax.Array, shape: Sequence[int], tile_shape: Sequence[int]) -> jax.Array:
    """The part repeated to the array's full shape; prefer `map_tiles`, which copies nothing.

    >>> expand(jnp.array([1.0, 2.0]), (3,), (2,))
    Array([1., 1., 2.], dtype=float32)
    """
    for axis, (dim, tile) in enumerate(zip(shape, tile_shape, strict=True)):
        if part.shape[axis] != dim:
            repeats = dim if part.shape[axis] == 1 else tile
            part = jnp.repeat(part, repeats, axis=axis)
            part = jax.lax.slice_in_dim(part, 0, dim, axis=axis)
    return part


def _part_view(part: jax.Array, shape: Sequence[int], tile_shape: Sequence[int]) -> jax.Array:
    view: list[int] = []
    for axis, (dim, tile) in enumerate(zip(shape, tile_shape, strict=True)):
        count, tiles = part.shape[axis], _count(dim, tile)
        if count == 1:
            view += [1, 1]
        elif count == tiles:
            view += [tiles, 1]
        elif count == dim:
            view += [tiles, tile]
        else:  # tiled more finely or coarsely than the view: rare, so spend the memory
            part = jnp.repeat(part, math.ceil(dim / count), axis=axis)
            view += [tiles, tile]
    return _split(part, view)


# On an explicit mesh a reshape must be told where the parts of a split axis go: to its tiles if
# they share out evenly, else into the tile.
def _split(array: jax.Array, view: Sequence[int]) -> jax.Array:
    sharding = jax.typeof(array).sharding
    if not _is_placed(sharding):
        return array.reshape(view)
    entries: list[Any] = []
    for axis, entry in enumerate(sharding.spec):
        tiles, tile = view[2 * axis : 2 * axis + 2]
        if tiles % shards_of(sharding.mesh, entry) == 0:
            entries += [entry, None]
        elif tile % shards_of(sharding.mesh, entry) == 0 and tiles == 1:
            entries += [None, entry]
        else:  # a tile would be cut open
            return _split(_whole_along(axis, array), view)
    return array.reshape(view, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*entries)))


def _whole_along(axis: int, array: jax.Array) -> jax.Array:
    """On an explicit mesh, the array with one axis on every device that has a part of it."""
    sharding = jax.typeof(array).sharding
    if not _is_placed(sharding) or sharding.spec[axis] is None:
        return array
    kept = [e if a != axis else None for a, e in enumerate(sharding.spec)]
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*kept)))


def _joined(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    sharding = jax.typeof(array).sharding
    if not _is_placed(sharding):
        return array.reshape(shape)
    pairs = zip(sharding.spec[::2], sharding.spec[1::2], strict=True)
    entries = [tile if count is None else count for count, tile in pairs]
    return array.reshape(shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*entries)))


def _is_placed(sharding: Any) -> bool:
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return explicit and any(entry is not None for entry in sharding.spec)


def shards_of(mesh: Any, entry: Any) -> int:
    """Into how many parts an axis is split on a mesh, by its entry of a PartitionSpec."""
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh.shape[name] for name in names)


def _first_uneven(shape: Sequence[int], tile_shape: Sequence[int]) -> int | None:
    pairs = enumerate(zip(shape, tile_shape, strict=True))
    return next((axis for axis, (d, t) in pairs if t != 1 and t != d and d % t), None)


def _count(dim: int, tile: int) -> int:
    """Tiles on an axis. Symbolic sizes (`jax.export`) are compared only where that is decided."""
    if tile == dim:
        return 1
    return dim if tile == 1 else -(-dim // tile)


def _cut(part: jax.Array | None, axis: int, start: int, limit: int) -> jax.Array | None:
    if part is None or part.shape[axis] == 1:
        return part
    return jax.lax.slice_in_dim(part, start, limit, axis=axis)


def _even_and_rest(
    array: jax.Array, axis: int, tile_shape: Sequence[int]
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """The whole tiles of an axis, the shorter last one, and the tile shape of that."""
    size = array.shape[axis]
    cut = size // tile_shape[axis] * tile_shape[axis]
    body = jax.lax.slice_in_dim(array, 0, cut, axis=axis)
    tail = jax.lax.slice_in_dim(array, cut, size, axis=axis)
    return body, tail, (*tile_shape[:axis], size - cut, *tile_shape[axis + 1 :])
