"""dot_general and dot on QArrays.

On codes, with scales and zero points that are constant along k and at most one zero point:

    sum_k (q_l - z_l) s_l (q_r - z_r) s_r = s_l s_r (sum_k q_l q_r - z_l sum_k q_r - z_r sum_k q_l)

A tiled k is split
into (tiles, tile), the tile count becomes a batch axis of the integer product, and the scaled
partial sums are added at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from fewbit.kernels import SCALED, finish
from fewbit.numerics import wider
from fewbit.ops import _granularity as granularity
from fewbit.ops._arithmetic import Decision, decide_dot, is_constant, unwrap
from fewbit.ops._derivatives import run
from fewbit.ops._on_codes import (
    Side,
    native_product,
    native_sums,
    runs_natively,
    sharding_with_tiles,
    sums_of_codes,
)
from fewbit.ops._on_panels import describe as describe_panel_dot
from fewbit.ops._on_panels import find_panel_dot, run_panel_dot
from fewbit.ops._operand import (
    Deferred,
    as_float,
    as_floats,
    held,
    lay_out,
    make_spec,
    operand,
    placed_like,
    plain_product,
    result_dtype,
    scale_dtype_for,
    scale_in,
    widen,
)
from fewbit.qarray import HowToQuantize, PanelArray, QArray, get_tile_shape, moves, rounded
from fewbit.rules import DotGeneralQtConfig, GradientSettings, check_config, gradient_how


def _normalise(dimension_numbers: Any, ndims: Sequence[int]) -> Any:
    (lc, rc), (lb, rb) = dimension_numbers
    lc, lb = (tuple(int(a) % max(ndims[0], 1) for a in axes) for axes in (lc, lb))
    rc, rb = (tuple(int(a) % max(ndims[1], 1) for a in axes) for axes in (rc, rb))
    return (lc, rc), (lb, rb)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    bias: Any = None,
    activation: str | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` where each side may be an array or a QArray.

    The result has `preferred_element_type`, or the promotion of the logical dtypes. Two operands of
    8-bit codes are multiplied as codes and scaled afterwards; otherwise they are dequantized first.
    A weight in panels and, on a CPU, int8 codes with int8 codes go to the native kernels.
    `describe_dot` tells which.

    `bias` (of the shape of the result's last axes) is added, and `activation` ('relu', 'gelu', ...,
    see `kernels.ACTIVATIONS`) applied: by the kernel that makes the result, if one does.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> w = quantize(jnp.eye(4), 'int8', channelwise_axes=(1,))
    >>> dot_general(jnp.ones((2, 4)), w, (((1,), (0,)), ((), ()))).shape
    (2, 4)
    """
    lhs, rhs = held(lhs), held(rhs)
    dimension_numbers = _normalise(dimension_numbers, (lhs.ndim, rhs.ndim))
    native = find_panel_dot(lhs, rhs, dimension_numbers)
    if native is not None and out_sharding is None:
        dtype = result_dtype((lhs, rhs), preferred_element_type)
        if jnp.issubdtype(dtype, jnp.floating):
            x = rhs if native.side == 0 else lhs
            return run_panel_dot(native, x, dtype, bias=bias, activation=activation)
    out = _dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    return finish(out, bias, activation)


def _dot(
    lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any, preferred: Any, out_sharding: Any
) -> jax.Array:
    lhs, rhs = operand(lhs), operand(rhs)
    decision = decide_dot(lhs, rhs, dimension_numbers)
    if decision.on_codes:
        if any(decision.tiles):
            _check_shapes(lhs, rhs, dimension_numbers)
        dtype = result_dtype((lhs, rhs), preferred)
        return _dot_on_codes(lhs, rhs, dimension_numbers, decision, dtype, out_sharding)
    if decision.arithmetic == "dequantize":
        lhs, rhs = as_floats(lhs, rhs)
    settings = dict(precision=precision, out_sharding=out_sharding)
    product = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, **settings)
    return plain_product(product, (lhs, rhs), preferred)


def describe_dot(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    bias: Any = None,
    activation: str | None = None,
) -> str:
    """Which path `dot_general` takes for these operands; abstract values are enough.

    >>> import jax, jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> q = jax.eval_shape(lambda: quantize(jnp.ones((4, 4)), 'int8'))
    >>> describe_dot(q, q, (((1,), (0,)), ((), ())))
    'int8 dot'
    """
    lhs, rhs = unwrap(lhs), unwrap(rhs)
    numbers = _normalise(dimension_numbers, (len(lhs.shape), len(rhs.shape)))
    native = find_panel_dot(lhs, rhs, numbers)
    if native is not None:
        return describe_panel_dot(native, rhs if native.side == 0 else lhs, bias, activation)
    lhs, rhs = (
        jax.eval_shape(operand, q) if isinstance(q, PanelArray | Deferred) else q
        for q in (lhs, rhs)
    )
    decision = decide_dot(lhs, rhs, numbers)
    if decision.on_codes and runs_natively(lhs, rhs, numbers, decision):
        return "native int8"
    return decision.describe("dot")


def _check_shapes(lhs: QArray, rhs: QArray, dimension_numbers: Any) -> None:
    # Tile filling could hide lengths that differ, so they are compared before any splitting.
    def plain(q: QArray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(q.shape, jnp.float32)

    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), plain(lhs), plain(rhs))


def _dot_on_codes(
    lhs: QArray, rhs: QArray, numbers: Any, decision: Decision, dtype: Any, out_sharding: Any
) -> jax.Array:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers
    left = Side(lhs, lhs_batch, lhs_contracting, decision.tiles)
    right = Side(rhs, rhs_batch, rhs_contracting, decision.tiles)
    n_batch, n_tiled = len(lhs_batch), len(left.tiled)
    if out_sharding is not None and n_tiled:
        out_sharding = sharding_with_tiles(out_sharding, left, right, n_batch)
    wide = scale_dtype_for(dtype, lhs, rhs)
    native = out_sharding is None and runs_natively(lhs, rhs, numbers, decision)
    if native and wide == jnp.float32 and left.zero_point is None and right.zero_point is None:
        straight = not n_tiled and jnp.dtype(dtype).name in SCALED
        total = native_product(left, right, dtype if straight else wide)
        return _added_up(total, n_batch, n_tiled).astype(dtype)
    if native:
        total = native_sums(left, right)
    else:
        total = sums_of_codes(left, right, out_sharding, decision)
    gap_left, gap_right = len(right.free), len(left.free)
    if left.zero_point is not None:
        zero = left.in_output(left.zero_point.astype(jnp.int32), gap_left, True)
        total = total - placed_like(zero, total) * placed_like(
            right.summed(gap_right, False), total
        )
    if right.zero_point is not None:
        zero = right.in_output(right.zero_point.astype(jnp.int32), gap_right, False)
        total = total - placed_like(zero, total) * placed_like(left.summed(gap_left, True), total)
    total = total.astype(wide)
    total = total * placed_like(left.in_output(scale_in(lhs, wide), gap_left, True), total)
    total = total * placed_like(right.in_output(scale_in(rhs, wide), gap_right, False), total)
    return _added_up(rounded(total), n_batch, n_tiled).astype(dtype)


def _added_up(total: jax.Array, first: int, count: int) -> jax.Array:
    """The sum over the tiles."""
    return jnp.sum(total, axis=tuple(range(first, first + count))) if count else total


def dot(
    a: Any,
    b: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.dot` where each side may be an array or a QArray.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> dot(quantize(jnp.ones(8), 'int8'), jnp.ones(8)).round(2)
    Array(7.97, dtype=float32)
    """
    a, b = held(a), held(b)
    if a.ndim == 0 or b.ndim == 0 or not (isinstance(a, QArray) or isinstance(b, QArray)):
        if isinstance(a, QArray) or isinstance(b, QArray):
            a, b = as_floats(a, b)
        settings = dict(precision=precision, out_sharding=out_sharding)
        return plain_product(
            jnp.dot, (as_float(a), as_float(b)), preferred_element_type, **settings
        )
    numbers = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return dot_general(a, b, numbers, precision, preferred_element_type, out_sharding=out_sharding)


# --- dot_general with quantized operands and, when asked, quantized gradients ---------------------

_MSG_TILE = (
    "{field}={tile!r} does not divide the gradient product of {op}: axis {axis} of its operand of "
    "shape {shape} has {size} values, in tiles of {resolved}. Choose a divisor of {size}, a share "
    "such as 1/4 that gives one, or leave {field} out."
)


def tiles_of_both(
    settings: GradientSettings, side: int, op: str, ndim: int, summed: Mapping[int, int]
) -> tuple[GradientSettings, GradientSettings]:
    """The settings with the tiles that the incoming gradient has, and those of its residual.

    A mapping names axes of the residual, the other operand of rank `ndim`. `summed` are those that
    the gradient product sums over, each with the gradient's axis that it meets.
    """
    tiles = {}
    for axis, tile in settings.tile_size.items():
        if not -ndim <= axis < ndim or (
            settings.residual_qtype is None and axis % ndim not in summed
        ):
            field = ("dlhs", "drhs")[side] + "_tile_size"
            raise ValueError(
                _MSG_TILED_AXIS.format(
                    field=field,
                    tile=dict(settings.tile_size),
                    axis=axis,
                    op=op,
                    summed=_counted(list(summed)),
                    other=("rhs", "lhs")[side],
                    ndim=ndim,
                    fixed={a: tile for a in list(summed)[:1]},
                )
            )
        tiles[axis % ndim] = tile
    met = {summed[axis]: tile for axis, tile in tiles.items() if axis in summed} or None
    changed = dataclasses.replace
    return changed(settings, tile_size=met), changed(settings, tile_size=tiles)


def _counted(axes: Sequence[int]) -> str:
    names = ", ".join(map(str, axes))
    return f"axis {names}" if len(axes) == 1 else f"axes {names}" if axes else "no axis"


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


_MSG_TILED_AXIS = (
    "{field}={tile} names axis {axis}, but this gradient product of {op} sums over {summed} of "
    "{other}, which has {ndim} axes. A mapping names axes of {other} that the gradient sums over: "
    "write {field}={fixed}, or one length for all of them together."
)


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
    differentiates_rounded: bool = False

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
        return dot_general(
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

        if isinstance(settings.tile_size, Mapping):
            other = self.labels[1 - side]
            summed = {a: self.out.index(x) for a, x in enumerate(other) if x[0] == 1 - side}
            own = tiles_of_both(settings, side, self.name, len(other), summed)
            settings = own[0] if for_lhs else own[1]
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
            result = dot_general(
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
    if size % count or describe_dot(lhs, rhs, numbers) != "native int8":
        return None
    wide = wider(dtype, jnp.float32)

    def partial_sum(number: Any) -> jax.Array:
        left, right = (
            _tile(q, axis, number, size // count) for q, axis in zip((lhs, rhs), axes, strict=True)
        )
        return dot_general(left, right, numbers, None, wide)

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
    A mapping gives axes tiles of their own: `tile_size` names those of rhs, of which lhs shares
    what is summed, and `drhs_tile_size={1: 64}` those of lhs, here tokens (`dlhs_tile_size` of
    rhs).

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
        else granularity.dot_how(
            for_lhs=side == 0,
            **numbers,
            **granularity.config_fields(config, side, ndims, product.numbers[0]),
        )
        for side in (0, 1)
    ]
    return run(product, (lhs, rhs), (hows[0], hows[1]), config)
