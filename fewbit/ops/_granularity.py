"""Where the scales of an operand sit: from an op's dimension numbers to a HowToQuantize.

The law is the same for every op. A scale can leave the sum only if it is constant along the summed
axes, so each operand gets one scale per index of every axis that survives into the result, and one
scale (or one per tile) along the axes that are summed away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from opt_einsum import parser as einsum_parser

from fewbit.numerics import format_of
from fewbit.qarray import HowToQuantize
from fewbit.rules import DotGeneralQtConfig

TileSize = int | float | Mapping[int, int | float] | None


def _how(
    ndim: int,
    contracting: Sequence[int],
    tiled_axis: int | None,
    tile_size: TileSize,
    disable_channelwise_axes: bool,
    how_kwargs: Mapping[str, Any],
) -> HowToQuantize:
    if isinstance(tile_size, Mapping):
        tiled = {_positive(axis, ndim): size for axis, size in tile_size.items()}
    elif tile_size is None:
        tiled = {}
    elif tiled_axis is None:
        raise ValueError(
            f"tile_size={tile_size} was given, but the operand of rank {ndim} has no contracting "
            "axis to tile. Remove tile_size, or name the axis: tile_size={axis: size}."
        )
    else:
        tiled = {tiled_axis: tile_size}
    channelwise: Collection[int] = ()
    if not disable_channelwise_axes:
        channelwise = [a for a in range(ndim) if a not in contracting and a not in tiled]
    return HowToQuantize(channelwise_axes=tuple(channelwise), tiled_axes=tiled, **how_kwargs)


def _positive(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"Axis {axis} does not exist in an operand of rank {ndim}.")
    return axis % ndim


def beside(
    tile_size: TileSize,
    ndim: int | None,
    own: Sequence[int],
    other: Sequence[int],
    qtype: Any = None,
) -> TileSize:
    """The tiles of an activation beside a weight of rank `ndim`, whose axes a mapping names.

    `own` and `other` are the axes that are summed over, the activation's and the weight's: tiles of
    these are shared, others are the weight's alone. Without a weight (None) a mapping names
    nothing. An activation without tiles has those of its format, if that insists on some.

    >>> beside({-2: 16, 1: 4}, 2, own=[1], other=[0]), beside({1: 4}, 2, [1], [0])
    ({1: 16}, None)
    >>> beside({1: 32}, 2, own=[1], other=[0], qtype='mxfp8')
    32
    """
    if not isinstance(tile_size, Mapping):
        return tile_size
    shared: dict[int, int | float] = {}
    if ndim is not None:
        tiles = {_positive(axis, ndim): tile for axis, tile in tile_size.items()}
        shared = {a: tiles[b] for a, b in zip(own, other, strict=True) if b in tiles}
    return shared or (None if qtype is None else format_of(qtype).tile)


def config_fields(
    config: DotGeneralQtConfig, side: int, ndims: Sequence[int], summed: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What a config says of an operand; a mapping of tiles names the axes of rhs."""
    fields = config.operand(side)
    if side == 0:
        tiles, qtype = fields["tile_size"], fields["qtype"]
        fields["tile_size"] = beside(tiles, ndims[1], summed[0], summed[1], qtype)
    return fields


def dot_how(
    *,
    dimension_numbers: Any,
    ndims: Sequence[int],
    for_lhs: bool,
    tile_size: TileSize = None,
    disable_channelwise_axes: bool = False,
    **how_kwargs: Any,
) -> HowToQuantize:
    """How to quantize one operand of a `dot_general`; tiles go on its last contracting axis.

    >>> how = dot_how(dimension_numbers=(((1,), (0,)), ((), ())), ndims=(2, 2), for_lhs=False,
    ...               tile_size=128, qtype='int8')
    >>> how.channelwise_axes, dict(how.tiled_axes)
    ((1,), {0: 128})
    """
    side = 0 if for_lhs else 1
    ndim = ndims[side]
    contracting = [_positive(axis, ndim) for axis in dimension_numbers[0][side]]
    tiled_axis = contracting[-1] if contracting else None
    return _how(ndim, contracting, tiled_axis, tile_size, disable_channelwise_axes, how_kwargs)


def split_subscripts(einsum_str: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Expand an einsum string for operands of these ranks: no ellipsis, output written out.

    >>> split_subscripts('ab,bc', (2, 2))
    (['ab', 'bc'], 'ac')
    """
    inputs, output, _ = einsum_parser.parse_einsum_input(
        (einsum_str, *[(1,) * ndim for ndim in ndims]), shapes=True
    )
    return inputs.split(","), output


def summed_axes(einsum_str: str, ndims: Sequence[int]) -> tuple[list[int], list[int]]:
    """The axes that both operands of an einsum have and its result has not, paired.

    >>> summed_axes('bk,nk->bn', (2, 2))
    ([1], [1])
    """
    inputs, output = split_subscripts(einsum_str, ndims)
    if len(inputs) != 2:
        return [], []
    lhs, rhs = inputs
    letters = [letter for letter in lhs if letter in rhs and letter not in output]
    return [lhs.index(letter) for letter in letters], [rhs.index(letter) for letter in letters]


def einsum_how(
    *,
    einsum_str: str,
    ndims: Sequence[int],
    for_lhs: bool,
    tile_size: TileSize = None,
    disable_channelwise_axes: bool = False,
    **how_kwargs: Any,
) -> HowToQuantize:
    """How to quantize one operand of a two-operand einsum.

    Tiles go on the operand's last summed axis in its own order, so with several summed letters the
    two operands may tile different ones.

    >>> how = einsum_how(einsum_str='btd,dnh->btnh', ndims=(3, 3), for_lhs=False, qtype='int8')
    >>> how.channelwise_axes
    (1, 2)
    """
    if len(ndims) != 2:
        raise ValueError(
            f"Unsupported einsum format: einsum_str={einsum_str!r} with {len(ndims)} operands. "
            "Scales are planned for two operands; quantize each operand of a longer einsum with "
            "fewbit.quantize and pass them to fewbit.einsum."
        )
    labels, output = split_subscripts(einsum_str, ndims)
    side = 0 if for_lhs else 1
    contracting = [axis for axis, label in enumerate(labels[side]) if label not in output]
    tiled_axis = contracting[-1] if contracting else None
    return _how(
        ndims[side], contracting, tiled_axis, tile_size, disable_channelwise_axes, how_kwargs
    )


def conv_how(
    *,
    dimension_numbers: Any,
    for_lhs: bool,
    tile_size: TileSize = None,
    disable_channelwise_axes: bool = False,
    **how_kwargs: Any,
) -> HowToQuantize:
    """How to quantize one operand of a convolution: scales on batch (lhs) or output feature (rhs).

    `dimension_numbers` is what `jax.lax.conv_dimension_numbers` gives.

    >>> dn = jax.lax.conv_dimension_numbers((8, 32, 32, 3), (3, 3, 3, 16), ('NHWC', 'HWIO', 'NHWC'))
    >>> conv_how(dimension_numbers=dn, for_lhs=False, qtype='int8').channelwise_axes
    (3,)
    """
    if tile_size is not None:
        raise ValueError(
            "subchannel is not supported for conv_general_dilated. "
            f"Remove tile_size={tile_size} from the rule for convolutions."
        )
    if not isinstance(dimension_numbers, jax.lax.ConvDimensionNumbers):
        raise TypeError(
            f"conv_how needs jax.lax.ConvDimensionNumbers, got {dimension_numbers!r}. Make them "
            "with jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)."
        )
    spec = dimension_numbers.lhs_spec if for_lhs else dimension_numbers.rhs_spec
    summed = [axis for axis in spec if axis != spec[0]]
    return _how(len(spec), summed, None, None, disable_channelwise_axes, how_kwargs)


def ragged_dot_how(
    *,
    for_lhs: bool,
    tile_size: TileSize = None,
    disable_channelwise_axes: bool = False,
    **how_kwargs: Any,
) -> HowToQuantize:
    """How to quantize one operand of `ragged_dot`: (M, K) per row, (G, K, N) per group and N.

    >>> ragged_dot_how(for_lhs=False, qtype='int8').channelwise_axes
    (0, 2)
    """
    ndim = 2 if for_lhs else 3
    return _how(ndim, [1], 1, tile_size, disable_channelwise_axes, how_kwargs)


def take_how(
    ndim: int,
    axis: int = 0,
    tile_size: TileSize = None,
    disable_channelwise_axes: bool = False,
    **how_kwargs: Any,
) -> HowToQuantize:
    """How to quantize a table looked up along `axis`: one scale per row, tiles on the last axis.

    >>> how = take_how(2, tile_size=32, qtype='int4')
    >>> how.channelwise_axes, dict(how.tiled_axes)
    ((0,), {1: 32})
    """
    row = _positive(axis, ndim)
    summed = [a for a in range(ndim) if a != row]
    tiled_axis = summed[-1] if summed else None
    return _how(ndim, summed, tiled_axis, tile_size, disable_channelwise_axes, how_kwargs)
