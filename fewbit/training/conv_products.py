"""conv_general_dilated with quantized operands and, when asked, quantized gradients.

A gradient of a convolution is its transpose, which JAX knows for every stride, dilation and group.
It is taken on codes held in float32, which is exact while sums stay below 2**24, and much faster on
a CPU than XLA's integer convolutions; larger sums are rounded as those of float32 products are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit import ops
from fewbit.numerics import format_of, wider
from fewbit.ops import granularity
from fewbit.ops.decision import is_constant
from fewbit.ops.scaling import as_float, placed_like, scale_in
from fewbit.qarray import HowToQuantize, QArray
from fewbit.training._run import explicit_sharding, run
from fewbit.training.configs import (
    ConvGeneralQtConfig,
    GradientSettings,
    check_config,
    gradient_how,
)


@dataclasses.dataclass(frozen=True)
class ConvProduct:
    """A convolution and its two gradients."""

    numbers: lax.ConvDimensionNumbers
    settings: dict[str, Any]
    precision: Any = None
    preferred_element_type: Any = None
    out_sharding: Any = None
    name: str = "conv_general_qt"

    def forward(self, lhs: Any, rhs: Any) -> jax.Array:
        return ops.conv_general_dilated(
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
