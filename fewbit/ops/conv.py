"""conv_general_dilated on QArrays.

Scales leave the sum when the lhs has one per image and the rhs one per output feature. A zero
point of the lhs is taken out by a second convolution over ones: padding is a real zero, not a code,
so the correction differs at the border and cannot be a plain sum of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit._qarray_panels import PanelArray
from fewbit.numerics import qtype_name
from fewbit.ops.decision import (
    Decision,
    from_formats,
    is_constant,
    is_tiled,
    may_overflow,
    unwrap,
)
from fewbit.ops.deferred import Deferred
from fewbit.ops.panel_conv import describe as describe_native_conv
from fewbit.ops.panel_conv import find_native_conv, run_native_conv
from fewbit.ops.scaling import (
    as_floats,
    codes_for_product,
    held,
    operand,
    placed_like,
    result_dtype,
    rounded,
    scale_dtype_for,
    scale_in,
)
from fewbit.qarray import QArray


def decide_conv(
    lhs: Any, rhs: Any, numbers: lax.ConvDimensionNumbers, batch_group_count: int = 1
) -> Decision:
    """The decision for a convolution; shared by the op and by `describe_conv`."""
    found = from_formats(lhs, rhs)
    if not found.on_codes:
        return found
    for side, q in (("lhs", lhs), ("rhs", rhs)):
        tiled = [axis for axis in range(q.ndim) if is_tiled(q, axis)]
        if tiled:
            raise ValueError(
                "subchannel is not supported for conv_general_dilated. "
                f"{side} of shape {q.shape} is tiled on axis {tiled[0]}; quantize it with one "
                "scale per image (lhs) or output feature (rhs), or dequantize() it first."
            )
    if rhs.zero_point is not None:
        return Decision("dequantize", "the kernel has a zero point")
    kept = {"lhs": numbers.lhs_spec[0], "rhs": numbers.rhs_spec[0]}
    for side, q in (("lhs", lhs), ("rhs", rhs)):
        for axis in range(q.ndim):
            if axis != kept[side] and not is_constant(q, axis):
                return Decision("dequantize", f"{side} has scales along its summed axis {axis}")
    if batch_group_count != 1 and not (
        is_constant(lhs, numbers.lhs_spec[0]) and lhs.zero_point is None
    ):
        return Decision("dequantize", "batch groups mix images with different scales")
    if found.arithmetic == "fp8" and lhs.qtype != rhs.qtype:
        names = " and ".join(qtype_name(q.qtype) for q in (lhs, rhs))
        return Decision("dequantize", f"a convolution cannot mix {names} codes")
    if found.arithmetic == "int8":
        terms = math.prod(rhs.shape[axis] for axis in numbers.rhs_spec[1:])
        if may_overflow(lhs, rhs, terms):
            return Decision("dequantize", f"a sum of {terms} products could leave int32")
    return found


def _numbers(lhs: Any, rhs: Any, dimension_numbers: Any) -> lax.ConvDimensionNumbers:
    return lax.conv_dimension_numbers(tuple(lhs.shape), tuple(rhs.shape), dimension_numbers)


def describe_conv(
    lhs: Any, rhs: Any, dimension_numbers: Any = None, batch_group_count: int = 1, **settings: Any
) -> str:
    """Which path `conv_general_dilated` takes for these operands; abstract values are enough.

    `settings` are other arguments of the convolution, which native code depends on.

    >>> import jax, jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> w = jax.eval_shape(lambda: quantize(jnp.ones((4, 3, 3, 3)), 'int8', channelwise_axes=(0,)))
    >>> describe_conv(jax.ShapeDtypeStruct((1, 3, 8, 8), jnp.float32), w)
    'dequantize + float conv'
    """
    lhs, rhs = unwrap(lhs), unwrap(rhs)
    numbers = _numbers(lhs, rhs, dimension_numbers)
    native = find_native_conv(
        lhs,
        rhs,
        numbers,
        settings.pop("window_strides", (1,) * (len(rhs.shape) - 2)),
        settings.pop("padding", "VALID"),
        batch_group_count=batch_group_count,
        **settings,
    )
    if native is not None:
        return describe_native_conv(native, lhs)
    lhs, rhs = (
        jax.eval_shape(operand, q) if isinstance(q, PanelArray | Deferred) else q
        for q in (lhs, rhs)
    )
    return decide_conv(lhs, rhs, numbers, batch_group_count).describe("conv")


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` where each side may be an array or a QArray.

    A kernel in panels, and one with few output channels per group, goes to native code.
    `describe_conv` tells which path is taken.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> kernel = quantize(jnp.ones((4, 3, 3, 3)), 'int8', channelwise_axes=(0,))
    >>> conv_general_dilated(jnp.ones((1, 3, 8, 8)), kernel, (1, 1), 'SAME').shape
    (1, 4, 8, 8)
    """
    lhs, rhs = held(lhs), held(rhs)
    numbers = _numbers(lhs, rhs, dimension_numbers)
    shared: dict[str, Any] = dict(
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    native = None if out_sharding is not None else find_native_conv(lhs, rhs, numbers, **shared)
    if native is not None:
        dtype = result_dtype((lhs, rhs), preferred_element_type)
        if jnp.issubdtype(dtype, jnp.floating):
            return run_native_conv(native, lhs, dtype)
    lhs, rhs = operand(lhs), operand(rhs)
    shared["dimension_numbers"] = numbers
    decision = decide_conv(lhs, rhs, numbers, batch_group_count)
    if decision.on_codes:
        dtype = result_dtype((lhs, rhs), preferred_element_type)
        return _conv_on_codes(lhs, rhs, numbers, decision, dtype, out_sharding, shared)
    if decision.arithmetic == "dequantize":
        lhs, rhs = as_floats(lhs, rhs)
    return lax.conv_general_dilated(
        lhs,
        rhs,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        **shared,
    )


def _on_output(part: jax.Array, kept: int, out_axis: int, ndim: int) -> jax.Array:
    """A per-image or per-feature part as an array that is full on its output axis only."""
    shape = [1] * ndim
    shape[out_axis] = part.shape[kept]
    return part.reshape(shape)


def _conv_on_codes(
    lhs: QArray,
    rhs: QArray,
    numbers: lax.ConvDimensionNumbers,
    decision: Decision,
    dtype: Any,
    out_sharding: Any,
    shared: dict[str, Any],
) -> jax.Array:
    (lhs_codes, lhs_zero), (rhs_codes, _) = codes_for_product(lhs), codes_for_product(rhs)
    accumulate = jnp.int32 if decision.arithmetic == "int8" else jnp.float32
    total = lax.conv_general_dilated(
        lhs_codes,
        rhs_codes,
        preferred_element_type=accumulate,
        out_sharding=out_sharding,
        **shared,
    )
    image, feature = numbers.lhs_spec[0], numbers.rhs_spec[0]
    out_image, out_feature = numbers.out_spec[:2]
    if lhs_zero is not None:
        shape = list(lhs.shape)
        shape[image] = 1
        ones = jnp.ones(shape, jnp.int8)
        seen = lax.conv_general_dilated(ones, rhs_codes, preferred_element_type=jnp.int32, **shared)
        zero = _on_output(lhs_zero.astype(jnp.int32), image, out_image, lhs.ndim)
        total = total - placed_like(zero, total) * placed_like(seen, total)
    wide = scale_dtype_for(dtype, lhs, rhs)
    total = total.astype(wide)
    lhs_scale = _on_output(scale_in(lhs, wide), image, out_image, lhs.ndim)
    rhs_scale = _on_output(scale_in(rhs, wide), feature, out_feature, lhs.ndim)
    total = total * placed_like(lhs_scale, total)
    return rounded(total * placed_like(rhs_scale, total)).astype(dtype)
