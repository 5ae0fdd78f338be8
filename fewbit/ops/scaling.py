"""The steps that every product on codes is made of: codes, tile splitting, scales, placement."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fewbit._qarray_panels import PanelArray
from fewbit.ops.decision import tile_on, unwrap
from fewbit.ops.deferred import Deferred
from fewbit.qarray import QArray, dequantize


def operand(value: Any) -> QArray | jax.Array:
    """What an op was given, as a QArray with one code per element or a jax array."""
    value = unwrap(value)
    if isinstance(value, Deferred):
        return value.quantized()
    if isinstance(value, PanelArray):
        return value.plain()
    return value if isinstance(value, QArray) else jnp.asarray(value)


def held(value: Any) -> Any:
    """What an op was given, with panels and activations still to quantize left as they are."""
    value = unwrap(value)
    return value if isinstance(value, PanelArray | Deferred) else operand(value)


def promote(*dtypes: Any) -> Any:
    """The common dtype under the usual lattice, whatever promotion mode the caller runs under."""
    wide = []
    for dtype in map(jnp.dtype, dtypes):
        tiny_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
        wide.append(jnp.dtype(jnp.bfloat16) if tiny_float else dtype)
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, wide)


def result_dtype(operands: Sequence[Any], preferred_element_type: Any) -> Any:
    """preferred_element_type, or the promotion of the operands' logical dtypes."""
    if preferred_element_type is not None:
        return jax.dtypes.canonicalize_dtype(preferred_element_type)
    return promote(*(value.dtype for value in operands))


def as_floats(*operands: Any) -> list[jax.Array]:
    """Every operand dequantized and cast to one common float dtype."""
    dtype = promote(*(value.dtype for value in operands))
    return [as_float(value, dtype) for value in operands]


def as_float(value: Any, dtype: Any = None) -> jax.Array:
    """The operand dequantized, in its logical dtype unless told."""
    value = value.quantized() if isinstance(value, Deferred) else value
    array = dequantize(value) if isinstance(value, QArray) else jnp.asarray(value)
    return array if dtype is None else array.astype(dtype)


def codes_for_product(q: QArray) -> tuple[jax.Array, jax.Array | None]:
    """Codes and zero point in a type every backend multiplies: int8, or the fp8 type itself."""
    codes, zero_point = jnp.asarray(q.qvalue), q.zero_point
    if jnp.issubdtype(codes.dtype, jnp.floating):
        return codes, None
    # XLA:CPU cannot lower a product of two sub-byte types, so int4 is widened. Moving uint8 codes
    # and their zero point down together by 128 leaves every difference as it was.
    shift = 128 if codes.dtype == jnp.uint8 else 0

    def to_int8(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.int16) - shift).astype(jnp.int8) if shift else x.astype(jnp.int8)

    return to_int8(codes), None if zero_point is None else to_int8(jnp.asarray(zero_point))


def scale_in(q: QArray, dtype: Any) -> jax.Array:
    """The whole scale of a QArray, second level included, in a dtype fit for the final product."""
    scale = jnp.asarray(q.scale).astype(dtype)
    if q.tensor_scale is not None:
        scale = scale * jnp.asarray(q.tensor_scale).astype(dtype).reshape((1,) * q.ndim)
    return scale


def scale_dtype_for(result: Any, *qarrays: QArray) -> Any:
    """At least float32; wider when the scales or the result are."""
    floats = [jnp.float32] + [q.scale.dtype for q in qarrays]
    if jnp.issubdtype(result, jnp.floating):
        floats.append(result)
    return promote(*floats)


def rounded(product: jax.Array) -> jax.Array:
    """The product as it is, safe from being joined with a sum that follows.

    XLA's CPU compiler rounds a multiplication and a sum in one loop once or twice, depending on
    what else is in the loop. Then the program that trains and the one that serves would differ in
    the last bit. That this selects nothing is more than compilers see (a test would tell).
    """
    largest = jnp.finfo(product.dtype).max
    return jnp.where(product > largest, jnp.asarray(jnp.inf, product.dtype), product)


def widen(part: jax.Array, q: QArray, axes: Sequence[int]) -> jax.Array:
    """Repeat tiled entries along axes that reach the output, so that each is 1-wide or full."""
    for axis in axes:
        if part.shape[axis] not in (1, q.shape[axis]):
            repeated = jnp.repeat(part, tile_on(q, part, axis), axis=axis)
            part = lax.slice_in_dim(repeated, 0, q.shape[axis], axis=axis)
    return part


def split_axis(codes: jax.Array, axis: int, tile: int) -> jax.Array:
    """Split an axis into (tiles, tile). A short last tile is filled with zeros.

    Zero is the right filler even beside a zero point: at most one operand has one, and the other
    operand's zeros cancel the filled places in the product and in the correction alike.
    """
    length = codes.shape[axis]
    count = -(-length // tile)
    if count * tile != length:
        widths = [(0, 0)] * codes.ndim
        widths[axis] = (0, count * tile - length)
        codes = jnp.pad(codes, widths)
    return codes.reshape(*codes.shape[:axis], count, tile, *codes.shape[axis + 1 :])


def lay_out(part: jax.Array, order: Sequence[int], insert: Sequence[int]) -> jax.Array:
    """Put the axes in `order`, drop the rest (all 1-wide), then open 1-wide axes at `insert`."""
    dropped = [axis for axis in range(part.ndim) if axis not in order]
    part = lax.transpose(part, [*order, *dropped])
    part = lax.squeeze(part, range(len(order), part.ndim))
    return lax.expand_dims(part, insert)


def placed_like(part: jax.Array, target: jax.Array) -> jax.Array:
    """On an explicit mesh, give `part` the target's placement on every axis it really has."""
    sharding = jax.typeof(target).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return part
    spec = [s if n != 1 else None for s, n in zip(sharding.spec, part.shape, strict=True)]
    if tuple(jax.typeof(part).sharding.spec) == tuple(spec):
        return part
    return jax.sharding.reshard(part, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def spec_of(out_sharding: Any, ndim: int) -> tuple[Any, list[Any]]:
    """Mesh (or None) and one entry per axis of an out_sharding given in either spelling."""
    mesh = out_sharding.mesh if isinstance(out_sharding, NamedSharding) else None
    spec = out_sharding.spec if mesh is not None else out_sharding
    entries = list(spec)
    return mesh, entries + [None] * (ndim - len(entries))


def make_spec(mesh: Any, entries: Sequence[Any]) -> Any:
    """The reverse of `spec_of`."""
    spec = PartitionSpec(*entries)
    return spec if mesh is None else NamedSharding(mesh, spec)
