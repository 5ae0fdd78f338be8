"""dot_general and dot on QArrays.

On codes, with scales and zero points that are constant along k and at most one zero point:

    sum_k (q_l - z_l) s_l (q_r - z_r) s_r = s_l s_r (sum_k q_l q_r - z_l sum_k q_r - z_r sum_k q_l)

A tiled k is split
into (tiles, tile), the tile count becomes a batch axis of the integer product, and the scaled
partial sums are added at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit._qarray_panels import PanelArray
from fewbit.kernels import SCALED, finish
from fewbit.ops.codes import native_product, native_sums, runs_natively, sums_of_codes
from fewbit.ops.decision import Decision, decide_dot, unwrap
from fewbit.ops.deferred import Deferred
from fewbit.ops.panels import describe as describe_panel_dot
from fewbit.ops.panels import find_panel_dot, run_panel_dot
from fewbit.ops.scaling import (
    as_float,
    as_floats,
    held,
    operand,
    placed_like,
    result_dtype,
    rounded,
    scale_dtype_for,
    scale_in,
)
from fewbit.ops.sides import Side, sharding_with_tiles
from fewbit.qarray import QArray


def _normalise(dimension_numbers: Any, ndims: Sequence[int]) -> Any:
    (lc, rc), (lb, rb) = dimension_numbers
    lc, lb = (tuple(int(a) % max(ndims[0], 1) for a in axes) for axes in (lc, lb))
    rc, rb = (tuple(int(a) % max(ndims[1], 1) for a in axes) for axes in (rc, rb))
    return (lc, rc), (lb, rb)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    bias: Any = None,
    activation: str | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` where each side may be an array or a QArray.

    The result has `preferred_element_type`, or the promotion of the logical dtypes. Two operands of
    8-bit codes are multiplied as codes and scaled afterwards; otherwise they are dequantized first.
    A weight in panels and, on a CPU, int8 codes with int8 codes go to the native kernels.
    `describe_dot` tells which.

    `bias` (of the shape of the result's last axes) is added, and `activation` ('relu', 'gelu', ...,
    see `kernels.ACTIVATIONS`) applied: by the kernel that makes the result, if one does.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> w = quantize(jnp.eye(4), 'int8', channelwise_axes=(1,))
    >>> dot_general(jnp.ones((2, 4)), w, (((1,), (0,)), ((), ()))).shape
    (2, 4)
    """
    lhs, rhs = held(lhs), held(rhs)
    dimension_numbers = _normalise(dimension_numbers, (lhs.ndim, rhs.ndim))
    native = find_panel_dot(lhs, rhs, dimension_numbers)
    if native is not None and out_sharding is None:
        dtype = result_dtype((lhs, rhs), preferred_element_type)
        if jnp.issubdtype(dtype, jnp.floating):
            x = rhs if native.side == 0 else lhs
            return run_panel_dot(native, x, dtype, bias=bias, activation=activation)
    out = _dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    return finish(out, bias, activation)


def _dot(
    lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any, preferred: Any, out_sharding: Any
) -> jax.Array:
    lhs, rhs = operand(lhs), operand(rhs)
    decision = decide_dot(lhs, rhs, dimension_numbers)
    if decision.on_codes:
        if any(decision.tiles):
            _check_shapes(lhs, rhs, dimension_numbers)
        dtype = result_dtype((lhs, rhs), preferred)
        return _dot_on_codes(lhs, rhs, dimension_numbers, decision, dtype, out_sharding)
    if decision.arithmetic == "dequantize":
        lhs, rhs = as_floats(lhs, rhs)
    return lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision=precision,
        preferred_element_type=preferred,
        out_sharding=out_sharding,
    )


def describe_dot(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    bias: Any = None,
    activation: str | None = None,
) -> str:
    """Which path `dot_general` takes for these operands; abstract values are enough.

    >>> import jax, jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> q = jax.eval_shape(lambda: quantize(jnp.ones((4, 4)), 'int8'))
    >>> describe_dot(q, q, (((1,), (0,)), ((), ())))
    'int8 dot'
    """
    lhs, rhs = unwrap(lhs), unwrap(rhs)
    numbers = _normalise(dimension_numbers, (len(lhs.shape), len(rhs.shape)))
    native = find_panel_dot(lhs, rhs, numbers)
    if native is not None:
        return describe_panel_dot(native, rhs if native.side == 0 else lhs, bias, activation)
    lhs, rhs = (
        jax.eval_shape(operand, q) if isinstance(q, PanelArray | Deferred) else q
        for q in (lhs, rhs)
    )
    decision = decide_dot(lhs, rhs, numbers)
    if decision.on_codes and runs_natively(lhs, rhs, numbers, decision):
        return "native int8"
    return decision.describe("dot")


def _check_shapes(lhs: QArray, rhs: QArray, dimension_numbers: Any) -> None:
    # Tile filling could hide lengths that differ, so they are compared before any splitting.
    def plain(q: QArray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(q.shape, jnp.float32)

    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), plain(lhs), plain(rhs))


def _dot_on_codes(
    lhs: QArray, rhs: QArray, numbers: Any, decision: Decision, dtype: Any, out_sharding: Any
) -> jax.Array:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers
    left = Side(lhs, lhs_batch, lhs_contracting, decision.tiles)
    right = Side(rhs, rhs_batch, rhs_contracting, decision.tiles)
    n_batch, n_tiled = len(lhs_batch), len(left.tiled)
    if out_sharding is not None and n_tiled:
        out_sharding = sharding_with_tiles(out_sharding, left, right, n_batch)
    wide = scale_dtype_for(dtype, lhs, rhs)
    native = out_sharding is None and runs_natively(lhs, rhs, numbers, decision)
    if native and wide == jnp.float32 and left.zero_point is None and right.zero_point is None:
        straight = not n_tiled and jnp.dtype(dtype).name in SCALED
        total = native_product(left, right, dtype if straight else wide)
        return _added_up(total, n_batch, n_tiled).astype(dtype)
    if native:
        total = native_sums(left, right)
    else:
        total = sums_of_codes(left, right, out_sharding, decision)
    gap_left, gap_right = len(right.free), len(left.free)
    if left.zero_point is not None:
        zero = left.in_output(left.zero_point.astype(jnp.int32), gap_left, True)
        total = total - placed_like(zero, total) * placed_like(
            right.summed(gap_right, False), total
        )
    if right.zero_point is not None:
        zero = right.in_output(right.zero_point.astype(jnp.int32), gap_right, False)
        total = total - placed_like(zero, total) * placed_like(left.summed(gap_left, True), total)
    total = total.astype(wide)
    total = total * placed_like(left.in_output(scale_in(lhs, wide), gap_left, True), total)
    total = total * placed_like(right.in_output(scale_in(rhs, wide), gap_right, False), total)
    return _added_up(rounded(total), n_batch, n_tiled).astype(dtype)


def _added_up(total: jax.Array, first: int, count: int) -> jax.Array:
    """The sum over the tiles."""
    return jnp.sum(total, axis=tuple(range(first, first + count))) if count else total


def dot(
    a: Any,
    b: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.dot` where each side may be an array or a QArray.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> dot(quantize(jnp.ones(8), 'int8'), jnp.ones(8)).round(2)
    Array(7.97, dtype=float32)
    """
    a, b = held(a), held(b)
    if a.ndim == 0 or b.ndim == 0 or not (isinstance(a, QArray) or isinstance(b, QArray)):
        if isinstance(a, QArray) or isinstance(b, QArray):
            a, b = as_floats(a, b)
        return jnp.dot(
            as_float(a),
            as_float(b),
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    numbers = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return dot_general(a, b, numbers, precision, preferred_element_type, out_sharding=out_sharding)
