"""take on QArrays: rows of a quantized table, dequantized after the look-up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fewbit import moves
from fewbit.ops.scaling import as_float, operand
from fewbit.qarray import QArray, dequantize


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
