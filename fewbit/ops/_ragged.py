"""ragged_dot and ragged_dot_general on QArrays.

The product on codes covers scales per row, per group, per column and per tile of K. Scales that
differ between groups are looked up per row: row m of the result belongs to the group that its index
falls into.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit.kernels import finish
from fewbit.ops import _granularity as granularity
from fewbit.ops._arithmetic import (
    Decision,
    from_formats,
    is_constant,
    may_overflow,
    parts,
    tile_on,
    unwrap,
)
from fewbit.ops._derivatives import explicit_sharding, run
from fewbit.ops._dot import check_even_tiles, tiles_of_both
from fewbit.ops._on_codes import Side, sharding_with_tiles
from fewbit.ops._on_panels import describe as describe_panel_dot
from fewbit.ops._on_panels import find_panel_ragged_dot, run_panel_dot
from fewbit.ops._operand import (
    Deferred,
    as_floats,
    held,
    operand,
    placed_like,
    plain_product,
    result_dtype,
    scale_dtype_for,
    scale_in,
    widen,
)
from fewbit.qarray import HowToQuantize, PanelArray, QArray, rounded
from fewbit.rules import GradientSettings, RaggedDotQtConfig, check_config, gradient_how

_BASIC = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    ragged: int
    group: int | None

    @classmethod
    def read(cls, numbers: lax.RaggedDotDimensionNumbers) -> _Numbers:
        (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
        groups = tuple(numbers.rhs_group_dimensions)
        (ragged,) = numbers.lhs_ragged_dimensions
        return cls(tuple(lc), tuple(rc), tuple(lb), tuple(rb), ragged, *(groups or (None,)))


def decide_ragged_dot(
    lhs: Any, rhs: Any, numbers: lax.RaggedDotDimensionNumbers, group_sizes_ndim: int = 1
) -> Decision:
    """The decision for a ragged product; shared by the op and by `describe_ragged_dot`."""
    found = from_formats(lhs, rhs)
    if not found.on_codes:
        return found
    for side, q in (("lhs", lhs), ("rhs", rhs)):
        if q.zero_point is not None:
            return Decision("dequantize", f"{side} has a zero point")
    n = _Numbers.read(numbers)
    if n.group is None:
        summed = [(lhs, a) for a in n.lhs_contracting] + [(rhs, a) for a in n.rhs_contracting]
        if not all(is_constant(q, axis) for q, axis in summed):
            return Decision("dequantize", "the ragged axis is not a row axis and K is tiled")
        tiles: list[int | None] = [None] * len(n.lhs_contracting)
    else:
        tiles = []
        for a, b in zip(n.lhs_contracting, n.rhs_contracting, strict=True):
            sizes = {
                tile_on(q, part, axis)
                for q, axis in ((lhs, a), (rhs, b))
                for part in parts(q)
                if part.shape[axis] > 1
            }
            if 1 in sizes:
                return Decision("dequantize", f"lhs axis {a} has a scale for every value")
            if len(sizes) > 1:
                raise ValueError(
                    "Contracting axes must be tiled with the same tile size. "
                    f"Axis {a} of lhs and axis {b} of rhs have tiles of "
                    f"{' and '.join(map(str, sorted(sizes)))}. Quantize both with one tile_size, "
                    "or dequantize() one of them."
                )
            tiles.append(next(iter(sizes), None))
        if group_sizes_ndim != 1 and (any(tiles) or rhs.scale.shape[n.group] != 1):
            return Decision("dequantize", "group sizes differ between batches")
    if found.arithmetic == "int8":
        terms = math.prod(t or lhs.shape[a] for t, a in zip(tiles, n.lhs_contracting, strict=True))
        if may_overflow(lhs, rhs, terms):
            return Decision("dequantize", f"a sum of {terms} products could leave int32")
    return dataclasses.replace(found, tiles=tuple(tiles))


def describe_ragged_dot(
    lhs: Any,
    rhs: Any,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers = _BASIC,
    group_sizes_ndim: int = 1,
    bias: Any = None,
    activation: str | None = None,
) -> str:
    """Which path `ragged_dot` takes for these operands; abstract values are enough.

    >>> import jax, jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> x = jax.eval_shape(lambda: quantize(jnp.ones((8, 4)), 'int8', channelwise_axes=(0,)))
    >>> w = jax.eval_shape(lambda: quantize(jnp.ones((2, 4, 3)), 'nf4', channelwise_axes=(0, 2)))
    >>> describe_ragged_dot(x, w)
    'dequantize + float ragged_dot'
    """
    lhs, rhs = unwrap(lhs), unwrap(rhs)
    native = find_panel_ragged_dot(lhs, rhs, ragged_dot_dimension_numbers)
    if native is not None and group_sizes_ndim == 1:
        return describe_panel_dot(native, lhs, bias, activation)
    lhs, rhs = (
        jax.eval_shape(operand, q) if isinstance(q, PanelArray | Deferred) else q
        for q in (lhs, rhs)
    )
    decision = decide_ragged_dot(lhs, rhs, ragged_dot_dimension_numbers, group_sizes_ndim)
    return decision.describe("ragged_dot")


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` where lhs (M, K) and rhs (G, K, N) may each be an array or a QArray.

    `bias` (N) and `activation` follow the product, as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> experts = quantize(jnp.ones((2, 4, 3)), 'int8', channelwise_axes=(0, 2))
    >>> ragged_dot(jnp.ones((8, 4)), experts, jnp.array([5, 3])).shape
    (8, 3)
    """
    return ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        _BASIC,
        precision,
        preferred_element_type,
        group_offset,
        out_sharding=out_sharding,
        bias=bias,
        activation=activation,
    )


def ragged_dot_general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` where each side may be an array or a QArray.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> x = quantize(jnp.ones((8, 4)), 'int8', channelwise_axes=(0,))
    >>> numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    >>> ragged_dot_general(x, jnp.ones((2, 4, 3)), jnp.array([5, 3]), numbers).shape
    (8, 3)
    """
    lhs, rhs, sizes = held(lhs), held(rhs), jnp.asarray(group_sizes)
    numbers = ragged_dot_dimension_numbers
    native = find_panel_ragged_dot(lhs, rhs, numbers)
    if native is not None and sizes.ndim == 1 and group_offset is None and out_sharding is None:
        dtype = result_dtype((lhs, rhs), preferred_element_type)
        if jnp.issubdtype(dtype, jnp.floating):
            return run_panel_dot(native, lhs, dtype, sizes, bias=bias, activation=activation)
    placing = dict(group_offset=group_offset, out_sharding=out_sharding)
    out = _ragged(lhs, rhs, sizes, numbers, precision, preferred_element_type, placing)
    return finish(out, bias, activation)


def _ragged(
    lhs: Any,
    rhs: Any,
    sizes: jax.Array,
    numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
    preferred: Any,
    placing: dict[str, Any],
) -> jax.Array:
    lhs, rhs = operand(lhs), operand(rhs)
    decision = decide_ragged_dot(lhs, rhs, numbers, sizes.ndim)
    if decision.on_codes:
        dtype = result_dtype((lhs, rhs), preferred)
        return _ragged_on_codes(lhs, rhs, sizes, _Numbers.read(numbers), decision, dtype, placing)
    if decision.arithmetic != "float":
        lhs, rhs = as_floats(lhs, rhs)

    def product(lhs: Any, rhs: Any, **settings: Any) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, **settings)

    return plain_product(product, (lhs, rhs), preferred, precision=precision, **placing)


def _ragged_on_codes(
    lhs: QArray,
    rhs: QArray,
    sizes: jax.Array,
    n: _Numbers,
    decision: Decision,
    dtype: Any,
    placing: dict[str, Any],
) -> jax.Array:
    left = Side(lhs, n.lhs_batch, n.lhs_contracting, decision.tiles)
    group = () if n.group is None else (n.group,)
    right = Side(rhs, n.rhs_batch, n.rhs_contracting, decision.tiles, apart=group)
    n_batch, n_tiled = len(left.batch), len(left.tiled)
    if placing["out_sharding"] is not None and n_tiled:
        asked = sharding_with_tiles(placing["out_sharding"], left, right, n_batch)
        placing = placing | dict(out_sharding=asked)
    total = lax.ragged_dot_general(
        left.codes,
        right.codes,
        sizes,
        lax.RaggedDotDimensionNumbers(
            ((left.contracting, right.contracting), (left.outer, right.outer)),
            [left.place[n.ragged] + (n.ragged in left.tiled)],
            [right.place[axis] for axis in group],
        ),
        preferred_element_type=jnp.int32 if decision.arithmetic == "int8" else jnp.float32,
        **placing,
    )
    wide = scale_dtype_for(dtype, lhs, rhs)
    lhs_scale = left.in_output(scale_in(lhs, wide), len(right.free), leads=True)
    rhs_scale = right.in_output(scale_in(rhs, wide), len(left.free), leads=False)
    if group:
        rhs_scale = _per_row(rhs_scale, sizes, lhs, left.free.index(n.ragged) + len(left.outer), n)
    elif n.ragged in n.lhs_contracting:
        # Summing away a ragged axis gives one product per group, on a new leading axis.
        lhs_scale, rhs_scale = lhs_scale[None], rhs_scale[None]
    total = total.astype(wide)
    total = total * placed_like(lhs_scale, total)
    total = rounded(total * placed_like(rhs_scale, total))
    if n_tiled:
        total = jnp.sum(total, axis=tuple(range(n_batch, n_batch + n_tiled)))
    return total.astype(dtype)


def _per_row(
    scale: jax.Array, sizes: jax.Array, lhs: QArray, row_axis: int, n: _Numbers
) -> jax.Array:
    """Scales with the group axis in front, looked up for each row; the row axis is 1-wide yet."""
    if scale.shape[0] == 1:
        return lax.squeeze(scale, (0,))
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(lhs.shape[n.ragged], dtype=ends.dtype)
    group_of_row = jnp.sum(rows[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    # Rows past the last group are zero in the product, so any finite scale serves them.
    per_row = jnp.take(scale, group_of_row, axis=0, mode="clip")
    return jnp.moveaxis(lax.squeeze(per_row, (row_axis + 1,)), 0, row_axis)


# --- ragged_dot with quantized operands and, when asked, quantized gradients ----------------------

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
    differentiates_rounded: bool = False

    def forward(self, lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any) -> jax.Array:
        return ragged_dot(
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
        settings = self._tiles(side, settings)[0]
        how = gradient_how(settings, noise, _granularity((kept,), summed))
        return check_even_tiles(shape, how, settings, side, self.name)

    def residual_how(self, side: int, settings: GradientSettings, shape: Any) -> HowToQuantize:
        kept, summed = ((0, 1), 2) if side == 0 else ((1,), 0)
        settings = self._tiles(side, settings)[1]
        how = gradient_how(settings, None, _granularity(kept, summed), residual=True)
        return check_even_tiles(shape, how, settings, side, self.name)

    def _tiles(
        self, side: int, settings: GradientSettings
    ) -> tuple[GradientSettings, GradientSettings]:
        if not isinstance(settings.tile_size, Mapping):
            return settings, settings
        ndim, summed = (3, {2: 1}) if side == 0 else (2, {0: 0})
        return tiles_of_both(settings, side, self.name, ndim, summed)

    def gradient(
        self, side: int, g: Any, residual: Any, like: Any, group_sizes: Any, group_offset: Any
    ) -> jax.Array:
        lhs, rhs, numbers = (g, residual, _DLHS) if side == 0 else (residual, g, _DRHS)
        return ragged_dot_general(
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
        tiles = tile_size if isinstance(tile_size, Mapping) else {summed: tile_size}
        return HowToQuantize(
            channelwise_axes=() if disable_channelwise_axes else set(kept).difference(tiles),
            tiled_axes={} if tile_size is None else tiles,
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
        else granularity.ragged_dot_how(
            for_lhs=side == 0,
            **granularity.config_fields(config, side, (2, 3), ([_K], [_K])),
        )
        for side in (0, 1)
    ]
    product = RaggedProduct(precision, preferred_element_type)
    rest = (jnp.asarray(group_sizes), group_offset)
    return run(product, (lhs, rhs), (hows[0], hows[1]), config, rest)
