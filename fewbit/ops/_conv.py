"""conv_general_dilated on QArrays.

Scales leave the sum when the lhs has one per image and the rhs one per output feature. A zero
point of the lhs is taken out by a second convolution over ones: padding is a real zero, not a code,
so the correction differs at the border and cannot be a plain sum of the kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit.numerics import format_of, qtype_name, wider
from fewbit.ops import _granularity as granularity
from fewbit.ops._arithmetic import (
    Decision,
    from_formats,
    is_constant,
    is_tiled,
    may_overflow,
    unwrap,
)
from fewbit.ops._derivatives import explicit_sharding, run
from fewbit.ops._operand import (
    Deferred,
    as_float,
    as_floats,
    codes_for_product,
    held,
    operand,
    placed_like,
    plain_product,
    result_dtype,
    scale_dtype_for,
    scale_in,
)
from fewbit.ops._panel_conv import describe as describe_native_conv
from fewbit.ops._panel_conv import find_native_conv, run_native_conv
from fewbit.qarray import HowToQuantize, PanelArray, QArray, rounded
from fewbit.rules import ConvGeneralQtConfig, GradientSettings, check_config, gradient_how


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
    shared |= dict(precision=precision, out_sharding=out_sharding)
    return plain_product(lax.conv_general_dilated, (lhs, rhs), preferred_element_type, **shared)


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


# --- conv_general_dilated with quantized operands and, when asked, quantized gradients ------------


@dataclasses.dataclass(frozen=True)
class ConvProduct:
    """A convolution and its two gradients.

    Float gradients are those of the rounded operands, as of fake quantization: so it is where QAT
    of convolutions comes from, and of dot_general it is not.
    """

    numbers: lax.ConvDimensionNumbers
    settings: dict[str, Any]
    precision: Any = None
    preferred_element_type: Any = None
    out_sharding: Any = None
    name: str = "conv_general_qt"
    differentiates_rounded: bool = True

    def forward(self, lhs: Any, rhs: Any) -> jax.Array:
        return conv_general_dilated(
            lhs,
            rhs,
            dimension_numbers=self.numbers,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=self.out_sharding,
            **self.settings,
        )

    @property
    def _specs(self) -> tuple[Any, Any]:
        return self.numbers.lhs_spec, self.numbers.rhs_spec

    @property
    def _grouped(self) -> bool:
        return (self.settings["feature_group_count"], self.settings["batch_group_count"]) != (1, 1)

    def reuse(self, side: int, q: QArray) -> str | None:
        own = self._specs[side][0]
        mixed = side == 0 and self.settings["batch_group_count"] != 1
        scaled = [axis for axis in range(q.ndim) if not is_constant(q, axis)]
        return "shift" if not scaled or (scaled == [own] and not mixed) else None

    def shift(self, side: int, g: jax.Array, q: QArray) -> jax.Array:
        scale = scale_in(q, g.dtype)
        return placed_like(_on(scale, self._specs[side][0], self.numbers.out_spec[side]), g)

    def joined(self, side: int, g: Any, residual: Any) -> tuple[Any, Any, Any]:
        return self, g, residual

    def gradient_how(
        self, side: int, settings: GradientSettings, noise: Any, shape: Any
    ) -> HowToQuantize:
        # The gradient of the images keeps the image axis of g, that of the kernel its features.
        mixed = side == 0 and self.settings["batch_group_count"] != 1
        own = () if mixed else (self.numbers.out_spec[side],)
        return gradient_how(settings, noise, _channelwise(own))

    def residual_how(self, side: int, settings: GradientSettings, shape: Any) -> HowToQuantize:
        own = () if self._grouped else (self._specs[1 - side][1],)
        return gradient_how(settings, None, _channelwise(own), residual=True)

    def gradient(self, side: int, g: Any, residual: Any, like: Any) -> jax.Array:
        parts = [q for q in (g, residual) if isinstance(q, QArray)]
        on_codes = len(parts) == 2 and not any(
            q.zero_point is not None or format_of(q.qtype).kind == "table" for q in parts
        )
        wide = jnp.float32 if on_codes else wider(like.dtype, jnp.float32)

        def numbers_of(x: Any) -> jax.Array:
            if on_codes:
                return jnp.asarray(x.qvalue).astype(wide)
            return as_float(x, wide)

        other = numbers_of(residual)

        def linear(x: jax.Array) -> jax.Array:
            return lax.conv_general_dilated(
                *((x, other) if side == 0 else (other, x)),
                dimension_numbers=self.numbers,
                precision=self.precision,
                out_sharding=self.out_sharding,
                **self.settings,
            )

        at = jax.ShapeDtypeStruct(like.shape, wide, sharding=explicit_sharding(like))
        (total,) = jax.linear_transpose(linear, at)(numbers_of(g))
        if on_codes:
            spec = self._specs[side]
            for scale, here, there in (
                (scale_in(g, wide), self.numbers.out_spec[side], spec[0]),
                (scale_in(residual, wide), self._specs[1 - side][1], spec[1]),
            ):
                total = total * placed_like(_on(scale, here, there), total)
        return total.astype(like.dtype)


def _on(scale: jax.Array, here: int, there: int) -> jax.Array:
    """A scale that is full on the axis `here` at most, laid along the axis `there`."""
    shape = [1] * scale.ndim
    shape[there] = scale.shape[here]
    return scale.reshape(shape)


def _channelwise(axes: Sequence[int]) -> Any:
    def how_for(
        *, tile_size: Any = None, disable_channelwise_axes: bool = False, **fields: Any
    ) -> HowToQuantize:
        return HowToQuantize(
            channelwise_axes=() if disable_channelwise_axes else tuple(axes), **fields
        )

    return how_for


def conv_general_qt(
    lhs: Any,
    rhs: Any,
    config: ConvGeneralQtConfig,
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
    """`jax.lax.conv_general_dilated` for training: quantized forward, float or quantized gradients.

    An operand is a float array, quantized with one scale per image or per output feature, or a
    `Paired`, which is used as it is.

    >>> import jax.numpy as jnp
    >>> config = ConvGeneralQtConfig(lhs_qtype='int8', rhs_qtype='int8', drhs_grad_qtype='int8')
    >>> def loss(kernel):
    ...     return conv_general_qt(jnp.ones((1, 3, 8, 8)), kernel, config, (1, 1), 'SAME').sum()
    >>> jax.grad(loss)(jnp.ones((4, 3, 3, 3))).shape
    (4, 3, 3, 3)
    """
    check_config("conv_general_qt", ConvGeneralQtConfig, config)
    numbers = lax.conv_dimension_numbers(tuple(lhs.shape), tuple(rhs.shape), dimension_numbers)
    product = ConvProduct(
        numbers,
        dict(
            window_strides=window_strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
        ),
        precision,
        preferred_element_type,
        out_sharding,
    )
    hows = [
        None
        if config.operand(side)["qtype"] is None
        else granularity.conv_how(
            dimension_numbers=numbers, for_lhs=side == 0, **config.operand(side)
        )
        for side in (0, 1)
    ]
    return run(product, (lhs, rhs), (hows[0], hows[1]), config)
