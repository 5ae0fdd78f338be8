"""How to quantize an array: type, granularity, calibration. A value, hashable and comparable."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._methods import check_method, parse_method
from fewbit.numerics import NoiseFn, QType, canonical_qtype, format_of
from fewbit.tiling import scale_dims

Tile = int | float


class TiledAxes(Mapping[int, Tile]):
    """An immutable mapping from axis to tile.

    A tile of 1 (each element has a scale) and of 1.0 (one scale for the axis) are different, though
    Python finds 1 == 1.0; so types take part in comparison and hash, or `jit` would mix them up.
    """

    __slots__ = ("_items", "_key")

    def __init__(self, items: Mapping[int, Tile] = {}):
        self._items = {operator.index(a): _tile(a, items[a]) for a in sorted(items)}
        self._key = tuple((a, type(t).__name__, t) for a, t in self._items.items())

    def __getitem__(self, axis: int) -> Tile:
        return self._items[axis]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        try:
            return self._key == TiledAxes(other)._key
        except (TypeError, ValueError):
            return False

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._items)


def _tile(axis: Any, tile: Any) -> Tile:
    if isinstance(tile, (float, np.floating)):
        return float(tile)
    try:
        return operator.index(tile)
    except TypeError:
        raise ValueError(
            f"Axis {axis} cannot have the tile {tile!r}: give the tile's length (an int), or its "
            "share of the axis (a float such as 1/8)."
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowToQuantize:
    """Type, granularity and calibration of one array.

    Axes in `channelwise_axes` have a scale per index; `tiled_axes` maps an axis to its tile (an
    int, or a float for `round(dim * tile)`); all other axes share their scale. The scale is stored
    in `scale_dtype`, by default in the array's, and that of a float16 array in float32.

    >>> how = HowToQuantize(qtype='int4', channelwise_axes=[1], tiled_axes={0: 32})
    >>> how.tiled_axes[0], get_scale_shape((64, 8), how)
    (32, (2, 8))
    """

    qtype: QType
    channelwise_axes: Collection[int] = ()
    tiled_axes: Mapping[int, Tile] = TiledAxes()
    calibration_method: str = "absmax"
    noise_fn: NoiseFn | None = dataclasses.field(default=None, hash=False)
    scale_dtype: Any = None
    rule: Any = dataclasses.field(default=None, repr=False)  # the rule it came from, if any
    # What its product does with each axis, if kernels run it (`_qarray_panels.to_panels`).
    roles: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        fix("qtype", canonical_qtype(self.qtype))
        fix("channelwise_axes", tuple(sorted({operator.index(a) for a in self.channelwise_axes})))
        tiled = self.tiled_axes
        fix("tiled_axes", tiled if isinstance(tiled, TiledAxes) else TiledAxes(tiled or {}))
        if self.scale_dtype is not None:
            fix("scale_dtype", jnp.dtype(self.scale_dtype))
        check_method(self.calibration_method, self.qtype)
        _refuse_overlap(self.channelwise_axes, self.tiled_axes)

    def replace(self, **changes: Any) -> HowToQuantize:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def get_tile_shape(shape: Sequence[int], how: HowToQuantize) -> tuple[int, ...]:
    """The tile of each axis: 1 if channelwise, the whole axis if shared.

    >>> get_tile_shape((100, 8), HowToQuantize(qtype='int8', tiled_axes={0: 32}))
    (32, 8)
    """
    rank = len(shape)
    channelwise = {_axis(a, shape) for a in how.channelwise_axes}
    tiled = {_axis(a, shape): tile for a, tile in how.tiled_axes.items()}
    _refuse_overlap(channelwise, tiled)
    row = format_of(how.qtype)
    if row.tile is not None and not tiled:
        raise ValueError(
            f"Format {row.name} requires `tiled_axes` to be specified. Pass "
            f"tiled_axes={{axis: {row.tile}}} with the axis that products sum over."
        )
    if parse_method(how.calibration_method).per_tensor:
        return tuple(shape)
    result = [1 if axis in channelwise else shape[axis] for axis in range(rank)]
    for axis, given in tiled.items():
        dim = shape[axis]
        tile = round(dim * given) if isinstance(given, float) else given
        if row.tile is not None and tile != row.tile:
            raise ValueError(
                f"Format {row.name} requires a tile size of {row.tile}, but axis {axis} got {tile}."
                f" Pass tiled_axes={{{axis}: {row.tile}}}."
            )
        if row.tile is not None and 0 < dim < tile:
            tile = dim  # one block that is not full
        if not 0 < tile <= dim:
            raise ValueError(
                f"{tuple(shape)} cannot be tiled as {dict(how.tiled_axes)}. Axis {axis} has {dim} "
                f"elements, so its tile must be an int from 1 to {dim} or a float share of it, "
                f"such as {{{axis}: {_suggest(dim)}}}; {given!r} gives {tile}."
            )
        result[axis] = tile
    return tuple(result)


def with_tiles_within(how: HowToQuantize, shape: Sequence[int]) -> HowToQuantize:
    """The same, with tiles that are longer than their axis as long as it.

    >>> how = HowToQuantize(qtype='int8', tiled_axes={1: 32})
    >>> with_tiles_within(how, (4, 8)).tiled_axes, with_tiles_within(how, (4, 64)).tiled_axes
    ({1: 8}, {1: 32})
    """
    if format_of(how.qtype).tile is not None:  # a block has its length, full or not
        return how
    tiles = {
        axis: max(shape[axis], 1) if isinstance(tile, int) and tile > shape[axis] else tile
        for axis, tile in how.tiled_axes.items()
    }
    return how if tiles == how.tiled_axes else how.replace(tiled_axes=tiles)


def get_scale_shape(shape: Sequence[int], how: HowToQuantize) -> tuple[int, ...]:
    """The shape of the scale of an array quantized this way; an uneven last tile counts.

    >>> get_scale_shape((100, 8), HowToQuantize(qtype='int8', tiled_axes={0: 32}))
    (4, 1)
    """
    return scale_dims(shape, get_tile_shape(shape, how))


def slice_how(shape: Sequence[int], tiles: Sequence[int], how: HowToQuantize) -> HowToQuantize:
    """`how` for a slice of this shape: the same tiles, said in its own axes and sizes.

    >>> how = HowToQuantize(qtype='int4', channelwise_axes=(1,), tiled_axes={0: 1/4})
    >>> slice_how((64, 128), (32, 1), how).tiled_axes
    {0: 32}
    """
    fixed = format_of(how.qtype).tile is not None
    pairs = list(enumerate(zip(shape, tiles, strict=True)))
    return HowToQuantize(
        qtype=how.qtype,
        channelwise_axes=tuple(a for a, (_, tile) in pairs if tile == 1),
        tiled_axes={a: t for a, (n, t) in pairs if t > 1 and (t < n or (fixed and t == n))},
        calibration_method=how.calibration_method,
        scale_dtype=how.scale_dtype,
    )


def _suggest(dim: int) -> int:
    return next((t for t in (128, 64, 32, 16) if dim % t == 0), dim)


def _axis(axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"Axis {axis} is out of range for an array of shape {tuple(shape)}: its axes are 0 to "
            f"{len(shape) - 1}."
        )
    return axis % len(shape)


def _refuse_overlap(channelwise: Collection[int], tiled: Collection[int]) -> None:
    both = set(channelwise) & set(tiled)
    if both:
        raise ValueError(
            f"The same axis cannot be both channelwise and tiled. Axis {min(both)} is in "
            "channelwise_axes and in tiled_axes; keep one (channelwise is a tile of 1)."
        )
