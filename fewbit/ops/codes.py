"""Products of codes with codes: which of them the native kernels run, and how they are scaled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from fewbit import kernels
from fewbit.ops.decision import Decision
from fewbit.ops.scaling import scale_in
from fewbit.ops.sides import Side
from fewbit.qarray import QArray


def runs_natively(lhs: QArray, rhs: QArray, numbers: Any, decision: Decision) -> bool:
    """Whether the kernels multiply these codes; abstract operands do."""
    if decision.arithmetic != "int8" or not kernels.runs_natively(lhs, rhs, numbers):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and AxisType.Explicit in mesh.axis_types:
        return False  # where the result lies is part of its type there, which XLA works out
    return not (_is_placed(lhs) or _is_placed(rhs))


def _is_placed(q: QArray) -> bool:
    codes = q.qvalue
    if isinstance(codes, jax.ShapeDtypeStruct):
        return False
    return any(entry is not None for entry in jax.typeof(codes).sharding.spec)


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
