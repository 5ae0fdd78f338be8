"""How a quantized parameter is stored: in what this machine's kernels read, or at true width.

`pack` and `unpack` exchange layouts of whole trees; there is never a second copy of the codes. A
float parameter is quantized into its layout in slices, where it is large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fewbit.kernels._library import native_available
from fewbit.numerics import convert_to, dtype_bits, format_of
from fewbit.qarray import (
    COLUMNS,
    ROWS,
    HowToQuantize,
    QArray,
    WithAux,
    calibrate,
    check_tree,
    compute_scales,
    get_scale_shape,
    get_tile_shape,
    in_variables,
    is_part,
    is_stored,
    is_variable,
    matrix_length,
    pack_whole,
    padded,
    parse_method,
    part_values,
    quantize_with,
    slice_how,
    to_panels,
    uneven_tiles,
    units,
    why_no_panels,
)
from fewbit.qarray import pack as pack_codes
from fewbit.qarray import unpack as unpack_codes

_MSG_LAYOUT = (
    "pack(tree, layout={found!r}) is not known: 'native' (what this machine's kernels read) or "
    "'bits' (codes at true width, as bytes). fewbit.unpack(tree) gives one code per element."
)
# A matrix that padding to whole panels would blow up by more than this stays as it is. 48, 96, 100
# or 200 columns are still multiplied as fast as by XLA or up to five times faster; at twice the
# width (33 columns) many rows are not (docs/performance.md).
_MOST_PADDING = 1.34
# The kernel of a convolution is read once per image, not once per row, and is small.
_MOST_CONV_PADDING = 2.75
_ELSEWHERE = "elsewhere"


def for_kernels(q: QArray, how: HowToQuantize) -> QArray:
    """The array in panels where a native kernel will read it, else as it is.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize_with
    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(1,), roles='kn')
    >>> for_kernels(quantize_with(jnp.ones((4, 3)), how), how).layout  # mostly padding
    'plain'
    """
    if not _fits_panels(q, how):
        return q
    roles = str(how.roles)
    packed = to_panels(q, roles)
    names = _column_names(q, roles)
    if names is None:
        return packed
    mesh, stack = q.data.sharding.mesh, roles.count("l")

    def place(part):  # every part has its panels behind the stack axes, but a tensor's one scale
        spec = PartitionSpec(*[None] * stack, names) if part.ndim > stack + 2 else PartitionSpec()
        return jax.device_put(part, NamedSharding(mesh, spec))

    return jax.tree.map(place, packed)


def would_be_faster(q: QArray, how: HowToQuantize) -> bool:
    """Whether native kernels would read this parameter if it were packed."""
    roles = how.roles
    if roles is None or q.layout == "panels" or not native_available():
        return False
    if len(roles) != q.ndim or why_no_panels(q, roles) is not None:
        return False
    k, n = (matrix_length(q.shape, roles, role) for role in "kn")
    most = _MOST_CONV_PADDING if "c" in roles else _MOST_PADDING
    return padded(k, ROWS) * padded(n, COLUMNS) <= most * k * n


def _fits_panels(q: QArray, how: HowToQuantize) -> bool:
    return would_be_faster(q, how) and _column_names(q, str(how.roles)) != _ELSEWHERE


def _column_names(q: QArray, roles: str) -> Any:
    """The mesh axes that share the columns (None: no mesh, or whole on each device).

    `_ELSEWHERE` where panels cannot be placed so: the summed or the stack axes are split, a panel
    would be cut open, or where the array will live is not known yet.
    """
    if isinstance(q.data, jax.core.Tracer):
        return _ELSEWHERE
    sharding = getattr(q.data, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None if sharding.mesh.size <= 1 else _ELSEWHERE
    if sharding is None or len(sharding.device_set) == 1 or sharding.is_fully_replicated:
        return None
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit in sharding.mesh.axis_types:
        return _ELSEWHERE
    spec = (*sharding.spec, *[None] * q.ndim)[: q.ndim]
    first = roles.index("n")
    if any(entry is not None for axis, entry in enumerate(spec) if axis != first):
        return _ELSEWHERE
    names = (spec[first],) if isinstance(spec[first], str) else tuple(spec[first])
    ways = math.prod(sharding.mesh.shape[name] for name in names)
    columns = math.prod(d for d, r in zip(q.shape, roles, strict=True) if r == "n")
    return names if columns % (ways * COLUMNS) == 0 and q.shape[first] % ways == 0 else _ELSEWHERE


def pack(tree: Any, *, layout: str = "native") -> Any:
    """Every quantized parameter in the layout that this machine's kernels read.

    Parameters that no kernel reads get their codes at true width (int3 in 3 bits); those whose type
    is as narrow as its codes stay as they are, one code per element.

    `layout='bits'` gives all of them codes at true width, as bytes: the form for files of other
    libraries, which need not know a type of 4 bits. `pack(tree)` makes it this machine's again.

    >>> import jax.numpy as jnp
    >>> import fewbit
    >>> pack({'w': fewbit.quantize(jnp.ones(16), 'int4')})['w'].layout
    'bits'
    """
    check_tree("pack", tree)
    if layout not in ("native", "bits"):
        raise ValueError(_MSG_LAYOUT.format(found=layout))

    def packed(q: QArray, how: HowToQuantize) -> QArray:
        if layout == "bits":
            return pack_codes(unpack_codes(q))
        if _fits_panels(q, how):
            return for_kernels(unpack_codes(q), how)
        if q.layout == "panels":
            return q
        row = format_of(q.qtype)  # int3 takes more memory than its codes, int4 does not
        return pack_codes(q) if dtype_bits(row.storage) > row.bits else unpack_codes(q)

    return _each(tree, packed, pack_codes)


def unpack(tree: Any) -> Any:
    """Every quantized parameter with one element of its storage type per code.

    >>> import jax.numpy as jnp
    >>> import fewbit
    >>> unpack(pack({'w': fewbit.quantize(jnp.ones(16), 'int4')}))['w'].layout
    'plain'
    """
    check_tree("unpack", tree)
    return _each(tree, lambda q, how: unpack_codes(q), unpack_codes)


_MSG_STATE = (
    "A state of an NNX model holds the parts of its quantized weights one by one, and does not say "
    "what they are together. Give the model: {instead}."
)


def refuse_parts(tree: Any, instead: str) -> None:
    """Raise if a tree holds parts of stored weights without the weights, as an NNX state does.

    >>> refuse_parts({'w': jnp.ones(3)}, 'fewbit.pack(model)')
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: is_stored(x) or is_variable(x))
    if any(map(is_part, leaves)):
        raise TypeError(_MSG_STATE.format(instead=instead))


def _each(tree: Any, planned: Callable[..., QArray], bare: Callable[[QArray], QArray]) -> Any:
    """The tree with `planned(q, how)` or `bare(q)` of every QArray in it."""
    refuse_parts(tree, "nnx.state(fewbit.pack(model))")

    def one(x):
        if isinstance(x, WithAux) and isinstance(x.array, QArray):
            if is_variable(x.array.data):  # of an NNX model
                return in_variables(one(part_values(x)), x.array.data)
            return x.replace(array=planned(x.array, x.how))
        return bare(x) if isinstance(x, QArray) else x

    return jax.tree.map(one, tree, is_leaf=is_stored)


# --- A float parameter as it is stored: quantized, and in its layout ------------------------------

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
        if not isinstance(numbers, jax.core.Tracer) and bool(numbers):
            return packed, scale  # else in the layout of all that is stored in a traced program
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
    # The smallest slices: those with the least part of an axis.
    size = lambda cut: array.size // array.shape[cut.axis] * cut.length  # noqa: E731
    return min(found, key=size, default=None)


def _cuts(shape: Sequence[int], roles: str, itemsize: int) -> list[_Cut]:
    """Along a stack axis, or along the outermost column axis at whole panels."""
    first = roles.index("n")
    columns = [n for n, role in zip(shape, roles, strict=True) if role == "n"]
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


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _in_slices(
    array: jax.Array, how: HowToQuantize, measured: HowToQuantize, cut: _Cut
) -> tuple[QArray, jax.Array, jax.Array]:
    """The parameter in panels, its scales, and whether every code is a number."""
    roles, axis = str(how.roles), cut.axis
    tiles = get_tile_shape(array.shape, measured)
    ranges = _ranges(array, measured, tiles, cut)
    scale, zero, tensor = compute_scales(ranges, measured.qtype, measured.scale_dtype)
    shared = measured is not how
    kept = jnp.broadcast_to(scale, get_scale_shape(array.shape, how)) if shared else scale
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
    parts, numbers = _over(cut, array.shape[axis], write, (parts, jnp.asarray(True)))
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
