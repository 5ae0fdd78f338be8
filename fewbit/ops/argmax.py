"""argmax over a long axis in two levels, which XLA on a CPU runs faster than one.

The picked token of a decoder is an argmax over its vocabulary; XLA reduces pairs of value and index
there, which does not vectorise. The maximum of each row does, and only one row is searched.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
