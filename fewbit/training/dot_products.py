"""dot_general with quantized operands and, when asked, quantized gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from fewbit import moves, ops
from fewbit.numerics import wider
from fewbit.ops import granularity
from fewbit.ops.decision import is_constant
from fewbit.ops.scaling import lay_out, make_spec, placed_like, scale_in, widen
from fewbit.qarray import HowToQuantize, QArray, get_tile_shape
from fewbit.training._run import run
from fewbit.training.configs import DotGeneralQtConfig, GradientSettings, check_config, gradient_how

_MSG_TILE = (
    "{field}={tile!r} does not divide the gradient product of {op}: axis {axis} of its operand of "
    "shape {shape} has {size} values, in tiles of {resolved}. Choose a divisor of {size}, a share "
    "such as 1/4 that gives one, or leave {field} out."
)


def check_even_tiles(
    shape: Sequence[int], how: HowToQuantize, settings: GradientSettings, side: int, op: str
) -> HowToQuantize:
    """The same `how`, if its tiles divide the shape."""
    for axis, tile in zip(how.tiled_axes, how.tiled_axes.values(), strict=True):
        size, resolved = shape[axis], get_tile_shape(shape, how)[axis]
        if size % resolved:
            field = ("dlhs", "drhs")[side] + "_tile_size"
            raise ValueError(
                _MSG_TILE.format(
                    field=field,
                    tile=tile,
                    op=op,
                    axis=axis,
                    shape=tuple(shape),
                    size=size,
                    resolved=resolved,
                )
            )
    return how


@dataclasses.dataclass(frozen=True)
class DotProduct:
    """A dot_general and its two gradients, with every axis under a label of its own.

    An axis is ('batch', i), ('summed', i), or (side, axis) if only that operand has it. The
    result's axes are the batch, then what lhs keeps, then what rhs keeps.
    """

    labels: tuple[tuple[Any, ...], tuple[Any, ...]]
    numbers: Any
    precision: Any = None
    preferred_element_type: Any = None
    out_sharding: Any = None
    name: str = "dot_general_qt"

    @classmethod
    def make(cls, dimension_numbers: Any, ndims: Sequence[int], **settings: Any) -> DotProduct:
        summed, batch = dimension_numbers
        labels = []
        for side, ndim in enumerate(ndims):
            of: dict[int, Any] = {}
            for kind, axes in (("summed", summed[side]), ("batch", batch[side])):
                of |= {int(a) % max(ndim, 1): (kind, i) for i, a in enumerate(axes)}
            labels.append(tuple(of.get(axis, (side, axis)) for axis in range(ndim)))
        numbers = tuple(
            tuple(
                tuple(int(a) % max(n, 1) for a in axes) for axes, n in zip(pair, ndims, strict=True)
            )
            for pair in (summed, batch)
        )
        return cls((labels[0], labels[1]), numbers, **settings)

    @property
    def out(self) -> list[Any]:
        batch = [("batch", i) for i in range(len(self.numbers[1][0]))]
        return batch + [x for side in (0, 1) for x in self.labels[side] if x[0] == side]

    def forward(self, lhs: Any, rhs: Any) -> jax.Array:
        return ops.dot_general(
            lhs,
            rhs,
            self.numbers,
            self.precision,
            self.preferred_element_type,
            out_sharding=self.out_sharding,
        )

    def _axes(self, side: int, kinds: Sequence[Any]) -> list[int]:
        return [axis for axis, label in enumerate(self.labels[side]) if label[0] in kinds]

    def reuse(self, side: int, q: QArray) -> str | None:
        if all(is_constant(q, axis) for axis in self._axes(side, ["summed"])):
            return "shift"
        if all(is_constant(q, axis) for axis in self._axes(side, [side])):
            return "as is"
        return None

    def shift(self, side: int, g: jax.Array, q: QArray) -> jax.Array:
        """The factor that operand `side`'s scales are of the gradient, with the gradient's axes."""
        own, out = self.labels[side], self.out
        scale = widen(scale_in(q, g.dtype), q, self._axes(side, ["batch", side]))
        order = [own.index(label) for label in out if label in own]
        missing = [axis for axis, label in enumerate(out) if label not in own]
        return placed_like(lay_out(scale, order, missing), g)

    def joined(self, side: int, g: Any, residual: Any) -> tuple[DotProduct, Any, Any]:
        """Tiles of a contraction over several axes are cut from all of them as one."""
        summed = [label for label in self.labels[1 - side] if label[0] == 1 - side]
        if len(summed) < 2:
            return self, g, residual
        g = _join(g, self.out, summed)
        joined = _one_axis(self.labels[0], summed), _one_axis(self.labels[1], summed)
        residual = _join(residual, self.labels[1 - side], summed)
        return dataclasses.replace(self, labels=joined), g, residual

    def _gradient_numbers(self, side: int) -> Any:
        """Numbers of (incoming gradient, other operand) for the gradient of `side`."""
        out, other = self.out, self.labels[1 - side]
        summed = [label for label in other if label[0] == 1 - side]
        batch = [label for label in other if label[0] == "batch"]
        return tuple(
            (tuple(map(out.index, labels)), tuple(map(other.index, labels)))
            for labels in (summed, batch)
        )

    def gradient_how(
        self, side: int, settings: GradientSettings, noise: Any, shape: Any
    ) -> HowToQuantize:
        return self._how(side, settings, noise, shape, for_lhs=True)

    def residual_how(self, side: int, settings: GradientSettings, shape: Any) -> HowToQuantize:
        return self._how(side, settings, None, shape, for_lhs=False)

    def _how(
        self, side: int, settings: GradientSettings, noise: Any, shape: Any, for_lhs: bool
    ) -> HowToQuantize:
        ndims = (len(self.out), len(self.labels[1 - side]))

        def how_for(**fields: Any) -> HowToQuantize:
            return granularity.dot_how(
                dimension_numbers=self._gradient_numbers(side),
                ndims=ndims,
                for_lhs=for_lhs,
                **fields,
            )

        how = gradient_how(settings, noise, how_for, residual=not for_lhs)
        return check_even_tiles(shape, how, settings, side, self.name)

    def gradient(self, side: int, g: Any, residual: Any, like: Any) -> jax.Array:
        own, other = self.labels[side], self.labels[1 - side]
        (g_summed, other_summed), (g_batch, other_batch) = self._gradient_numbers(side)
        batch = [self.out[axis] for axis in g_batch]
        kept = [label for label in self.out if label in own and label not in batch]
        freed = [label for label in other if label[0] == "summed"]
        # The operands are ordered so that the result mostly lies as it is wanted.
        if side == 0:
            lhs, rhs = g, residual
            numbers = (g_summed, other_summed), (g_batch, other_batch)
            produced = batch + kept + freed
        else:
            lhs, rhs = residual, g
            numbers = (other_summed, g_summed), (other_batch, g_batch)
            produced = batch + freed + kept
        placing = None
        if AxisType.Explicit in like.sharding.mesh.axis_types:
            placing = make_spec(None, [like.sharding.spec[own.index(label)] for label in produced])
        result = _tile_by_tile(lhs, rhs, numbers, like.dtype) if placing is None else None
        if result is None:
            result = ops.dot_general(
                lhs, rhs, numbers, self.precision, like.dtype, out_sharding=placing
            )
        order = [produced.index(label) for label in own]
        return result if order == sorted(order) else jax.lax.transpose(result, order)


def _tile_by_tile(lhs: Any, rhs: Any, numbers: Any, dtype: Any) -> jax.Array | None:
    """A product with few long tiles on its one contraction as a sum of products without tiles.

    Native kernels are several times faster on these than on tiles as a batch, and no array with all
    the partial sums is made. None where that is not so.
    """
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)) or len(numbers[0][0]) != 1:
        return None
    axes = (numbers[0][0][0], numbers[0][1][0])
    counts = {q.scale.shape[axis] for q, axis in zip((lhs, rhs), axes, strict=True)} - {1}
    if len(counts) != 1 or lhs.zero_point is not None or rhs.zero_point is not None:
        return None
    (count,) = counts
    size = lhs.shape[axes[0]]
    if size % count or ops.describe_dot(lhs, rhs, numbers) != "native int8":
        return None
    wide = wider(dtype, jnp.float32)

    def partial_sum(number: Any) -> jax.Array:
        left, right = (
            _tile(q, axis, number, size // count) for q, axis in zip((lhs, rhs), axes, strict=True)
        )
        return ops.dot_general(left, right, numbers, None, wide)

    # A loop, so that the partial sums take turns in one place.
    total = jax.lax.fori_loop(
        1, count, lambda number, total: total + partial_sum(number), partial_sum(0)
    )
    return total.astype(dtype)


def _tile(q: QArray, axis: int, number: Any, size: int) -> QArray:
    scale = q.scale
    if scale.shape[axis] != 1:
        scale = jax.lax.dynamic_slice_in_dim(scale, number, 1, axis=axis)
    codes = jax.lax.dynamic_slice_in_dim(q.qvalue, number * size, size, axis=axis)
    return QArray(codes, scale, None, q.qtype).with_dtype(q.dtype)


def _one_axis(labels: Sequence[Any], summed: Sequence[Any]) -> tuple[Any, ...]:
    """The labels with the first of `summed` in the place of all."""
    return tuple(label for label in labels if label not in summed[1:])


def _join(x: Any, labels: Sequence[Any], summed: Sequence[Any]) -> Any:
    """An array or QArray with the axes `summed` side by side and made one."""
    order: list[int] = []
    for axis, label in enumerate(labels):
        if label == summed[0]:
            order += map(labels.index, summed)
        elif label not in summed:
            order.append(axis)
    first = order.index(labels.index(summed[0]))
    shape = [x.shape[axis] for axis in order]
    shape[first : first + len(summed)] = [math.prod(shape[first : first + len(summed)])]
    if isinstance(x, QArray):
        moved = x if order == sorted(order) else moves.transpose(x, order)
        return moves.reshape(moved, shape)
    return jnp.reshape(x if order == sorted(order) else jax.lax.transpose(x, order), shape)


def dot_general_qt(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    config: DotGeneralQtConfig,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general` for training: quantized forward, float or quantized gradients.

    Tiles of a gradient product are cut from its whole contraction: where the gradient of a weight
    sums over batch and tokens, `drhs_tile_size=1/4` gives each quarter of the batch its scales.

    An operand is a float array, which is quantized as the config says, or a `Paired`, which is used
    as it is. The forward equals the product that serves quantized models bit for bit.

    >>> import jax.numpy as jnp
    >>> config = DotGeneralQtConfig(lhs_qtype='int8', rhs_qtype='int8', drhs_grad_qtype='int8')
    >>> def loss(w):
    ...     return dot_general_qt(jnp.ones((2, 4)), w, (((1,), (0,)), ((), ())), config).sum()
    >>> jax.grad(loss)(jnp.ones((4, 3))).shape
    (4, 3)
    """
    check_config("dot_general_qt", DotGeneralQtConfig, config)
    ndims = (lhs.ndim, rhs.ndim)
    product = DotProduct.make(
        dimension_numbers,
        ndims,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    numbers: dict[str, Any] = dict(dimension_numbers=product.numbers, ndims=ndims)
    hows = [
        None
        if config.operand(side)["qtype"] is None
        else granularity.dot_how(for_lhs=side == 0, **numbers, **config.operand(side))
        for side in (0, 1)
    ]
    return run(product, (lhs, rhs), (hows[0], hows[1]), config)
