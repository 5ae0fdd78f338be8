"""Picking from arrays: `take` of rows, `argmax` and `top_k`.

Rows of a quantized table are dequantized after the look-up. The largest of a long axis are searched
in two levels, which XLA on a CPU does faster than in one.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit.ops._operand import as_float, operand
from fewbit.qarray import QArray, dequantize, moves


def take(
    table: Any,
    indices: Any,
    axis: int | None = 0,
    mode: str | None = None,
    fill_value: Any = None,
) -> jax.Array:
    """`jnp.take` on an array or a QArray; only the rows that were asked for are dequantized.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> table = quantize(jnp.arange(6.0).reshape(3, 2), 'int8', channelwise_axes=(0,))
    >>> take(table, jnp.array([2, 0])).shape
    (2, 2)
    """
    table, indices = operand(table), jnp.asarray(indices)
    if isinstance(table, QArray) and axis is not None:
        try:
            rows = moves.take_rows(table, indices, axis=axis, mode=mode, fill_value=fill_value)
        except moves.CannotMove:
            pass  # The scales cannot follow the rows: look up in the dequantized table instead.
        else:
            return dequantize(rows)
    return jnp.take(as_float(table), indices, axis=axis, mode=mode, fill_value=fill_value)


# --- argmax over a long axis in two levels, which XLA on a CPU runs faster than one ---------------

LONG = 16384
"""Axes from this length are searched in two levels (bench/argmax.py)."""


def argmax(x: jax.Array, axis: int, index_dtype: Any = jnp.int32) -> jax.Array:
    """As `lax.argmax`: the first of equal maxima, and the first NaN if there is one.

    >>> argmax(jnp.zeros(20000).at[4321].set(1.0), 0)
    Array(4321, dtype=int32)
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or row_length(x.shape[axis]) is None:
        return lax.argmax(x, axis, index_dtype)
    return lax.platform_dependent(
        x,
        cpu=lambda x: _two_levels(x, axis, index_dtype),
        default=lambda x: lax.argmax(x, axis, index_dtype),
    )


def _two_levels(x: jax.Array, axis: int, index_dtype: Any) -> jax.Array:
    x = jnp.moveaxis(x, axis, -1)
    width = row_length(x.shape[-1])
    assert width is not None
    rows = x.reshape(*x.shape[:-1], -1, width)

    def by_rows() -> jax.Array:
        row = lax.argmax(jnp.max(rows, axis=-1), x.ndim - 1, jnp.int32)
        picked = jnp.take_along_axis(rows, row[..., None, None], axis=-2, mode="promise_in_bounds")
        column = lax.argmax(picked[..., 0, :], x.ndim - 1, jnp.int32)
        return (row * width + column).astype(index_dtype)

    return lax.cond(may_hold_nan(rows), lambda: lax.argmax(x, x.ndim - 1, index_dtype), by_rows)


def may_hold_nan(rows: jax.Array) -> jax.Array:
    """True if there is a NaN, and hardly ever else: infinities of both signs sum up to one too.

    XLA's vectorised maximum may lose a NaN, a sum never does. Asking `isnan` of every element
    would write them all.
    """
    return jnp.any(jnp.isnan(jnp.sum(rows, axis=-1)))


def row_length(length: Any) -> int | None:
    """The length of a row: a divisor near the square root. None: too short, or there is none.

    Filling the last row up would copy the array, which costs what is gained.
    """
    if not isinstance(length, int) or length < LONG:
        return None
    root = math.isqrt(length)
    near = (w for d in range(7 * root) for w in (root + d, root - d) if w > root // 8)
    return next((w for w in near if length % w == 0), None)


# --- The k largest along a long axis in two levels: only rows with a large maximum are looked in --


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """As `lax.top_k` along the last axis: values from the largest, equal ones by their place.

    >>> values, places = top_k(jnp.zeros(20000).at[jnp.array([7, 4321])].set(1.0), 3)
    >>> places.tolist()
    [7, 4321, 0]
    """
    width = row_length(x.shape[-1])
    if (
        width is None
        or not jnp.issubdtype(x.dtype, jnp.floating)
        # Looking into so many rows would be the search itself.
        or 4 * k > x.shape[-1] // width
    ):
        return lax.top_k(x, k)
    return lax.platform_dependent(
        x, cpu=lambda x: _top_in_two_levels(x, k, width), default=lambda x: tuple(lax.top_k(x, k))
    )


def _top_in_two_levels(x: jax.Array, k: int, width: int) -> tuple[jax.Array, jax.Array]:
    rows = x.reshape(*x.shape[:-1], -1, width)

    def by_rows() -> tuple[jax.Array, jax.Array]:
        # An element of another row has k rows before it, each with an element that comes before it.
        _, chosen = lax.top_k(jnp.max(rows, axis=-1), k)
        chosen = jnp.sort(chosen, axis=-1)  # so that equal values stay in the order of their places
        near = jnp.take_along_axis(rows, chosen[..., None], axis=-2, mode="promise_in_bounds")
        values, at = lax.top_k(near.reshape(*x.shape[:-1], k * width), k)
        row = jnp.take_along_axis(chosen, at // width, axis=-1, mode="promise_in_bounds")
        return values, row * width + at % width

    return lax.cond(may_hold_nan(rows), lambda: tuple(lax.top_k(x, k)), by_rows)
