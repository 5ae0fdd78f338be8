"""What a product with a weight in panels is: its description, and the same product through XLA.

Where there is no native part, on other platforms, and wherever a program must not call it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._qarray_static import quantize_static
from fewbit.kernels._finish import finish
from fewbit.kernels._packed_weight import entry_of
from fewbit.numerics import format_of
from fewbit.packing_panels import unpack_parts
from fewbit.qarray import HowToQuantize, QArray, dequantize, quantize_with


@dataclasses.dataclass(frozen=True)
class Product:
    """What the kernel must know besides arrays."""

    qtype: str
    k: int
    n: int
    tile: int  # rows of W that share a scale; 0: all
    act: str  # 'none' | 'codes' | 'dynamic', 'static': x becomes int8 on the way
    act_tile: int  # k per activation scale; 0: one per row
    out_dtype: str
    transposed: bool = False  # x is [M, N] and the result x · Wᵀ
    activation: str | None = None  # of the result, after the bias

    @property
    def width(self) -> int:
        return self.k if self.transposed else self.n


def reference(
    x: jax.Array, act_scale: jax.Array, bias: jax.Array, *weight: Any, spec: Product
) -> jax.Array:
    """The product of the primitive's operands, unpacked."""
    out = _reference_product(x, act_scale, *weight, spec=unfinished(spec, "float32"))
    return finish(out, columns_of(bias, spec), spec.activation).astype(spec.out_dtype)


def unfinished(spec: Product, out_dtype: str) -> Product:
    """The product without what follows it."""
    return dataclasses.replace(spec, activation=None, out_dtype=out_dtype)


def columns_of(bias: jax.Array, spec: Product) -> jax.Array | None:
    """The bias [N] of the primitive's operand."""
    return None if bias.ndim == 1 else unpack_parts(bias[:, None, :], spec.n)[0]


def _reference_product(
    x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Product
) -> jax.Array:
    if weight[-1].ndim:
        return _ragged_reference(x, act_scale, *weight, spec=spec)
    if spec.act != "none" and not (spec.tile or spec.act_tile) and _is_integer(spec.qtype):
        return _integer_reference(x, act_scale, *weight, spec=spec)
    matrix = _matrix(spec, *weight)
    matrix = matrix.T if spec.transposed else matrix
    return jnp.matmul(_float_rows(spec, x, act_scale), matrix).astype(spec.out_dtype)


def _integer_reference(
    x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Product
) -> jax.Array:
    """The product on 8-bit codes, which accelerators have units for."""
    rows = _quantized_rows(spec, x, act_scale)
    columns = entry_of(spec, *weight).plain()
    codes = columns.qvalue.astype(jnp.int8)
    total = jnp.matmul(rows.qvalue, codes, preferred_element_type=jnp.int32)
    if columns.zero_point is not None:
        sums = jnp.sum(rows.qvalue, axis=1, dtype=jnp.int32, keepdims=True)
        total = total - columns.zero_point.astype(jnp.int32) * sums
    scales = rows.scale.astype(jnp.float32) * columns.scale.astype(jnp.float32)
    return (total.astype(jnp.float32) * scales).astype(spec.out_dtype)


def _ragged_reference(x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Product) -> jax.Array:
    *parts, sizes = weight
    matrices = jax.vmap(lambda i: _matrix(spec, *parts, i))(jnp.arange(sizes.shape[0]))
    matrices = jnp.swapaxes(matrices, 1, 2) if spec.transposed else matrices
    rows = _float_rows(spec, x, act_scale)
    return jax.lax.ragged_dot(rows, matrices, sizes).astype(spec.out_dtype)


def _is_integer(qtype: str) -> bool:
    row = format_of(qtype)
    return row.kind in ("int", "sign") and row.storage.name in ("int4", "int8")


def _matrix(spec: Product, *weight: Any) -> jax.Array:
    """The float32 matrix [K, N] of one entry of the stack."""
    return dequantize(entry_of(spec, *weight), jnp.float32)


def _float_rows(spec: Product, x: jax.Array, act_scale: jax.Array) -> jax.Array:
    if spec.act == "none":
        return x.astype(jnp.float32)
    return dequantize(_quantized_rows(spec, x, act_scale), jnp.float32)


def _quantized_rows(spec: Product, x: jax.Array, act_scale: jax.Array) -> QArray:
    if spec.act == "codes":
        tiles = ((-1, spec.act_tile),) if spec.act_tile and spec.k % spec.act_tile else ()
        return QArray(x, act_scale, tiles=tiles)
    tiled = {1: spec.act_tile} if spec.act_tile else {}
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes=tiled)
    if spec.act == "static":
        return quantize_static(x, how, act_scale, None)
    return quantize_with(x, how)
