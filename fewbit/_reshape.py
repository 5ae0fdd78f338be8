"""Reshaping a QArray: which new shapes leave every scale a block of its own."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp  # noqa: F401 (for the example)

from fewbit._layout_moves import CannotMove, rebuild, settle
from fewbit._qarray_type import QArray


def reshape(q: QArray, new_shape: Sequence[int]) -> QArray:
    """Another shape in which each scale still covers a block of its axes.

    >>> q = QArray(jnp.zeros((4, 6), jnp.int8), jnp.ones((1, 2)))
    >>> reshape(q, (4, 2, 3)).scale.shape
    (1, 2, 1)
    """
    shape, new = q.shape, fill_in(q.shape, new_shape)
    q = settle(q, new[-1:] != shape[-1:])
    data_shape = new if q.layout == "plain" else (*new[:-1], q.data.shape[-1])
    plans: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def plan(part_shape, tiles):
        if part_shape not in plans:
            plans[part_shape] = _regroup(shape, part_shape, tiles, new)
        return plans[part_shape]

    tile_shape = [tile for _, tile in plan(q.scale.shape, q.tile_shape)]
    return rebuild(
        q,
        q.data.reshape(data_shape),
        tile_shape,
        lambda part, tiles: part.reshape([count for count, _ in plan(part.shape, tiles)]),
    )


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
    shape: tuple[int, ...],
    part_shape: tuple[int, ...],
    tiles: Sequence[int],
    new: tuple[int, ...],
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
