"""Floats to int8 codes, and rows to their largest magnitude: native on one CPU device, else XLA.

For the codes XLA needs several passes over memory, some of them on one thread and value by value,
and in a quantized training step there are six such operands for three products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from fewbit.kernels._library import native_available
from fewbit.kernels._partition import lower_alone, run_eagerly
from fewbit.qarray import HowToQuantize, QArray, quantize_with

# Fewer values are quantized before a call has begun.
_FEWEST_VALUES = 2**12


def quantize_natively(
    x: jax.Array, how: HowToQuantize, factor: jax.Array | None = None
) -> QArray | None:
    """`quantize_with(x, how)` by one native call, or None where there is none for it.

    With a factor, which has x's axes and may be 1 long along some of them, it is x times the factor
    that is quantized, and no array of the products is made.

    The codes and scales are the same; where a range is not finite its scale is NaN.

    >>> quantize_natively(jnp.ones((2, 2)), HowToQuantize(qtype='int8')) is None  # not worth it
    True
    """
    axes = _axes(x, how)
    if axes is None or jax.default_backend() != "cpu" or not native_available():
        return None
    factors = () if factor is None else (factor,)
    if factor is not None and not _fits(factor, x, axes):
        x, factors = x * factor, ()
    codes, scale = quantize_int8_p.bind(x, *factors, axes=axes)
    return QArray(codes, scale, None, how.qtype).with_dtype(x.dtype)


def _fits(factor: jax.Array, x: jax.Array, axes: tuple[int, int]) -> bool:
    """Whether every value along the shared axes has its factor, and those after them have none."""
    first, last = axes
    return (
        factor.dtype == x.dtype
        and factor.shape[first:last] == x.shape[first:last]
        and all(size == 1 for size in factor.shape[last:])
    )


def _axes(x: jax.Array, how: HowToQuantize) -> tuple[int, int] | None:
    """The first and the last (exclusive) of the axes that share a scale, if they are neighbours."""
    if not all(isinstance(size, int) for size in x.shape) or x.size < _FEWEST_VALUES:
        return None
    if x.dtype != jnp.float32 or str(how.qtype) != "int8" or how.calibration_method != "absmax":
        return None
    if how.noise_fn is not None or how.scale_dtype is not None or how.tiled_axes:
        return None
    own = {axis % x.ndim for axis in how.channelwise_axes}
    shared = [axis for axis in range(x.ndim) if axis not in own]
    if not shared or shared[-1] - shared[0] != len(shared) - 1:
        return None
    first, last = shared[0], shared[-1] + 1
    # A scale that nothing shares is divided by, not multiplied with its reciprocal.
    if np.prod(x.shape[first:last]) < 2:
        return None
    if any(entry is not None for entry in jax.typeof(x).sharding.spec):
        return None  # an explicit mesh, on which XLA works out where results lie
    return first, last


quantize_int8_p = Primitive("fewbit_quantize_int8")
quantize_int8_p.multiple_results = True
run_eagerly(quantize_int8_p, quantize_int8_p.bind)


@quantize_int8_p.def_abstract_eval
def _shapes(x: Any, *factor: Any, axes: tuple[int, int]) -> Any:
    first, last = axes
    scale = (*x.shape[:first], *[1] * (last - first), *x.shape[last:])
    return x.update(dtype=jnp.dtype(jnp.int8)), x.update(shape=scale)


def _reference(x: jax.Array, *factor: jax.Array, axes: tuple[int, int]) -> list[jax.Array]:
    own = [axis for axis in range(x.ndim) if not axes[0] <= axis < axes[1]]
    x = x * factor[0] if factor else x
    q = quantize_with(x, HowToQuantize(qtype="int8", channelwise_axes=own))
    return [q.qvalue, q.scale]


def _call(x: jax.Array, *factor: jax.Array, axes: tuple[int, int]) -> list[jax.Array]:
    first, last = axes
    scale = (*x.shape[:first], *[1] * (last - first), *x.shape[last:])
    results = jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct(scale, jnp.float32)
    numbers = dict(first=np.int64(first), last=np.int64(last))
    if not factor:
        return list(jax.ffi.ffi_call("fewbit_quantize_int8", results)(x, **numbers))
    (values,) = factor
    if any(size != 1 for size in values.shape[:first]):  # the same factors for all, or own ones
        values = jnp.broadcast_to(values, (*x.shape[:last], *values.shape[last:]))
    call = jax.ffi.ffi_call("fewbit_quantize_shifted_int8", results)
    return list(call(x, values, **numbers))


lower_alone(quantize_int8_p, _call, _reference)


def _jvp(primals: Any, tangents: Any, *, axes: tuple[int, int]) -> Any:
    if all(isinstance(t, ad.Zero) for t in tangents):
        out = quantize_int8_p.bind(*primals, axes=axes)
        return out, [ad.Zero(jax.typeof(one).to_tangent_aval()) for one in out]
    whole = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_reference, axes=axes), tuple(primals), whole)


ad.primitive_jvps[quantize_int8_p] = _jvp


def _batch(args: Any, dims: Any, *, axes: tuple[int, int]) -> Any:
    first, last = axes
    if len(args) == 1 and not first < dims[0] < last:
        step = int(dims[0] <= first)
        return quantize_int8_p.bind(*args, axes=(first + step, last + step)), [dims[0]] * 2
    x, *factor = (
        jnp.expand_dims(a, 0) if dim is None else jnp.moveaxis(a, dim, 0)
        for a, dim in zip(args, dims, strict=True)
    )
    if factor and dims[0] is None:
        x = jnp.broadcast_to(x, (factor[0].shape[0], *x.shape[1:]))
    return quantize_int8_p.bind(x, *factor, axes=(first + 1, last + 1)), [0, 0]


batching.primitive_batchers[quantize_int8_p] = _batch


# --- Row-wise absolute maximum: the smallest kernel, called without a primitive -------------------

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
    if jnp.ndim(x) == 0:
        raise ValueError(_MSG_SCALAR)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(_MSG_TYPE.format(dtype=x.dtype, shape=list(x.shape)))
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
    return jax.ffi.ffi_call("fewbit_absmax_rows", result, vmap_method="broadcast_all")(x)
