"""Products with a weight in panels: which of them the kernels run, and how the axes get there.

The kernels multiply rows by a matrix [K, N]. A product qualifies when it sums over exactly the axes
that the weight was packed to sum over; the weight's other axes are its columns, and everything else
about it is the order of axes, which the activation and the result follow, never the weight.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from fewbit import kernels
from fewbit.kernels import panel_product
from fewbit.numerics import format_of
from fewbit.ops._operand import Deferred, is_placed
from fewbit.qarray import (
    Atom,
    HowToQuantize,
    PanelArray,
    QArray,
    check_whole,
    dequantize,
    get_tile_shape,
)

_LONGEST_SUM = 2**17  # of int8 codes times 8-bit codes that int32 surely holds
_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class PanelDot:
    """A dot_general that the kernels run: the weight, its side, and the order of its axes."""

    weight: PanelArray
    side: int  # 0: the weight is lhs
    x_summed: tuple[int, ...]
    summed: tuple[Atom, ...]  # the weight's summed atoms, in the activation's order
    columns: tuple[Atom, ...]  # its other atoms, in the result's order
    column_shape: tuple[int, ...]
    x_batch: tuple[int, ...] = ()  # the axis whose entries each have their own entry of a stack

    @property
    def batched(self) -> bool:
        return bool(self.x_batch)

    def x_free(self, ndim: int) -> list[int]:
        """The axes of x that are rows, in the order of the kernel's rows."""
        taken = (*self.x_batch, *self.x_summed)
        return [*self.x_batch, *(a for a in range(ndim) if a not in taken)]


def find_panel_dot(lhs: Any, rhs: Any, dimension_numbers: Any) -> PanelDot | None:
    """The native form of a dot_general, or None; abstract operands do."""
    side = 1 if isinstance(rhs, PanelArray) else 0
    weight, other = (rhs, lhs) if side else (lhs, rhs)
    if not isinstance(weight, PanelArray) or isinstance(other, PanelArray):
        return None
    summed, batch = dimension_numbers
    stack = len(weight.lead)
    if stack > 1 or tuple(batch[side]) != tuple(range(stack)):
        return None
    if not kernels.native_available() or other.dtype.name not in _FLOATS:
        return None
    if on_explicit_mesh(weight):
        return None
    axes, roles = weight.panels.axes, weight.panels.roles

    def atoms(which):
        return tuple(atom for a in which for atom in axes[a - stack])

    free = [a for a in range(stack, weight.ndim) if a not in summed[side]]
    inside, outside = atoms(summed[side]), atoms(free)
    if {roles[a.axis] for a in inside} - {"k"} or {roles[a.axis] for a in outside} - {"n"}:
        return None
    if 0 in other.shape or is_placed(other):
        return None
    if stack and not all(isinstance(size, int) for size in other.shape):
        return None  # how many rows an entry has must be known
    shape = tuple(weight.shape[a] for a in free)
    x_batch = tuple(batch[1 - side])
    return PanelDot(weight, side, tuple(summed[1 - side]), inside, outside, shape, x_batch)


def on_explicit_mesh(weight: QArray) -> bool:
    """Where an array lies is part of its type there, which XLA works out and panels cannot."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1 or AxisType.Explicit not in mesh.axis_types:
        return False
    if isinstance(weight, PanelArray):
        check_whole(weight)
    return True


def arithmetic(dot: PanelDot, x: Any) -> str:
    """What the kernel does with the activation: 'dynamic', 'static', 'codes' or 'none'."""
    form, view = format_of(dot.weight.qtype), dot.weight.panels
    if not isinstance(x, QArray | Deferred) or form.kind not in ("int", "sign"):
        return "none"
    if (view.tile or view.length("k")) > _LONGEST_SUM:
        return "none"
    if isinstance(x, Deferred):
        if x.scale is None:
            return "dynamic" if _plain_int8(x.how, x, dot) else "none"
        if _static_int8(x, dot):
            return "static"
        x = jax.eval_shape(Deferred.quantized, x)
    row = format_of(x.qtype)
    integer = row.kind == "int" and row.storage.name in ("int8", "int4") and x.zero_point is None
    return "codes" if integer and _tile_of(x, dot) is not None else "none"


def describe(dot: PanelDot, x: Any, bias: Any = None, activation: str | None = None) -> str:
    """The plan's word for it."""
    what = "native int8" if arithmetic(dot, x) != "none" else "native float"
    if not finishes(dot, bias):
        return what
    fused = kernels.fused_activation(activation) is not None
    return what + kernels.finish_text(bias, activation if fused else None)


def finishes(dot: PanelDot, bias: Any) -> bool:
    """Whether the kernel's columns are those of the bias, so that it can add it."""
    if bias is not None and dot.side == 0:
        return False
    order = packed_order(dot.columns)
    return bias is None or (
        order == list(range(len(order))) and tuple(bias.shape) == dot.column_shape
    )


def _plain_int8(how: HowToQuantize, x: Any, dot: PanelDot) -> bool:
    """Whether the kernel measures and quantizes rows just as `how` says."""
    if how.calibration_method != "absmax" or how.scale_dtype is not None:
        return False
    if not _int8_rows(how, x, dot):
        return False
    if not how.tiled_axes:
        return True
    tile = dot.weight.panels.tile
    return len(dot.x_summed) == 1 and dict(how.tiled_axes) == {dot.x_summed[0]: tile}


def _static_int8(x: Deferred, dot: PanelDot) -> bool:
    """Whether the kernel quantizes rows with their stored scale just as `x.quantized()` would."""
    assert x.scale is not None
    if x.zero_point is not None or x.scale.dtype != x.dtype or not _int8_rows(x.how, x, dot):
        return False
    return _tile_of(x, dot) is not None


def _int8_rows(how: HowToQuantize, x: Any, dot: PanelDot) -> bool:
    """Whether each of the kernel's rows is quantized for itself, to int8."""
    free = {a for a in range(x.ndim) if a not in dot.x_summed}
    if format_of(how.qtype).name != "int8" or how.noise_fn is not None:
        return False
    return {a % x.ndim for a in how.channelwise_axes} == free and x.dtype.name in kernels.ROWS


def _tile_of(x: QArray | Deferred, dot: PanelDot) -> int | None:
    """k per scale of quantized rows (0: all), or None where the kernel cannot follow."""
    assert x.scale is not None
    if all(x.scale.shape[a] == 1 for a in dot.x_summed):
        return 0
    tiles = get_tile_shape(x.shape, x.how) if isinstance(x, Deferred) else x.tile_shape
    tile = dot.weight.panels.tile
    single = len(dot.x_summed) == 1 and tile and tiles[dot.x_summed[0]] == tile
    return tile if single else None


def find_panel_ragged_dot(lhs: Any, rhs: Any, numbers: Any) -> PanelDot | None:
    """The native form of a ragged_dot whose groups are the entries of a stack, or None."""
    if not isinstance(rhs, PanelArray) or len(rhs.lead) != 1 or lhs.ndim != 2:
        return None
    # The numbers of `lax.ragged_dot` alone: rows in groups, and an entry of the stack for each.
    (summed, batch), roles = numbers.dot_dimension_numbers, rhs.panels.roles
    places = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    if batch[0] or tuple(summed[0]) != (1,) or places != ((0,), (0,)) or rhs.ndim != 3:
        return None
    if not kernels.native_available() or lhs.dtype.name not in _FLOATS or on_explicit_mesh(rhs):
        return None
    inside, outside = (rhs.panels.axes[a - 1] for a in (summed[1][0], 3 - summed[1][0]))
    if {roles[a.axis] for a in inside} - {"k"} or {roles[a.axis] for a in outside} - {"n"}:
        return None
    if 0 in lhs.shape or is_placed(lhs):
        return None
    return PanelDot(rhs, 1, (1,), inside, outside, (rhs.panels.length("n"),))


def run_panel_dot(
    dot: PanelDot,
    x: Any,
    dtype: Any,
    group_sizes: jax.Array | None = None,
    bias: Any = None,
    activation: str | None = None,
) -> jax.Array:
    """The product, in `dtype`, with what follows it."""
    what = arithmetic(dot, x)
    if dot.batched:  # products side by side are a ragged one with groups of the same size
        group_sizes = _equal_sizes(dot, x.shape)
    if not (bias is None and activation is None) and not finishes(dot, bias):
        return kernels.finish(run_panel_dot(dot, x, dtype, group_sizes), bias, activation)
    settings: dict[str, Any] = dict(
        out_dtype=dtype if jnp.dtype(dtype).name in kernels.ROWS else jnp.float32,
        group_sizes=group_sizes,
        bias=None if bias is None else bias.reshape(-1),
        activation=activation,
    )
    if what == "dynamic":
        tile = dot.weight.panels.tile if x.how.tiled_axes else 0
        rows = _rows(dot, x.array)
        out = panel_product(rows, dot.weight, act=what, act_tile=tile, **settings)
    elif what == "static":
        out = panel_product(
            _rows(dot, x.array),
            dot.weight,
            act=what,
            act_scale=_row_scales(dot, x),
            act_tile=_tile_of(x, dot) or 0,
            **settings,
        )
    elif what == "codes":
        x = x.quantized() if isinstance(x, Deferred) else x
        out = panel_product(
            _rows(dot, x.qvalue.astype(jnp.int8)),
            dot.weight,
            act=what,
            act_scale=_row_scales(dot, x).astype(jnp.float32),
            act_tile=_tile_of(x, dot) or 0,
            **settings,
        )
    else:
        array = x.quantized() if isinstance(x, Deferred) else x
        array = dequantize(array, jnp.float32) if isinstance(array, QArray) else array
        if array.dtype.name not in kernels.ROWS:
            array = array.astype(jnp.float32)
        out = panel_product(_rows(dot, array), dot.weight, **settings)
    return _result(dot, out, x.shape).astype(dtype)


def _equal_sizes(dot: PanelDot, shape: tuple[int, ...]) -> jax.Array:
    """How many rows each entry of a stack has."""
    free = dot.x_free(len(shape))[1:]
    return jnp.full(dot.weight.lead, math.prod(shape[a] for a in free), jnp.int32)


def _rows(dot: PanelDot, x: jax.Array) -> jax.Array:
    """x as [M, K], the summed axes in the order of the packed rows."""
    free = dot.x_free(x.ndim)
    x = jnp.transpose(x, (*free, *dot.x_summed))
    lead = x.shape[: len(free)]
    order = packed_order(dot.summed)
    if order != list(range(len(order))):
        x = x.reshape(*lead, *(atom.size for atom in dot.summed))
        x = jnp.transpose(x, (*range(len(lead)), *(len(lead) + i for i in order)))
    return x.reshape(math.prod(lead), dot.weight.panels.length("k"))


def _row_scales(dot: PanelDot, x: QArray | Deferred) -> jax.Array:
    """The scales of quantized rows as [M, groups]; [1, groups] where all rows share them."""
    assert x.scale is not None
    free = dot.x_free(x.ndim)
    scale = jnp.transpose(x.scale, (*free, *dot.x_summed))
    inner = scale.shape[len(free) :]
    lead = tuple(x.shape[a] for a in free)
    if math.prod(scale.shape[: len(free)]) > 1:
        scale = jnp.broadcast_to(scale, (*lead, *inner))
    return scale.reshape(-1, math.prod(inner))


def _result(dot: PanelDot, out: jax.Array, x_shape: tuple[int, ...]) -> jax.Array:
    """[M, N] as the axes of the dot_general's result."""
    lead = tuple(x_shape[a] for a in dot.x_free(len(x_shape)))
    order = packed_order(dot.columns)
    packed = [dot.columns[i].size for i in order]
    out = out.reshape(*lead, *packed)
    rank = len(lead)
    if order != list(range(len(order))):
        out = jnp.transpose(
            out, (*range(rank), *(rank + order.index(i) for i in range(len(order))))
        )
    out = out.reshape(*lead, *dot.column_shape)
    if dot.side == 0:  # the weight's axes come first, behind those of a batch
        first = len(dot.x_batch)
        out = jnp.transpose(out, (*range(first), *range(rank, out.ndim), *range(first, rank)))
    return out


def packed_order(atoms: tuple[Atom, ...]) -> list[int]:
    """Positions of the atoms in the order in which their pieces lie in the packed matrix."""
    return sorted(range(len(atoms)), key=lambda i: (atoms[i].axis, -atoms[i].stride))
