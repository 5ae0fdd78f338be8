"""A float parameter as it is stored: quantized, and in the layout that this machine's kernels read.

Quantizing and packing write several arrays of the parameter's size. A big one is therefore cut into
slices of whole panels, each quantized, packed and written to its place: beside the floats there are
only the result and one slice. A code depends on its own scale alone, and a range that is a maximum
does not depend on the order in which it is taken, so the bytes are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._how import slice_how
from fewbit._methods import parse_method
from fewbit._qarray_panels import pack_whole
from fewbit._scales import compute_scales, units
from fewbit.calibration import calibrate
from fewbit.layouts import for_kernels, would_be_faster
from fewbit.numerics import convert_to, format_of
from fewbit.packing_panels import COLUMNS
from fewbit.qarray import HowToQuantize, QArray, get_scale_shape, get_tile_shape, quantize_with
from fewbit.tiling import uneven_tiles

SLICE_BYTES = 4 * 2**20
BIG = 4 * SLICE_BYTES  # smaller parameters are not worth a program of their own

_quantize = jax.jit(quantize_with, static_argnums=1)


def quantize_for_kernels(
    array: jax.Array, how: HowToQuantize, measured: HowToQuantize | None = None
) -> tuple[QArray, jax.Array]:
    """The stored form of a float parameter, and its scales.

    With `measured` the range is taken as that says, and the scales are kept in the shape of `how`:
    one scale of a tensor, once per channel, is what kernels read.

    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(1,), roles='kn')
    >>> quantize_for_kernels(jnp.ones((4, 3)), how, how.replace(channelwise_axes=()))[0]
    QArray(qvalue=int8[4,3], scale=float32[1,3], qtype=int8)
    """
    ours = how.replace(rule=None)
    cut = _cut(array, ours, measured or ours)
    if cut is not None:
        packed, scale, numbers = _in_slices(array, ours, (measured or ours).replace(rule=None), cut)
        if bool(numbers):
            return packed, scale
    q, scale = quantize_plain(array, how, measured)
    return for_kernels(q, how), scale


def quantize_plain(
    array: jax.Array, how: HowToQuantize, measured: HowToQuantize | None = None
) -> tuple[QArray, jax.Array]:
    """As `quantize_for_kernels`, with one code per element."""
    # The rule changes nothing here, and each layer may have its own: compiled once without it.
    q = _quantize(array, (measured or how).replace(rule=None))
    if measured is not None:
        q = q.replace(scale=jnp.broadcast_to(q.scale, get_scale_shape(q.shape, how)))
    return q, q.scale


@dataclass(frozen=True)
class _Cut:
    """Slices of `length` indices of an axis: of a stack, or with `columns` columns to each."""

    axis: int
    length: int
    columns: int = 0

    def place(self, stack: int) -> int:
        """The axis of the packed parts along which slices lie."""
        return stack if self.columns else self.axis

    def begin(self, start: Any) -> Any:
        """Where the slice from `start` on begins there."""
        return start * self.columns // COLUMNS if self.columns else start


def _cut(array: Any, how: HowToQuantize, measured: HowToQuantize) -> _Cut | None:
    """How to cut a parameter; None for one that is small, or has to stay whole."""
    if isinstance(array, jax.core.Tracer) or array.nbytes < BIG or len(array.devices()) > 1:
        return None
    row = format_of(how.qtype)
    # Sums depend on their order: the mean of a sign type, rms; a search of the best range too.
    orderly = parse_method(measured.calibration_method).name in ("absmax", "minmax", "fixed")
    if not orderly or row.kind == "sign" or measured.noise_fn is not None:
        return None
    plain = functools.partial(quantize_plain, how=how, measured=measured)
    if not would_be_faster(jax.eval_shape(plain, array)[0], how):
        return None
    tiles, kept = (get_tile_shape(array.shape, each) for each in (measured, how))
    found = [
        cut
        for cut in _cuts(array.shape, str(how.roles), array.dtype.itemsize)
        if all(tile[cut.axis] in (1, array.shape[cut.axis]) for tile in (tiles, kept))
    ]
    return min(found, key=lambda cut: _size(array.shape, cut), default=None)


def _cuts(shape: Sequence[int], roles: str, itemsize: int) -> list[_Cut]:
    """Along a stack axis, or along the outermost column axis at whole panels."""
    first, columns = (
        roles.index("n"),
        [n for n, role in zip(shape, roles, strict=True) if role == "n"],
    )
    inner = math.prod(columns[1:])
    units_ = {axis: (1, 0) for axis, role in enumerate(roles) if role == "l"}
    units_[first] = (COLUMNS // math.gcd(COLUMNS, inner), inner)
    cuts = []
    for axis, (unit, per_index) in units_.items():
        each = math.prod(shape) // shape[axis] * itemsize
        length = max(unit, SLICE_BYTES // each // unit * unit)
        if length < shape[axis]:
            cuts.append(_Cut(axis, length, per_index))
    return cuts


def _size(shape: Sequence[int], cut: _Cut) -> int:
    return math.prod(shape) // shape[cut.axis] * cut.length


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _in_slices(
    array: jax.Array, how: HowToQuantize, measured: HowToQuantize, cut: _Cut
) -> tuple[QArray, jax.Array, jax.Array]:
    """The parameter in panels, its scales, and whether every code is a number."""
    roles, axis = str(how.roles), cut.axis
    tiles = get_tile_shape(array.shape, measured)
    ranges = _ranges(array, measured, tiles, cut)
    scale, zero, tensor = compute_scales(ranges, measured.qtype, measured.scale_dtype)
    kept = scale
    if measured is not how:
        kept = jnp.broadcast_to(scale, get_scale_shape(array.shape, how))
    kept_tiles = get_tile_shape(array.shape, how)

    def along(part, start, length):
        if part is None or part.shape[axis] == 1:
            return part
        return jax.lax.dynamic_slice_in_dim(part, start, length, axis)

    def quantized(start, length):
        piece = along(array, start, length)
        own, own_zero, own_kept = (along(part, start, length) for part in (scale, zero, kept))
        codes = units(piece, own, own_zero, tensor, _narrowed(tiles, axis, length))
        q = QArray(
            convert_to(codes, how.qtype),
            own_kept,
            own_zero,
            how.qtype,
            tensor_scale=tensor,
            tiles=uneven_tiles(piece.shape, own_kept.shape, _narrowed(kept_tiles, axis, length)),
        )
        return q.with_dtype(array.dtype)

    def write(carry, start, length):
        parts, numbers = carry
        q = quantized(start, length)
        if str(q.data.dtype).startswith("float8"):
            numbers &= jnp.isfinite(q.data.astype(jnp.float32)).all()
        place, begin = cut.place(roles.count("l")), cut.begin(start)
        new = pack_whole(q, roles).packed_parts[:3]
        return jax.tree.map(
            lambda part, piece: jax.lax.dynamic_update_slice_in_dim(part, piece, begin, place),
            parts,
            new,
        ), numbers

    whole = jax.eval_shape(lambda: pack_whole(quantized(0, array.shape[axis]), roles))
    parts = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), whole.packed_parts[:3])
    start = (parts, jnp.asarray(True))
    parts, numbers = _over(cut, array.shape[axis], write, start)
    leaves = [part for part in (*parts, tensor) if part is not None]
    return jax.tree.unflatten(jax.tree.structure(whole), leaves), kept, numbers


def _ranges(
    array: jax.Array, how: HowToQuantize, tiles: tuple[int, ...], cut: _Cut
) -> dict[str, jax.Array]:
    """`calibrate` of the whole array, a slice at a time."""
    if parse_method(how.calibration_method).name == "fixed":
        return calibrate(array, how)
    wanted = jax.eval_shape(lambda x: calibrate(x, how), array)

    def widen(ranges, start, length):
        piece = jax.lax.dynamic_slice_in_dim(array, start, length, cut.axis)
        own = calibrate(piece, slice_how(piece.shape, tiles, how))

        def one(name, old, new):
            if old.shape[cut.axis] > 1:
                return jax.lax.dynamic_update_slice_in_dim(old, new, start, cut.axis)
            return (jnp.minimum if name == "min" else jnp.maximum)(old, new)

        return {name: one(name, ranges[name], new) for name, new in own.items()}

    # Every range holds zero.
    start = {name: jnp.zeros(edge.shape, edge.dtype) for name, edge in wanted.items()}
    return _over(cut, array.shape[cut.axis], widen, start)


def _over(cut: _Cut, dim: int, body: Callable[[Any, Any, int], Any], start: Any) -> Any:
    """`body(carry, start, length)` over all slices; the last may be shorter."""
    whole, rest = divmod(dim, cut.length)
    carry = jax.lax.fori_loop(
        0, whole, lambda i, carry: body(carry, i * cut.length, cut.length), start
    )
    return body(carry, whole * cut.length, rest) if rest else carry


def _narrowed(tiles: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    """Tiles of a slice: an axis that shares one scale is shorter there."""
    return (*tiles[:axis], min(tiles[axis], length), *tiles[axis + 1 :])
