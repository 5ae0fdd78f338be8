"""Products of QArrays inside Pallas kernels, and the call that hands QArrays to a kernel.

A kernel's body is its own small program: no kernel of ours can be called there, and what surrounds
it sees one opaque equation. So these are plain products, one for each tile of what is summed over,
scaled and added up.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit._util import describe
from fewbit.numerics import convert_from, format_of
from fewbit.ops import _granularity as granularity
from fewbit.ops._operand import result_dtype
from fewbit.qarray import QArray, dequantize, expand

_MSG_TILES = (
    "Contracting axes must be tiled with the same tile size: axis {l} of lhs has tiles of {left}, "
    "axis {r} of rhs tiles of {right}. Quantize both with one tile_size."
)
_MSG_EINSUM = (
    "einsum inside a kernel multiplies two operands, with every letter once in each and none "
    "summed out of one operand alone; got {text!r} with {n} operands. Sum first, or multiply pairs."
)
_MSG_LAYOUT = (
    "pallas_call got a QArray whose codes are packed (layout={layout!r}), which a block of its "
    "elements cannot be cut from. Unpack it: fewbit.unpack(q)."
)
_MSG_BLOCK = (
    "pallas_call cannot cut the scales of a {shape} QArray, {scale}, into blocks of {block}: on "
    "axis {axis} a block of {size} holds no whole number of tiles of {tile}. Choose blocks that "
    "are multiples of the tiles, or tiles that are multiples of the blocks."
)
_MSG_SPEC = (
    "pallas_call needs a pallas.BlockSpec with a block_shape for an operand that is a QArray, got "
    "{found}. The specs of codes and scales are made of it."
)


def tiled_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    preferred_element_type: Any = None,
    **kwargs: Any,
) -> jax.Array:
    """`fewbit.dot_general` for the body of a Pallas kernel; either side may be a QArray.

    >>> from fewbit.qarray import quantize
    >>> w = quantize(jnp.eye(4), 'int8', channelwise_axes=(1,), tiled_axes={0: 2})
    >>> print(tiled_dot_general(jnp.ones((1, 4)), w, (((1,), (0,)), ((), ()))).round(2))
    [[1. 1. 1. 1.]]
    """
    (lc, rc), (lb, rb) = (
        tuple(tuple(int(a) for a in axes) for axes in pair) for pair in dimension_numbers
    )
    dtype = result_dtype((lhs, rhs), preferred_element_type)
    left, right = _Side.of(lhs, (lc, lb)), _Side.of(rhs, (rc, rb))
    codes = [side.codes for side in (left, right)]
    whole = all(jnp.issubdtype(x.dtype, jnp.integer) for x in codes)
    if not whole:  # codes beside floats are numbers of the float's type
        floats = [side.codes.dtype for side in (left, right) if side.scale is None]
        compute = floats[0] if floats else jnp.promote_types(*(_wide(x.dtype) for x in codes))
        codes = [x.astype(compute) for x in codes]
    accumulator = jnp.int32 if whole else dtype
    counts = [_tiles(left, right, l, r) for l, r in zip(lc, rc, strict=True)]
    free = left.codes.ndim - len(lc) - len(lb), right.codes.ndim - len(rc) - len(rb)
    total = None
    for tile in itertools.product(*map(range, counts)):
        parts = [_part(x, axes, tile, counts) for x, axes in zip(codes, (lc, rc), strict=True)]
        numbers = ((lc, rc), (lb, rb))
        out = lax.dot_general(
            parts[0], parts[1], numbers, preferred_element_type=accumulator, **kwargs
        )
        out = out.astype(dtype)
        for side, before, after in ((left, 0, free[1]), (right, free[0], 0)):
            if side.scale is not None:
                out = out * side.scale_of(tile, counts, before, after).astype(dtype)
        total = out if total is None else total + out
    assert total is not None
    return total


def tiled_dot(
    a: Any, b: Any, precision: Any = None, preferred_element_type: Any = None
) -> jax.Array:
    """`fewbit.dot` for the body of a Pallas kernel.

    >>> from fewbit.qarray import quantize
    >>> tiled_dot(jnp.ones((2, 4)), quantize(jnp.eye(4), 'int8')).shape
    (2, 4)
    """
    numbers = ((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ())
    return tiled_dot_general(a, b, numbers, preferred_element_type, precision=precision)


def tiled_einsum(
    subscripts: str, *operands: Any, preferred_element_type: Any = None, **kwargs: Any
) -> jax.Array:
    """`fewbit.einsum` of two operands for the body of a Pallas kernel.

    >>> from fewbit.qarray import quantize
    >>> tiled_einsum('mk,nk->nm', jnp.ones((2, 4)), quantize(jnp.ones((3, 4)), 'int8')).shape
    (3, 2)
    """
    bad = _MSG_EINSUM.format(text=subscripts, n=len(operands))
    if len(operands) != 2:
        raise ValueError(bad)
    (left, right), out = granularity.split_subscripts(subscripts, [x.ndim for x in operands])
    alone = {*left} ^ {*right}
    if len({*left}) < len(left) or len({*right}) < len(right) or alone - {*out}:
        raise ValueError(bad)
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in left if c in right and c not in out]
    numbers = tuple(
        tuple(tuple(side.index(c) for c in letters) for side in (left, right))
        for letters in (summed, batch)
    )
    made = tiled_dot_general(*operands, numbers, preferred_element_type, **kwargs)
    order = [*batch, *(c for c in left if c not in right), *(c for c in right if c not in left)]
    wanted = [order.index(c) for c in out]
    return made if wanted == sorted(wanted) else made.transpose(wanted)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand: its codes, its scales if it has any, and its axes (contracting, batch)."""

    codes: jax.Array
    scale: jax.Array | None
    tiles: tuple[int, ...]
    axes: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, x: Any, axes: Any) -> _Side:
        if (
            isinstance(x, QArray)
            and x.zero_point is None
            and x.tensor_scale is None
            and not x.tiles
        ):
            codes = x.qvalue
            if format_of(x.qtype).kind == "table":
                codes = convert_from(codes, x.qtype)
            scale = x.scale.astype(_wide(x.scale.dtype))
            return cls(codes, scale, tuple(x.tile_shape), axes)
        array = dequantize(x) if isinstance(x, QArray) else x
        return cls(array, None, tuple(array.shape), axes)

    def tile_of(self, axis: int) -> int | None:
        """The length of the tiles along an axis that is summed over, None if it is one."""
        return None if self.scale is None or self.scale.shape[axis] == 1 else self.tiles[axis]

    def scale_of(
        self, tile: Sequence[int], counts: Sequence[int], before: int, after: int
    ) -> jax.Array:
        """The scale of one tile in the axes of the result, with axes of 1 for the other side."""
        summed, batch = self.axes
        assert self.scale is not None
        scale = _part(self.scale, summed, tile, counts)
        kept = [a for a in range(scale.ndim) if a not in summed]
        scale = scale.reshape([scale.shape[a] for a in kept])
        scale = expand(
            scale, [_or_one(self.codes, self.scale, a) for a in kept], [self.tiles[a] for a in kept]
        )
        order = [kept.index(a) for a in batch]
        order += [i for i in range(len(kept)) if i not in order]
        if order != sorted(order):
            scale = scale.transpose(order)
        n = len(batch)
        return scale.reshape([*scale.shape[:n], *[1] * before, *scale.shape[n:], *[1] * after])


def _or_one(codes: jax.Array, scale: jax.Array, axis: int) -> int:
    return 1 if scale.shape[axis] == 1 else codes.shape[axis]


def _wide(dtype: Any) -> Any:
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize > 1 else jnp.dtype(jnp.float32)


def _tiles(left: _Side, right: _Side, l: int, r: int) -> int:
    """Into how many tiles a pair of axes is cut that is summed over."""
    sizes = left.tile_of(l), right.tile_of(r)
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(_MSG_TILES.format(l=l, r=r, left=sizes[0], right=sizes[1]))
    size = sizes[0] or sizes[1]
    return 1 if size is None else left.codes.shape[l] // size


def _part(x: jax.Array, axes: Sequence[int], tile: Sequence[int], counts: Sequence[int]) -> Any:
    """One tile along each of the axes that are summed over."""
    for axis, i, n in zip(axes, tile, counts, strict=True):
        if n > 1 and x.shape[axis] > 1:
            size = x.shape[axis] // n
            x = lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis)
    return x


# --- The call -------------------------------------------------------------------------------------


def quantized_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid_spec: Any = None,
    grid: Any = (),
    in_specs: Any = None,
    out_specs: Any = None,
    scratch_shapes: Any = (),
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.experimental.pallas.pallas_call`, whose operands may be QArrays.

    Specs are those of the float arrays: a QArray's `BlockSpec` is made into one for its codes and
    one for its scales. The kernel gets the QArray of what it would have got; `q[...]` loads it.
    Arguments that are no QArrays pass through unchanged.

    >>> import fewbit.pallas as qpl
    >>> w = qpl.quantize(jnp.eye(8), 'int8', channelwise_axes=(1,))
    >>> def kernel(x_ref, w_ref, out_ref):
    ...     out_ref[...] = qpl.dot(x_ref[...], w_ref[...])
    >>> out = jax.ShapeDtypeStruct((4, 8), 'float32')
    >>> qpl.pallas_call(kernel, out, interpret=True)(jnp.ones((4, 8)), w).shape
    (4, 8)
    """
    from jax.experimental import pallas as pl

    if grid_spec is None:
        specs = pl.no_block_spec if in_specs is None else in_specs
        outs = pl.no_block_spec if out_specs is None else out_specs
        grid_spec = pl.GridSpec(grid, specs, outs, scratch_shapes)

    def call(*args: Any) -> Any:
        spec = copy.copy(grid_spec)
        first = getattr(spec, "num_scalar_prefetch", 0)
        is_q = lambda x: isinstance(x, QArray)  # noqa: E731
        if spec.in_specs is not pl.no_block_spec and any(
            map(is_q, jax.tree.leaves(args, is_leaf=is_q))
        ):
            pairs = zip(spec.in_specs, args[first:], strict=True)
            spec.in_specs = tuple(_with_scales(given, arg, pl.BlockSpec) for given, arg in pairs)
        return pl.pallas_call(kernel, out_shape, grid_spec=spec, **kwargs)(*args)

    return call


def _with_scales(spec: Any, arg: Any, kind: type) -> Any:
    """The specs of an argument's parts; QArrays may stand inside it."""
    if isinstance(arg, QArray):
        return _parts_of(spec, arg, kind)
    if isinstance(spec, kind) or spec is None:
        return spec
    leaf = lambda s: s is None or isinstance(s, kind)  # noqa: E731
    return jax.tree.map(lambda s, a: _with_scales(s, a, kind), spec, arg, is_leaf=leaf)


def _parts_of(spec: Any, q: QArray, kind: type) -> QArray:
    """A QArray of specs."""
    if q.layout != "plain":
        raise ValueError(_MSG_LAYOUT.format(layout=q.layout))
    block = getattr(spec, "block_shape", None)
    if not isinstance(spec, kind) or block is None:
        raise TypeError(_MSG_SPEC.format(found=describe(spec)))
    leaves, tree = jax.tree.flatten(q)
    return jax.tree.unflatten(tree, [spec, *(_scale_spec(spec, q, part) for part in leaves[1:])])


def _scale_spec(spec: Any, q: QArray, part: Any) -> Any:
    """The spec of scales or zero points beside that of the codes."""
    block: list[int | None] = []
    blocks_in_a_tile: dict[int, int] = {}
    for axis, (size, n, dim) in enumerate(zip(spec.block_shape, part.shape, q.shape, strict=True)):
        if size is None or n == 1:
            block.append(None if size is None else 1)
            continue
        tile = q.tile_shape[axis]
        if dim % n or not isinstance(size, int) or (size % tile and tile % size):
            text = dict(shape=q.shape, scale=part.shape, block=spec.block_shape, axis=axis)
            raise ValueError(_MSG_BLOCK.format(size=size, tile=tile, **text))
        block.append(max(size // tile, 1))
        if size < tile:
            blocks_in_a_tile[axis] = tile // size

    def index_map(*grid: Any) -> tuple[Any, ...]:
        places = enumerate(zip(spec.index_map(*grid), part.shape, strict=True))
        return tuple(0 if n == 1 else i // blocks_in_a_tile.get(a, 1) for a, (i, n) in places)

    return dataclasses.replace(spec, block_shape=tuple(block), index_map=index_map)
