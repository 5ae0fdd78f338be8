"""PanelArray: a QArray whose bytes lie in panels for the native kernels, seen as the array it is.

Packing fixes what is summed over: each axis of the parameter is a stack axis, a summed one ('k',
'c') or a column axis ('n'), and the bytes are the matrix [K, N] of each entry of the stack. The
axes the program sees are pieces of those; transposes and reshapes regroup them and never touch a
byte, and an entry of the stack is a number beside the bytes. What cannot be said so is unpacked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit.numerics import FORMATS, format_of
from fewbit.qarray import _layout_moves, _lookup
from fewbit.qarray._layout_moves import CannotMove, axis_of, fill_in
from fewbit.qarray._packing_panels import (
    COLUMNS,
    offset,
    pack_panels,
    pack_parts,
    unpack_panels,
    unpack_parts,
)
from fewbit.qarray._tiles import infer_tile_shape, uneven_tiles
from fewbit.qarray._type import QArray, is_variable, part_values, unpacked
from fewbit.qarray._views import Axes, reshape_axes, whole_axes

PACKED_AXES = 5  # panels, blocks, words, columns, bytes
SUMMED = "kc"  # roles of summed axes; 'c', a convolution's input channels, lie innermost
_NO_PANELS = {"int16", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"}
_NO_PANELS |= {"float8_e4m3", "float8_e3m4"}
_MSG_EXPLICIT = (
    "{weight!r} is split over an explicit mesh, where panels cannot be followed. Place the plain "
    "form: jax.device_put(fewbit.unpack(params), ...) of parameters that are not split yet, or "
    "quantize parameters that are placed already."
)
_PARTS = ("data", "_scale", "_zero_point", "_tensor_scale", "_layer")
_KEYS = ("qvalue", "scale", "zero_point", "tensor_scale", "i")


@dataclasses.dataclass(frozen=True)
class Panels:
    """What the bytes stand for: the packed parameter's axes, and the array's as pieces of them.

    Stack axes are not counted here: they lead, and `vmap` may take them away. `tile` is the number
    of rows that share a scale (0: all).
    """

    roles: str
    dims: tuple[int, ...]
    scale_dims: tuple[int, ...]
    tile: int
    axes: Axes
    indexed: int = 0  # stack axes that the layer number has taken

    def length(self, role: str) -> int:
        """K or N."""
        return matrix_length(self.dims, self.roles, role)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(atom.size for atom in group) for group in self.axes)


def matrix_length(dims: Sequence[int], roles: str, role: str) -> int:
    """K ('k') or N ('n') of the matrix that axes of these sizes and roles are packed as.

    >>> matrix_length((3, 3, 64, 128), 'kkcn', 'k')
    576
    """
    which = SUMMED if role == "k" else role
    return math.prod(d for d, r in zip(dims, roles, strict=True) if r in which)


@jax.tree_util.register_pytree_with_keys_class
class PanelArray(QArray):
    """A QArray in panels; `qvalue`, `scale` and `zero_point` unpack on demand.

    >>> q = QArray(jnp.ones((64, 32), jnp.int8), jnp.ones((1, 32)))
    >>> p = to_panels(q, 'kn')
    >>> p.layout, p.shape, p.T.shape, p.data.shape
    ('panels', (64, 32), (32, 64), (1, 2, 8, 64, 4))
    """

    __slots__ = ("_layer",)
    if TYPE_CHECKING:
        _layer: Any

    def __new__(cls, *parts: Any, _copied: Any = None, **fields: Any) -> Any:
        # `dataclasses.replace` has read the parts one code per element.
        return QArray(**fields, _copied=_copied) if _copied is not None else object.__new__(cls)

    def __init__(self, *parts: Any, static: Any):
        self._set(*parts[:4], static)
        object.__setattr__(self, "_layer", parts[4] if len(parts) > 4 else None)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        keys = map(jax.tree_util.GetAttrKey, _KEYS)
        return tuple(zip(keys, self._parts(), strict=True)), self._static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> PanelArray:
        return PanelArray(*children, static=static)

    def __reduce__(self) -> Any:
        return PanelArray.tree_unflatten, (self._static, self._parts())

    def _parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _PARTS)

    @property
    def panels(self) -> Panels:
        return self._static[4]  # type: ignore[return-value]

    @property
    def layer(self) -> Any:
        """The entry of the stack (counted through all its taken axes), or None."""
        return self._layer

    @property
    def packed_parts(self) -> tuple[Any, Any, Any, Any]:
        """Bytes, scales, zero points and tensor scale as the kernels read them."""
        return self._parts()[:4]

    @property
    def lead(self) -> tuple[int, ...]:
        """Stack axes that are still axes of the array."""
        return tuple(self.data.shape[self.panels.indexed : -PACKED_AXES])

    def entry(self, part: Any) -> Any:
        """A packed part without the stack axes that the layer number has taken."""
        if part is None or self._layer is None or part is self._tensor_scale:
            return part
        flat = part.reshape(-1, *part.shape[self.panels.indexed :])
        return jax.lax.dynamic_index_in_dim(flat, self._layer, 0, keepdims=False)

    def see(self, axes: Axes) -> PanelArray:
        """The same bytes with other axes behind the stack axes."""
        return self.with_view(panels=dataclasses.replace(self.panels, axes=axes))

    def with_view(
        self, *, panels: Panels | None = None, dtype: Any = None, layer: Any = None
    ) -> Any:
        qtype, own, tiles, layout, view = self._static
        static = (qtype, dtype or own, tiles, layout, panels or view)
        layer = self._layer if layer is None else layer
        return PanelArray(*self._parts()[:4], layer, static=static)

    # --- as an array ------------------------------------------------------------------------------

    @classmethod
    def of_parts(cls, static: Any, parts: Mapping[str, Any]) -> PanelArray:
        return cls.tree_unflatten(static, [parts.get(key) for key in _KEYS])

    def items(self) -> Any:
        return self.plain().items()

    def plain(self) -> QArray:
        """The same array with one code per element."""
        if is_variable(self.data):
            read = functools.partial(unpacked, self.data)
            return jax.tree.map(read, part_values(self).plain())
        if not isinstance(self.data, jax.Array):
            return jax.eval_shape(_plain, self)
        check_whole(self)
        return _plain(self)

    @property
    def qvalue(self) -> Any:
        return self.plain().data

    @property
    def scale(self) -> Any:
        return self.plain()._scale

    @property
    def zero_point(self) -> Any:
        return None if self._zero_point is None else self.plain()._zero_point

    @property
    def tensor_scale(self) -> Any:
        return None if self._tensor_scale is None else self.plain()._tensor_scale

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        return jax.eval_shape(_plain, part_values(self)).tiles

    @property
    def tile_shape(self) -> tuple[int, ...]:
        return jax.eval_shape(_plain, part_values(self)).tile_shape

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self._static[1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.panels.shape)

    @property
    def ndim(self) -> int:
        return len(self.lead) + len(self.panels.axes)

    def replace(self, **changes: Any) -> QArray:
        """A copy in the plain layout with some of the constructor's arguments changed."""
        return self.plain().replace(**changes)

    def with_dtype(self, dtype: Any) -> QArray:
        return self.with_view(dtype=jnp.dtype(dtype).name)

    def astype(self, dtype: Any) -> QArray:
        return self.plain().astype(dtype)

    def __repr__(self) -> str:
        data = f"uint8[{','.join(map(str, self.data.shape))}]"
        shape = ",".join(map(str, self.shape))
        return f"QArray([{shape}], qtype={self._static[0]}, layout=panels, data={data})"


def check_whole(p: PanelArray) -> None:
    """Raise if a part is split over an explicit mesh: JAX cannot say where its pieces would lie.

    >>> check_whole(to_panels(QArray(jnp.ones((64, 32), jnp.int8), jnp.ones((1, 32))), 'kn'))
    """
    parts = [part for part in p.packed_parts if isinstance(part, jax.Array)]
    if any(entry is not None for part in parts for entry in jax.typeof(part).sharding.spec):
        raise ValueError(_MSG_EXPLICIT.format(weight=p))


def why_no_panels(q: QArray, roles: str) -> str | None:
    """Why a QArray cannot be packed into panels with these axis roles; None if it can."""
    row, lead = format_of(q.qtype), roles.count("l")
    if row.name in _NO_PANELS or row.name not in FORMATS:
        return f"{row.name} has no native product"
    if len(roles) != q.ndim or roles[:lead] != "l" * lead or not {"k", "n"} <= set(roles):
        return f"axes {roles!r} are no stack of matrices"
    if 0 in q.shape:
        return "it is empty"
    if q.zero_point is not None and q.zero_point.shape != q.scale.shape:
        return "its zero points have another granularity than its scales"
    if q.scale.dtype.name == "float64":
        return "its scales are float64"
    if _holds_nan(q):
        return "it holds codes of NaN or infinity, which the kernels read as numbers"
    return None if _tile(q, roles) is not None else "its scales are no groups of rows"


def _holds_nan(q: QArray) -> bool:
    """Whether codes of an 8-bit float type are no numbers; a tracer's cannot be looked at."""
    codes = q.data
    if not str(q.data.dtype).startswith("float8") or not isinstance(codes, jax.Array):
        return False
    if isinstance(codes, jax.core.Tracer) or not codes.is_fully_addressable:
        return False
    return not bool(jnp.isfinite(codes.astype(jnp.float32)).all())


def _tile(q: QArray, roles: str) -> int | None:
    """Rows of the flattened K that share a scale (0: all), or None if they do not lie together."""
    summed = [a for r in SUMMED for a, role in enumerate(roles) if role == r]
    others = (a for a, role in enumerate(roles) if role not in SUMMED)
    if any(q.scale.shape[a] not in (1, q.shape[a]) for a in others):
        return None
    if all(q.scale.shape[a] == 1 for a in summed):
        return 0
    if any(q.scale.shape[a] not in (1, q.shape[a]) for a in summed[:-1]):
        return None
    last = summed[-1]
    tile = infer_tile_shape(q.shape, q.scale.shape, q.tiles)[last]
    if len(summed) > 1 and q.shape[last] % tile:
        return None
    return tile if tile == 16 or tile % 32 == 0 else None


def to_panels(q: QArray, roles: str) -> PanelArray:
    """Pack; `roles` names each axis: 'l' of a stack, 'k' and 'c' summed over, 'n' a column.

    Axes 'c' come behind all 'k': the input channels of a convolution, which lie side by side.

    >>> q = QArray(jnp.ones((3, 64, 32), jnp.int8), jnp.ones((3, 1, 32)))
    >>> to_panels(q, 'lkn').at_layer(1).shape
    (64, 32)
    """
    reason = why_no_panels(q, roles)
    if reason is not None:
        raise ValueError(f"{q!r} cannot be packed into panels: {reason}.")
    if q.layout != "plain":
        q = q.replace(qvalue=q.qvalue, layout="plain", last_dim=None)
    if isinstance(q.data, jax.Array):
        return pack_whole(q, roles)
    return jax.eval_shape(functools.partial(pack_whole, roles=roles), q)


def repack(q: QArray, like: PanelArray) -> PanelArray:
    """A plain array in the panels of another one of its shape and type.

    >>> q = QArray(jnp.ones((64, 32), jnp.int8), jnp.ones((1, 32)))
    >>> repack(q, to_panels(q, 'kn')).layout
    'panels'
    """
    if like.panels.axes != whole_axes(like.panels.dims) or like.layer is not None:
        raise ValueError(f"{like!r} is a view of its panels; pack the array it was made from.")
    if not isinstance(q.data, jax.ShapeDtypeStruct):
        q = jax.tree.map(jnp.asarray, q)
    return to_panels(q, "l" * len(like.lead) + like.panels.roles)


@functools.partial(jax.jit, static_argnames="roles")
def pack_whole(q: QArray, roles: str) -> PanelArray:
    """`to_panels` of an array that can be packed: one program, traceable."""
    stack = roles.count("l")
    order = [*range(stack), *(a for r in "kcn" for a, role in enumerate(roles) if role == r)]
    summed = [a for a in order if roles[a] in SUMMED]
    tile = _tile(q, roles)
    assert tile is not None

    def matrix(part, rows, columns):
        return jnp.transpose(part, order).reshape(*part.shape[:stack], rows, columns)

    def widened(part):
        """One number for each stack entry, group of rows and column."""
        shape = list(q.shape)
        for a in summed:
            shape[a] = 1 if tile == 0 else q.shape[a]
        if tile:
            shape[summed[-1]] = part.shape[summed[-1]]
        return matrix(
            jnp.broadcast_to(part, shape),
            math.prod(shape[a] for a in summed),
            math.prod(shape[a] for a in order if roles[a] == "n"),
        )

    rows = math.prod(q.shape[a] for a in summed)
    columns = math.prod(q.shape[a] for a, role in enumerate(roles) if role == "n")
    zero = q.zero_point
    if zero is not None:
        zero = (zero.astype(jnp.int32) + offset(q.qtype)).astype(jnp.uint8)
    view = Panels(
        roles=roles[stack:],
        dims=q.shape[stack:],
        scale_dims=tuple(q.scale.shape[stack:]),
        tile=tile,
        axes=whole_axes(q.shape[stack:]),
    )
    return PanelArray(
        pack_panels(matrix(q.data, rows, columns), q._static[0]),
        pack_parts(widened(q.scale), 1.0),
        None if zero is None else pack_parts(widened(zero), 0.0),
        q.tensor_scale,
        static=(q._static[0], q.dtype.name, (), "panels", view),
    )


@jax.jit
def _plain(p: PanelArray) -> QArray:
    view, row = p.panels, format_of(p.qtype)
    rows, columns = view.length("k"), view.length("n")
    data, scale, zero, tensor_scale = (p.entry(part) for part in p.packed_parts)
    lead = data.shape[:-PACKED_AXES]
    # Panels hold a matrix: summed axes first ("k", and "c" of a convolution), then columns ("n").
    # `order` says which packed axis stands where in it, `back` undoes that.
    order = [a for r in "kcn" for a, role in enumerate(view.roles) if role == r]
    back = [len(lead) + order.index(a) for a in range(len(order))]
    summed = [a for a in order if view.roles[a] in SUMMED]

    def spread(matrix, dims):
        shaped = matrix.reshape(*lead, *(dims[a] for a in order))
        return jnp.transpose(shaped, [*range(len(lead)), *back])

    def narrowed(part):
        # A scale has one number along summed axes, or one for each tile of the last of them.
        dims = list(view.dims)
        for a in summed:
            dims[a] = 1 if view.tile == 0 else view.dims[a]
        if view.tile:
            dims[summed[-1]] = -(-view.dims[summed[-1]] // view.tile)
        part = spread(unpack_parts(part, columns), dims)
        cut = [slice(None)] * len(lead) + [slice(0, n) for n in view.scale_dims]
        return part[tuple(cut)]

    codes = spread(unpack_panels(data, row.name, rows, columns), view.dims)
    if zero is not None:
        zero = (narrowed(zero).astype(jnp.int32) - offset(row)).astype(row.storage)
    scale = narrowed(scale)
    tile_shape = [1] * len(lead) + [
        d if n == 1 else (view.tile if role in SUMMED and n != d else 1)
        for d, n, role in zip(view.dims, view.scale_dims, view.roles, strict=True)
    ]
    if tensor_scale is not None:
        tensor_scale = tensor_scale.reshape((1,) * codes.ndim)
    base = QArray(
        codes,
        scale,
        zero,
        p._static[0],
        tensor_scale=tensor_scale,
        tiles=uneven_tiles(codes.shape, scale.shape, tile_shape),
    ).with_dtype(p.dtype)
    # The packed axes cut into atoms, the atoms put in the order the array shows, and grouped.
    atoms = sorted(
        (atom for group in view.axes for atom in group), key=lambda atom: (atom.axis, -atom.stride)
    )
    shown = [len(lead) + atoms.index(atom) for group in view.axes for atom in group]
    base = _layout_moves.reshape(base, (*lead, *(atom.size for atom in atoms)))
    base = _layout_moves.transpose(base, [*range(len(lead)), *shown])
    return _layout_moves.reshape(base, (*lead, *view.shape))


# --- Moves of a PanelArray that leave its bytes where they are; None where that is not possible ---


def transpose(p: PanelArray, perm: Sequence[int]) -> PanelArray | None:
    """Another order of the axes behind the stack axes."""
    stack, perm = len(p.lead), [axis_of(a, p.ndim) for a in perm]
    if perm[:stack] != list(range(stack)):
        return None
    return p.see(tuple(p.panels.axes[a - stack] for a in perm[stack:]))


def reshape(p: PanelArray, new_shape: Sequence[int]) -> PanelArray | None:
    """Other groups of the atoms behind the stack axes, if the scales can follow."""
    stack, new = len(p.lead), fill_in(p.shape, new_shape)
    axes = reshape_axes(p.panels.axes, new[stack:]) if new[:stack] == p.lead else None
    if axes is None:
        return None
    moved = p.see(axes)
    try:
        jax.eval_shape(PanelArray.plain, moved)
    except CannotMove:
        return None
    return moved


def expand_dims(p: PanelArray, dims: Sequence[int]) -> PanelArray | None:
    """New axes of size 1 behind the stack axes."""
    shape, rank = list(p.shape), p.ndim + len(dims)
    for dim in sorted(axis_of(d, rank) for d in dims):
        if dim < len(p.lead):
            return None
        shape.insert(dim, 1)
    return reshape(p, shape)


def squeeze(p: PanelArray, dims: Sequence[int]) -> PanelArray | None:
    """Axes of size 1 behind the stack axes removed."""
    gone = {axis_of(d, p.ndim) for d in dims}
    if any(d < len(p.lead) for d in gone):
        return None
    return reshape(p, [n for a, n in enumerate(p.shape) if a not in gone])


def broadcast_in_dim(
    p: PanelArray, shape: Sequence[int], broadcast_dimensions: Sequence[int]
) -> PanelArray | None:
    """A broadcast that only opens axes of size 1."""
    places = list(broadcast_dimensions)
    kept = places == sorted(places) and [shape[d] for d in places] == list(p.shape)
    if not kept or any(n != 1 for d, n in enumerate(shape) if d not in places):
        return None
    return reshape(p, shape)


def index(p: PanelArray, i: Any, axis: int = 0) -> PanelArray | None:
    """Entry `i` of the first stack axis, as a number beside the bytes."""
    if not p.lead or axis_of(axis, p.ndim) != 0:
        return None
    size = p.lead[0]
    if not isinstance(i, jax.core.Tracer) and not -size <= operator.index(i) < size:
        raise IndexError(f"Index {i} is out of range for axis 0 of {p!r}.")
    i = jnp.asarray(i).astype(jnp.int32)
    i = jnp.where(i < 0, i + size, i)
    at = i if p.layer is None else p.layer * size + i
    panels = dataclasses.replace(p.panels, indexed=p.panels.indexed + 1)
    return p.with_view(panels=panels, layer=at)


def dynamic_slice(
    p: PanelArray, start_indices: Sequence[Any], sizes: Sequence[int]
) -> PanelArray | None:
    """One entry of a stack with one axis left, which stays as an axis of size 1."""
    if len(p.lead) != 1 or tuple(sizes) != (1, *p.shape[1:]):
        return None
    start = jnp.clip(jnp.asarray(start_indices[0]).astype(jnp.int32), 0, p.lead[0] - 1)
    entry = index(p, start)
    assert entry is not None
    return entry.see(((), *entry.panels.axes))


def slice_(
    p: PanelArray, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] | None = None
) -> PanelArray | None:
    """One entry of a stack at a known place."""
    sizes = [b - a for a, b in zip(start, limit, strict=True)]
    if strides is not None and any(s != 1 for s in strides):
        return None
    return dynamic_slice(p, start, sizes)


def getitem(p: PanelArray, key: Any) -> QArray | None:
    """`q[i]` of a stack."""
    if isinstance(key, bool) or isinstance(key, tuple | slice) or key is None or key is Ellipsis:
        return None
    return index(p, key) if jnp.ndim(key) == 0 else None


def gather(
    p: PanelArray,
    start_indices: Any,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any = None,
    fill_value: Any = None,
) -> QArray | None:
    """Rows of a table: only those are unpacked, then gathered from in their new order."""
    numbers = dimension_numbers
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    if tuple(slice_sizes) != tuple(1 if a == axis else n for a, n in enumerate(p.shape)):
        return None
    ids = jnp.asarray(start_indices).astype(jnp.int32)
    flat, top = ids.reshape(-1), p.shape[axis] - 1
    rows = take_columns(p, jnp.clip(flat, 0, top), axis) if flat.size else None
    if rows is None:
        return None
    order = jnp.arange(flat.size, dtype=jnp.int32)
    order = jnp.where(flat < 0, -1, jnp.where(flat > top, flat.size, order))
    if lax.GatherScatterMode.from_any(mode) != lax.GatherScatterMode.FILL_OR_DROP:
        order = jnp.arange(flat.size, dtype=jnp.int32)
    sizes = [1 if a == axis else n for a, n in enumerate(rows.shape)]
    return _lookup.gather(
        rows,
        order.reshape(ids.shape),
        dimension_numbers=numbers,
        slice_sizes=sizes,
        mode=mode,
        fill_value=fill_value,
    )


def take_rows(
    p: PanelArray, indices: Any, axis: int = 0, mode: str | None = None, fill_value: Any = None
) -> QArray | None:
    """As `jnp.take`, through the gather it is."""
    lookup = _lookup.row_lookup(p.shape, indices, axis, mode)
    return gather(p, **lookup, fill_value=fill_value)


def take_columns(p: PanelArray, ids: jax.Array, axis: int) -> QArray | None:
    """Entries `ids` (a vector, all in range) of a column axis: the rows of a tied table.

    They become columns of new panels, which then unpack like any other; the table itself does not.
    """
    view = p.panels
    single = view.axes == whole_axes(view.dims) and sorted(view.roles) == ["k", "n"]
    if p.lead or not single or view.roles[axis] != "n":
        return None
    panel, column = ids // COLUMNS, ids % COLUMNS

    def taken(part, behind):
        if part is None:
            return None
        picked = part[panel, ..., column, :] if behind else part[panel, ..., column]
        picked = jnp.moveaxis(picked, 0, -1 - behind)
        at = picked.ndim - 1 - behind
        widths = [(0, 0, 0)] * picked.ndim
        widths[at] = (0, -len(ids) % COLUMNS, 0)
        picked = jax.lax.pad(picked, jnp.ones((), picked.dtype), widths)
        shape = (*picked.shape[:at], -1, COLUMNS, *picked.shape[at + 1 :])
        return jnp.moveaxis(picked.reshape(shape), at, 0)

    data, scale, zero, tensor_scale = (p.entry(part) for part in p.packed_parts)
    dims = tuple(len(ids) if a == axis else d for a, d in enumerate(view.dims))
    scale_dims = tuple(min(n, len(ids)) if a == axis else n for a, n in enumerate(view.scale_dims))
    rows = dataclasses.replace(
        view, dims=dims, scale_dims=scale_dims, axes=whole_axes(dims), indexed=0
    )
    parts = taken(data, 1), taken(scale, 0), taken(zero, 0), tensor_scale
    return PanelArray(*parts, static=(*p._static[:4], rows)).plain()
