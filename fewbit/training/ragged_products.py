"""ragged_dot with quantized operands and, when asked, quantized gradients.

With rows (M, K) in groups and experts (G, K, N), the gradient of the rows is a ragged product with
the experts transposed; the gradient of the experts sums over the rows of each group.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit import ops
from fewbit.ops import granularity
from fewbit.ops.decision import is_constant
from fewbit.ops.scaling import placed_like, scale_in, widen
from fewbit.qarray import HowToQuantize, QArray
from fewbit.training._run import explicit_sharding, run
from fewbit.training.configs import GradientSettings, RaggedDotQtConfig, check_config, gradient_how
from fewbit.training.dot_products import check_even_tiles

# The axes of each operand: rows (M, K), experts (G, K, N).
_K = 1
_KEPT = (0, 2)
_DLHS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_DRHS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@dataclasses.dataclass(frozen=True)
class RaggedProduct:
    """A ragged_dot and its two gradients."""

    precision: Any = None
    preferred_element_type: Any = None
    name: str = "ragged_dot_qt"

    def forward(self, lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any) -> jax.Array:
        return ops.ragged_dot(
            lhs, rhs, group_sizes, self.precision, self.preferred_element_type, group_offset
        )

    def reuse(self, side: int, q: QArray) -> str | None:
        if is_constant(q, _K):
            return "shift"
        return "as is" if is_constant(q, _KEPT[side]) else None

    def shift(
        self, side: int, g: jax.Array, q: QArray, group_sizes: Any, group_offset: Any
    ) -> jax.Array:
        scale = scale_in(q, g.dtype)
        if side == 0:
            return placed_like(widen(scale, q, [0]), g)
        per_group = lax.squeeze(widen(scale, q, [0, 2]), (_K,))
        if per_group.shape[0] != 1:
            group = _group_of_row(g.shape[0], group_sizes)
            # Rows past the last group are no part of the product, so any scale serves them.
            per_group = jnp.take(per_group, group, axis=0, mode="clip")
        return placed_like(per_group, g)

    def joined(self, side: int, g: Any, residual: Any) -> tuple[Any, Any, Any]:
        return self, g, residual

    def gradient_how(
        self, side: int, settings: GradientSettings, noise: Any, shape: Any
    ) -> HowToQuantize:
        kept, summed = (0, 1) if side == 0 else (1, 0)
        how = gradient_how(settings, noise, _granularity((kept,), summed))
        return check_even_tiles(shape, how, settings, side, self.name)

    def residual_how(self, side: int, settings: GradientSettings, shape: Any) -> HowToQuantize:
        kept, summed = ((0, 1), 2) if side == 0 else ((1,), 0)
        how = gradient_how(settings, None, _granularity(kept, summed), residual=True)
        return check_even_tiles(shape, how, settings, side, self.name)

    def gradient(
        self, side: int, g: Any, residual: Any, like: Any, group_sizes: Any, group_offset: Any
    ) -> jax.Array:
        lhs, rhs, numbers = (g, residual, _DLHS) if side == 0 else (residual, g, _DRHS)
        return ops.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            numbers,
            self.precision,
            like.dtype,
            group_offset,
            out_sharding=explicit_sharding(like),
        )


def _group_of_row(rows: int, group_sizes: jax.Array) -> jax.Array:
    ends = jnp.cumsum(group_sizes)
    number = jnp.arange(rows, dtype=ends.dtype)
    return jnp.sum(number[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)


def _granularity(kept: tuple[int, ...], summed: int) -> Any:
    def how_for(
        *, tile_size: Any = None, disable_channelwise_axes: bool = False, **fields: Any
    ) -> HowToQuantize:
        return HowToQuantize(
            channelwise_axes=() if disable_channelwise_axes else kept,
            tiled_axes={} if tile_size is None else {summed: tile_size},
            **fields,
        )

    return how_for


def ragged_dot_qt(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    config: RaggedDotQtConfig,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` for training: quantized forward, float or quantized gradients.

    Rows (M, K) have a scale each, experts (G, K, N) one per expert and column; an operand that is a
    `Paired` is used as it is.

    >>> import jax.numpy as jnp
    >>> config = RaggedDotQtConfig(lhs_qtype='int8', rhs_qtype='int8', drhs_grad_qtype='int8')
    >>> def loss(experts):
    ...     return ragged_dot_qt(jnp.ones((8, 4)), experts, jnp.array([5, 3]), config).sum()
    >>> jax.grad(loss)(jnp.ones((2, 4, 3))).shape
    (2, 4, 3)
    """
    check_config("ragged_dot_qt", RaggedDotQtConfig, config)
    hows = [
        None
        if config.operand(side)["qtype"] is None
        else granularity.ragged_dot_how(for_lhs=side == 0, **config.operand(side))
        for side in (0, 1)
    ]
    product = RaggedProduct(precision, preferred_element_type)
    rest = (jnp.asarray(group_sizes), group_offset)
    return run(product, (lhs, rhs), (hows[0], hows[1]), config, rest)
