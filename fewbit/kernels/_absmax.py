"""Row-wise absolute maximum: the smallest kernel, and how one is called without a primitive.

A kernel is three things: a reference in plain JAX, a native form with the same shape contract, and
one function that lets the *lowering* choose, so that a traced program can still go anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fewbit.kernels._native import native_available

_MSG_SCALAR = (
    "absmax_rows reduces the last axis, but x is a scalar. Give it an axis: x.reshape(1), "
    "or use jnp.abs(x)."
)
_MSG_TYPE = (
    "absmax_rows is for floating-point arrays, but x is {dtype}{shape}. Convert it first: "
    "x.astype(jnp.float32)."
)


@jax.custom_jvp
def absmax_rows(x: jax.Array) -> jax.Array:
    """The largest magnitude along the last axis, in x's own type. NaN stays NaN.

    Float32 on a CPU runs natively where the compiled part is there, everything else through XLA;
    the results are equal. (Subnormal numbers excepted: the native form keeps what XLA may flush.)

    Args:
      x: floating-point array of one or more axes.

    Returns:
      Array of shape `x.shape[:-1]`; zeros if the last axis is empty.

    >>> import jax.numpy as jnp
    >>> absmax_rows(jnp.array([[1.0, -3.0], [0.5, 0.25]])).tolist()
    [3.0, 0.5]
    """
    _check(x)
    if x.dtype != jnp.float32 or not native_available():
        return _absmax_rows_xla(x)
    return jax.lax.platform_dependent(x, cpu=_absmax_rows_native, default=_absmax_rows_xla)


@absmax_rows.defjvp
def _absmax_rows_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # A native call has no derivative of its own; the reference's is the definition.
    _, tangent = jax.jvp(_absmax_rows_xla, primals, tangents)
    return absmax_rows(*primals), tangent


def _absmax_rows_xla(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=-1, initial=0)


def _absmax_rows_native(x: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)
    # The handler takes any number of leading axes, so a batch is one more of them.
    call = jax.ffi.ffi_call("fewbit_absmax_rows", result, vmap_method="broadcast_all")
    return call(x)


def _check(x: jax.Array) -> None:
    if jnp.ndim(x) == 0:
        raise ValueError(_MSG_SCALAR)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(_MSG_TYPE.format(dtype=x.dtype, shape=list(x.shape)))
