"""The native product as one FFI call; layouts, `vmap` and the choice of a backend are elsewhere."""

from __future__ import annotations

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import format_of

FORMATS = (
    *(f"int{bits}" for bits in range(1, 9)),
    "uint4",
    "uint8",
    "nf4",
    "float4_e2m1fn",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""What the kernels read (fewbit/native/formats.cc); mx and nvfp4 are one of the float types."""

_ACT = {"none": 0, "dynamic": 1, "static": 2}
_MSG_FORMAT = "The kernels cannot read {name!r}. They read {known}, and the mx and nvfp4 types."
_MSG_ACT = (
    "act={act!r} is not known{hint}. Use 'none' (x as it is), 'dynamic' (int8 rows) or 'static' "
    "(int8 rows with act_scale)."
)


def kernel_format(qtype: str) -> str:
    """The kernels' name of a format.

    >>> kernel_format('mxfp8')
    'float8_e4m3fn'
    """
    row = format_of(qtype)
    name = row.name if row.tile is None else row.storage.name
    if name not in FORMATS:
        raise ValueError(_MSG_FORMAT.format(name=row.name, known=", ".join(FORMATS)))
    return name


def matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    zero: jax.Array,
    tensor_scale: jax.Array,
    layer: jax.Array,
    act_scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    qtype: str,
    k: int,
    n: int,
    group: int,
    act: str = "none",
    act_tile: int = 0,
    transposed: bool = False,
    out_dtype: Any,
    activation: str | None = None,
) -> jax.Array:
    """x [M, k] times entry `layer` of the packed weight, [M, n]; or x [M, n] times its transpose.

    Runs on a CPU with the compiled part only (`kernels.native_available()`). Shapes and types that
    do not fit are errors of the call, raised when it runs.

    Args:
      x: float32 or bfloat16, or int8 codes.
      data: uint8[*lead, n/64, k/32, bits, 64, 4], sizes rounded up.
      scale: [*lead, n/64, groups, 64] in float32, float16, bfloat16, float8_e8m0fnu or
        float8_e4m3fn.
      zero: uint8 of the same shape, in units of the unsigned codes; uint8[0] if there is none.
      tensor_scale: float32 scalar, a factor of the whole result.
      layer: int32 scalar, which entry of the (flattened) lead axes; or int32 for each of them:
        how many rows of x, one after the other, are multiplied with it.
      act_scale: [M or 1, 1 or groups] for int8 codes or `act='static'`; else [0].
      bias: float32 or bfloat16 [n/64, 64], added to the scaled columns.
      qtype: name of the weight's format.
      k: length of the contraction.
      n: number of columns.
      group: k that share a weight scale: 16 or a multiple of 32; 0 for all.
      act: 'dynamic' quantizes the rows of a float x to int8 first, as `fewbit.quantize` does;
        'static' with the given act_scale, which has x's type.
      act_tile: k that share an activation scale: 0 for all, or `group`.
      transposed: x is a float [M, n], and the result [M, k].
      out_dtype: float32, bfloat16, or int32: the sums of codes, without any scale.
      activation: a function of each result, after the bias, by the kernels' own name
        (`_steps.fused_activation`).

    >>> from fewbit.kernels import native_available
    >>> def ones(shape, dtype):
    ...     return jnp.ones(shape, dtype)
    >>> def product(x):  # 128 + 1 is the code of 1
    ...     none, one = jnp.zeros((0,)), ones((), jnp.float32)
    ...     data = jnp.full((1, 1, 8, 64, 4), 129, jnp.uint8)
    ...     scale, zero = ones((1, 1, 64), jnp.float32), jnp.zeros((0,), jnp.uint8)
    ...     what = dict(qtype='int8', k=32, n=3, group=0, out_dtype='float32')
    ...     return matmul(x, data, scale, zero, one, jnp.int32(0), none, **what)
    >>> product(ones((1, 32), jnp.float32)).tolist() if native_available() else [[32.0] * 3]
    [[32.0, 32.0, 32.0]]
    """
    name = kernel_format(qtype)
    if act not in _ACT:
        close = difflib.get_close_matches(act, _ACT, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(_MSG_ACT.format(act=act, hint=hint))
    shape = (x.shape[0], k if transposed else n)
    result = jax.ShapeDtypeStruct(shape, jnp.dtype(out_dtype))
    call = jax.ffi.ffi_call("fewbit_matmul", result)
    return call(
        x,
        data,
        scale,
        zero,
        tensor_scale,
        layer,
        act_scale,
        jnp.zeros((0,), jnp.float32) if bias is None else bias,
        format=name,
        k=np.int64(k),
        n=np.int64(n),
        group=np.int64(group),
        act=np.int64(_ACT[act]),
        act_tile=np.int64(act_tile),
        transposed=transposed,
        activation=activation or "none",
    )
