"""Products of codes with codes: which of them the native kernels run, and how they are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from fewbit import kernels
from fewbit.ops._arithmetic import Decision
from fewbit.ops._operand import (
    codes_for_product,
    is_placed,
    lay_out,
    make_spec,
    scale_in,
    spec_of,
    split_axis,
    widen,
)
from fewbit.qarray import QArray


class Side:
    """Codes with contracting axes split, and where every axis went.

    The output's layout is (batch, tiles, lhs free, rhs free). `apart` names axes that are none of
    these (the group axis of a ragged product); they lead.
    """

    def __init__(
        self,
        q: QArray,
        batch: Sequence[int],
        contracting: Sequence[int],
        tiles: Sequence[int | None],
        apart: Sequence[int] = (),
    ):
        tile_of = {a: t for a, t in zip(contracting, tiles, strict=True) if t is not None}
        self.q, self.batch, self.apart = q, list(batch), list(apart)
        self.tiled = [axis for axis in contracting if axis in tile_of]
        taken = {*batch, *contracting, *apart}
        self.free = [axis for axis in range(q.ndim) if axis not in taken]
        self.codes, self.zero_point = codes_for_product(q)
        self.place: dict[int, int] = {}
        for axis in range(q.ndim):
            self.place[axis] = axis + sum(other < axis for other in tile_of)
            if axis in tile_of:
                self.codes = split_axis(self.codes, self.place[axis], tile_of[axis])
        # A split axis leaves its tile count at its own place and the tile itself right after it.
        self.contracting = [self.place[axis] + (axis in tile_of) for axis in contracting]
        self.outer = [self.place[axis] for axis in (*self.batch, *self.tiled)]

    def in_output(self, part: jax.Array, other_free: int, leads: bool) -> jax.Array:
        """A scale or zero point in the output's layout."""
        part = widen(part, self.q, [*self.apart, *self.batch, *self.free])
        order = [*self.apart, *self.batch, *self.tiled, *self.free]
        return lay_out(part, order, self._gap(other_free, leads))

    def in_lines(self, part: jax.Array) -> jax.Array:
        """A scale of full size along (batch, tiles, this side's free axes)."""
        free = [self.place[axis] for axis in self.free]
        shape = [self.codes.shape[axis] for axis in (*self.outer, *free)]
        return jnp.broadcast_to(self.in_output(part, 0, True), shape)

    def summed(self, other_free: int, leads: bool) -> jax.Array:
        """Codes added up along each contraction (per tile), in the output's layout."""
        total = jnp.sum(self.codes, axis=tuple(self.contracting), dtype=jnp.int32, keepdims=True)
        free = [self.place[axis] for axis in self.free]
        return lay_out(total, [*self.outer, *free], self._gap(other_free, leads))

    def _gap(self, other_free: int, leads: bool) -> list[int]:
        start = len(self.apart) + len(self.outer) + (len(self.free) if leads else 0)
        return list(range(start, start + other_free))


def sharding_with_tiles(out_sharding: Any, left: Side, right: Side, n_batch: int) -> Any:
    """The asked placement with entries for the tile axes, which keep the operand's own."""
    mesh, entries = spec_of(out_sharding, n_batch + len(left.free) + len(right.free))
    own = jax.typeof(left.codes).sharding.spec
    tile_entries = [own[axis] for axis in left.outer[n_batch:]]
    return make_spec(mesh, [*entries[:n_batch], *tile_entries, *entries[n_batch:]])


# --- Products of codes with codes: which of them the native kernels run, and how they are scaled --


def runs_natively(lhs: QArray, rhs: QArray, numbers: Any, decision: Decision) -> bool:
    """Whether the kernels multiply these codes; abstract operands do."""
    if decision.arithmetic != "int8" or not kernels.runs_natively(lhs, rhs, numbers):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and AxisType.Explicit in mesh.axis_types:
        return False  # where the result lies is part of its type there, which XLA works out
    return not (is_placed(lhs) or is_placed(rhs))


def sums_of_codes(left: Side, right: Side, out_sharding: Any, decision: Decision) -> jax.Array:
    """The product of the codes alone: (batch, tiles, lhs free, rhs free), through XLA."""
    return lax.dot_general(
        left.codes,
        right.codes,
        _numbers(left, right),
        # `precision` is not passed on: products of codes are exact at every setting.
        preferred_element_type=jnp.int32 if decision.arithmetic == "int8" else jnp.float32,
        out_sharding=out_sharding,
    )


def native_sums(left: Side, right: Side) -> jax.Array:
    """The same by the kernels."""
    return kernels.codes_dot(left.codes, right.codes, _numbers(left, right))


def native_product(left: Side, right: Side, dtype: Any) -> jax.Array:
    """The same, times both scales, in float32 or bfloat16; for operands without zero points."""
    return kernels.codes_dot(
        left.codes,
        right.codes,
        _numbers(left, right),
        left.in_lines(scale_in(left.q, jnp.float32)),
        right.in_lines(scale_in(right.q, jnp.float32)),
        dtype,
    )


def _numbers(left: Side, right: Side) -> Any:
    return (left.contracting, right.contracting), (left.outer, right.outer)
