"""The k largest along a long axis in two levels: only rows with a large maximum are looked into.

XLA on a CPU sorts its way through the whole axis, one array of the batch after the other. The
maximum of each row is one vectorised pass, and only k rows are looked into.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fewbit.ops.argmax import may_hold_nan, row_length


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
        x, cpu=lambda x: _two_levels(x, k, width), default=lambda x: tuple(lax.top_k(x, k))
    )


def _two_levels(x: jax.Array, k: int, width: int) -> tuple[jax.Array, jax.Array]:
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
