"""A dot_general of int8 codes as one JAX primitive: native on a CPU, XLA's own product elsewhere.

XLA on a CPU multiplies int8 slower than float32 unless there are many rows. The native call takes
the operands as they lie, whatever their order of axes, and may scale the sums on the way out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from fewbit.kernels._library import native_available
from fewbit.kernels._partition import (
    alike,
    described,
    lower_spread,
    mesh_axes,
    partitioned,
    run_eagerly,
    zero_with_devices,
)
from fewbit.qarray import shards_of

SCALED = ("float32", "bfloat16")
"""Types in which the native call writes scaled sums."""

# Below so many products XLA's loop is over before a call has begun.
_FEWEST_PRODUCTS = 2**14

_MSG_TYPES = "codes_dot multiplies int8 by int8, got {lhs} and {rhs}; use jax.lax.dot_general."
_MSG_SCALED = (
    "out_dtype={dtype} does not go with {count} scales: int32 sums have none, {known} ones have "
    "both."
)


@dataclasses.dataclass(frozen=True)
class CodesProduct:
    """What the call must know besides arrays: as in `lax.dot_general`, and the result's type."""

    numbers: Any  # ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), all tuples
    out_dtype: str  # 'int32': the sums themselves


def runs_natively(lhs: Any, rhs: Any, dimension_numbers: Any) -> bool:
    """Whether `codes_dot` of such operands is a native call on this machine; shapes are enough.

    >>> one = jax.ShapeDtypeStruct((1, 1), jnp.int8)
    >>> runs_natively(one, one, (((1,), (0,)), ((), ())))  # not worth it
    False
    """
    if jax.default_backend() != "cpu" or not native_available():
        return False
    if not all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape)):
        return False
    (_, rhs_summed), (_, rhs_batch) = dimension_numbers
    columns = math.prod(rhs.shape[a] for a in free_axes(rhs.shape, rhs_summed, rhs_batch))
    return math.prod(lhs.shape) * columns >= _FEWEST_PRODUCTS


def codes_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    out_dtype: Any = jnp.int32,
) -> jax.Array:
    """`lax.dot_general` of two int8 arrays: the int32 sums, or those sums times two scales.

    Equal to XLA's result bit for bit, sums beyond int32 included. (Subnormal numbers excepted: the
    native form keeps what XLA may flush.)

    Args:
      lhs: int8 codes.
      rhs: int8 codes.
      dimension_numbers: as of `lax.dot_general`, without negative numbers.
      lhs_scale: float32 of lhs' batch axes and free axes, in the order of the result.
      rhs_scale: float32 of rhs' batch axes and free axes; both scales or none.
      out_dtype: float32 or bfloat16 with scales, else int32.

    >>> codes = jnp.full((2, 3), 100, jnp.int8)
    >>> codes_dot(codes, codes, (((1,), (1,)), ((), ()))).tolist()
    [[30000, 30000], [30000, 30000]]
    """
    (lc, rc), (lb, rb) = dimension_numbers
    numbers = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
    spec = CodesProduct(numbers, jnp.dtype(out_dtype).name)
    _check(lhs, rhs, lhs_scale, rhs_scale, spec)
    if lhs_scale is None or rhs_scale is None:
        lhs_scale = rhs_scale = jnp.zeros((0,), jnp.float32)
    args = lhs, rhs, lhs_scale, rhs_scale
    if not runs_natively(lhs, rhs, numbers):
        return _reference(*args, spec=spec)
    return _bind(*alike(args), spec=spec)


def _check(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, spec: CodesProduct) -> None:
    if lhs.dtype != jnp.int8 or rhs.dtype != jnp.int8:
        raise TypeError(_MSG_TYPES.format(lhs=lhs.dtype, rhs=rhs.dtype))
    scales = [scale is not None for scale in (lhs_scale, rhs_scale)]
    if scales != [spec.out_dtype in SCALED] * 2 or not (any(scales) or spec.out_dtype == "int32"):
        known = " and ".join(SCALED)
        raise ValueError(_MSG_SCALED.format(dtype=spec.out_dtype, count=sum(scales), known=known))


codes_dot_p = Primitive("fewbit_codes_dot")
"""Operands: lhs, rhs, their scales (empty where the result is int32), and a marked zero."""


def _bind(*args: jax.Array, spec: CodesProduct) -> jax.Array:
    """The primitive, with what its lowering needs in the program around it."""
    (zero,) = alike((zero_with_devices(),), args[0])
    return codes_dot_p.bind(*args, zero, spec=spec)


@codes_dot_p.def_abstract_eval
def _shape(lhs: Any, rhs: Any, *rest: Any, spec: CodesProduct) -> Any:
    out = jax.eval_shape(  # raises what lax.dot_general raises
        lambda a, b: lax.dot_general(a, b, spec.numbers, preferred_element_type=jnp.int32),
        jax.ShapeDtypeStruct(lhs.shape, lhs.dtype),
        jax.ShapeDtypeStruct(rhs.shape, rhs.dtype),
    )
    return lhs.update(shape=out.shape, dtype=jnp.dtype(spec.out_dtype))


def _call(lhs: Any, rhs: Any, *scales: Any, spec: CodesProduct) -> jax.Array:
    """The native call, on one device; the marked zero is no operand of it."""
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = spec.numbers
    shape = axes_of_result(spec.numbers, lhs.shape, rhs.shape)
    result = jax.ShapeDtypeStruct(shape, jnp.dtype(spec.out_dtype))
    axes = dict(
        lhs_batch=lhs_batch, rhs_batch=rhs_batch, lhs_summed=lhs_summed, rhs_summed=rhs_summed
    )
    numbers = {name: np.asarray(value, np.int64) for name, value in axes.items()}
    return jax.ffi.ffi_call("fewbit_codes_dot", result)(lhs, rhs, *scales[:2], **numbers)


def _reference(lhs: Any, rhs: Any, *scales: Any, spec: CodesProduct) -> jax.Array:
    total = lax.dot_general(lhs, rhs, spec.numbers, preferred_element_type=jnp.int32)
    return total if spec.out_dtype == "int32" else _scaled(total, scales[0], scales[1], spec)


def _scaled(
    total: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, spec: CodesProduct
) -> jax.Array:
    """Sums times scales, in the order in which the kernels multiply."""
    n_batch = len(spec.numbers[1][0])
    rows, columns = lhs_scale.ndim - n_batch, rhs_scale.ndim - n_batch
    left = lax.expand_dims(lhs_scale, range(n_batch + rows, n_batch + rows + columns))
    right = lax.expand_dims(rhs_scale, range(n_batch, n_batch + rows))
    return (total.astype(jnp.float32) * left * right).astype(spec.out_dtype)


def _spread(*operands: jax.Array, spec: CodesProduct) -> jax.Array:
    ranks = tuple(operand.ndim for operand in operands[:4])
    with described(_call, spec, ranks):
        return _spreading(spec, ranks)(*operands[:4])


run_eagerly(codes_dot_p, _bind, 4)
lower_spread(codes_dot_p, _spread, _call, _reference, export=_reference)


# --- spread over devices: by batch, by rows, by columns, by k -------------------------------------


@functools.lru_cache(maxsize=1024)
def _spreading(spec: CodesProduct, ranks: tuple[int, ...]) -> Any:
    names = _names(spec.numbers, ranks, spec.out_dtype != "int32")

    def divide(mesh, operands, result):
        place = dict(zip(names[-1], mesh_axes(result, mesh), strict=True))
        used = {name for entry in place.values() for name in entry or ()}
        summed: list[str] = []
        for name in (n for n in names[0] if n.startswith("k")):
            found = [
                mesh_axes(operand, mesh)[mine.index(name)]
                for operand, mine in zip(operands[:2], names[:2], strict=True)
            ]
            entry = found[0] if found[1] is None else found[1]
            axes = entry or ()
            # What fills up the last part of an uneven split is no number, and would be summed.
            even = operands[0].shape[names[0].index(name)] % shards_of(mesh, entry) == 0
            if even and found[0] in (None, entry) and not used & set(axes):
                place[name] = entry
                used |= set(axes)
                summed += axes
        *inputs, output = (tuple(map(place.get, own)) for own in names)
        alone = functools.partial(_call, spec=spec)
        return functools.partial(add_up, tuple(summed)) if summed else alone, output, inputs

    def add_up(axes, lhs, rhs, lhs_scale, rhs_scale):
        none = jnp.zeros((0,), jnp.float32)
        total = _call(lhs, rhs, none, none, spec=dataclasses.replace(spec, out_dtype="int32"))
        total = jax.lax.psum(total, axes)
        return total if spec.out_dtype == "int32" else _scaled(total, lhs_scale, rhs_scale, spec)

    rule = ", ".join(" ".join(own) for own in names[:-1]) + " -> " + " ".join(names[-1])
    return partitioned(_call, spec, rule, divide)


def _names(numbers: Any, ranks: tuple[int, ...], scaled: bool) -> list[tuple[str, ...]]:
    """A name for every axis of lhs, rhs, their scales and the result; equal axes, equal names."""
    (lc, rc), (lb, rb) = numbers
    sides = []
    for letter, rank, summed, batch in (("m", ranks[0], lc, lb), ("n", ranks[1], rc, rb)):
        names = [f"{letter}{axis}" for axis in range(rank)]
        for kind, axes in (("k", summed), ("b", batch)):
            for i, axis in enumerate(axes):
                names[axis] = f"{kind}{i}"
        sides.append(tuple(names))
    lhs, rhs = sides
    batch = tuple(lhs[a] for a in lb)
    if scaled:
        scales = [(*batch, *(n for n in own if n[0] in "mn")) for own in sides]
    else:
        scales = [("left",), ("right",)]
    return [lhs, rhs, *scales, axes_of_result(numbers, lhs, rhs)]


# --- derivatives: of the scales alone, codes have none --------------------------------------------


def _jvp(primals: Any, tangents: Any, *, spec: CodesProduct) -> tuple[jax.Array, Any]:
    lhs, rhs, lhs_scale, rhs_scale, _ = primals
    moving = tangents[2:4]
    if spec.out_dtype == "int32" or all(isinstance(t, ad.Zero) for t in moving):
        out = codes_dot_p.bind(*primals, spec=spec)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    none = jnp.zeros((0,), jnp.float32)
    total = _bind(*alike((lhs, rhs, none, none)), spec=dataclasses.replace(spec, out_dtype="int32"))
    whole = tuple(map(ad.instantiate_zeros, moving))
    return jax.jvp(lambda a, b: _scaled(total, a, b, spec), (lhs_scale, rhs_scale), whole)


ad.primitive_jvps[codes_dot_p] = _jvp


# --- vmap: one more axis of an operand, or of both ------------------------------------------------


def _batch(args: Any, dims: Any, *, spec: CodesProduct) -> tuple[jax.Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    moved = list(dims[:2])
    codes, scales = list(args[:2]), list(args[2:4])
    scaled = spec.out_dtype != "int32"
    for side in range(2):  # a scale of its own for each entry needs codes of its own
        if moved[side] is None and scaled and dims[2 + side] is not None:
            codes[side] = jnp.broadcast_to(codes[side], (size, *codes[side].shape))
            moved[side] = 0
    sides = [_grown(spec.numbers, side, moved[side]) for side in range(2)]
    (lc, lb), (rc, rb) = sides
    both = None not in moved
    if both:
        lb, rb = (moved[0], *lb), (moved[1], *rb)
    numbers = ((lc, rc), (lb, rb))
    place = 0
    for side in range(2):
        if moved[side] is None:
            continue
        free = free_axes(codes[side].shape, *((lc, lb) if side == 0 else (rc, rb)))
        own = 0 if both else len(lb) + free.index(moved[side])
        if scaled:
            scales[side] = _scale_with(scales[side], dims[2 + side], own, size)
        if not both:
            rows = len(free_axes(codes[0].shape, lc, lb)) if side else 0
            place = own + rows
    if not scaled:
        scales = [jnp.zeros((0,), jnp.float32)] * 2
    out = _bind(*alike((*codes, *scales)), spec=dataclasses.replace(spec, numbers=numbers))
    return out, place


def _grown(numbers: Any, side: int, dim: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """Contracting and batch axes of one side, counted with the new axis."""

    def count(axes):
        return tuple(a + (dim is not None and a >= dim) for a in axes)

    return count(numbers[0][side]), count(numbers[1][side])


def _scale_with(scale: jax.Array, dim: int | None, place: int, size: int) -> jax.Array:
    if dim is None:
        whole = (*scale.shape[:place], size, *scale.shape[place:])
        return jnp.broadcast_to(jnp.expand_dims(scale, place), whole)
    return jnp.moveaxis(scale, dim, place)


batching.primitive_batchers[codes_dot_p] = _batch


def free_axes(shape: Sequence[Any], *taken: Sequence[int]) -> list[int]:
    """Axes of an operand that are in none of the lists.

    >>> free_axes((2, 3, 4), (1,), ())
    [0, 2]
    """
    return [a for a in range(len(shape)) if not any(a in axes for axes in taken)]


def axes_of_result(numbers: Any, lhs: Sequence[Any], rhs: Sequence[Any]) -> tuple[Any, ...]:
    """What the axes of the result are, given something (a size, a name) per axis of the operands.

    >>> axes_of_result((((1,), (0,)), ((), ())), 'mk', 'kn')
    ('m', 'n')
    """
    (lc, rc), (lb, rb) = numbers
    left = [lhs[a] for a in (*lb, *free_axes(lhs, lc, lb))]
    return (*left, *(rhs[a] for a in free_axes(rhs, rc, rb)))
