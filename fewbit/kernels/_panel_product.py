"""x · W with W in panels, as one JAX primitive: native on a CPU, an unpacked product elsewhere.

The lowering chooses, so a traced program can still go anywhere. A batch of `vmap` becomes more
rows. The product is linear in a float x, and its transpose g · Wᵀ reads the same bytes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fewbit._qarray_panels import PACKED_AXES, PanelArray
from fewbit.kernels._matmul import matmul
from fewbit.kernels._native import native_available
from fewbit.kernels._packed_weight import binding, entry_of, jvp_in_x, leading, one_by_one
from fewbit.kernels._partition import (
    alike,
    native_lowering,
    shares_panels,
    spread,
    weight_rule,
)
from fewbit.numerics import format_of
from fewbit.qarray import QArray, dequantize, quantize

ROWS = ("float32", "bfloat16")
"""Types of the activations and results that the kernels read and write."""


@dataclasses.dataclass(frozen=True)
class Product:
    """What the kernel must know besides arrays."""

    qtype: str
    k: int
    n: int
    tile: int  # rows of W that share a scale; 0: all
    act: str  # 'none' | 'dynamic': rows of x are quantized to int8 on the way | 'codes'
    act_tile: int  # k per activation scale; 0: one per row
    out_dtype: str
    transposed: bool = False  # x is [M, N] and the result x · Wᵀ

    @property
    def width(self) -> int:
        return self.k if self.transposed else self.n


def panel_product(
    x: jax.Array,
    weight: PanelArray,
    *,
    act: str = "none",
    act_scale: jax.Array | None = None,
    act_tile: int = 0,
    out_dtype: Any = jnp.float32,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
    """x [M, K] times the weight's matrix [K, N].

    `act='dynamic'` quantizes the rows of x to int8 first, `act='codes'` says that x is int8 codes
    already, with `act_scale` [M, K/act_tile]. With `group_sizes` the weight is a stack, of which
    each entry gets so many of the rows, as in `jax.lax.ragged_dot`.

    >>> from fewbit._qarray_panels import to_panels
    >>> w = to_panels(quantize(jnp.ones((32, 3)), 'int8', channelwise_axes=(1,)), 'kn')
    >>> panel_product(jnp.ones((2, 32)), w).round(1)[0]
    Array([31.9, 31.9, 31.9], dtype=float32)
    """
    view = weight.panels
    if group_sizes is None and weight.lead:
        raise ValueError(f"{weight!r} is a stack: take an entry with at_layer(i) first.")
    if group_sizes is not None and tuple(group_sizes.shape) != weight.lead:
        raise ValueError(
            f"group_sizes must have one number for each entry of {weight!r}, shape {weight.lead}, "
            f"got {tuple(group_sizes.shape)}."
        )
    k, n = view.length("k"), view.length("n")
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x must have the shape [rows, {k}], got {tuple(x.shape)}.")
    out = jnp.dtype(out_dtype).name
    spec = Product(str(weight._static[0]), k, n, view.tile, act, act_tile, out)
    data, scale, zero, tensor_scale = weight.packed_parts
    stack = data.shape[: data.ndim - PACKED_AXES]

    def flat(part):
        return part.reshape(math.prod(stack), *part.shape[len(stack) :])

    args = (
        x,
        jnp.zeros((0,), jnp.float32) if act_scale is None else act_scale,
        flat(data),
        flat(scale),
        jnp.zeros((0,), jnp.uint8) if zero is None else flat(zero),
        jnp.ones((), jnp.float32)
        if tensor_scale is None
        else tensor_scale.astype(jnp.float32).reshape(()),
        _entries(weight, math.prod(stack), group_sizes),
    )
    return _bind(*alike(args), spec=spec)


def _entries(weight: PanelArray, count: int, group_sizes: jax.Array | None) -> jax.Array:
    """The entry of the stack that is multiplied, or the rows of each of its `count` entries."""
    layer = jnp.zeros((), jnp.int32) if weight.layer is None else weight.layer.reshape(())
    if group_sizes is None:
        return layer
    sizes = group_sizes.astype(jnp.int32)
    first = layer * sizes.shape[0]
    return jax.lax.dynamic_update_slice(jnp.zeros((count,), jnp.int32), sizes, (first,))


panel_dot_p = Primitive("fewbit_panel_dot")
"""Operands: x, act_scale, then `data`, `scale`, `zero`, `tensor_scale` and `layer` of the weight;
act_scale and zero are empty where there is none."""


_bind = binding(panel_dot_p)


@panel_dot_p.def_abstract_eval
def _shape(x: Any, *rest: Any, spec: Product) -> Any:
    return x.update(shape=(x.shape[0], spec.width), dtype=jnp.dtype(spec.out_dtype))


def _native(*operands: jax.Array, spec: Product) -> jax.Array:
    x, act_scale, _, _, zero, *_ = operands
    by_panels = shares_panels(spec.n) and not spec.transposed
    row = "m" if act_scale.shape[:1] == x.shape[:1] else "o"
    scales = f"{row} s" if act_scale.ndim == 2 else "s"
    weight = weight_rule("p" if by_panels else "q", zero.ndim > 1)
    rule = ", ".join(["m i", scales, *weight]) + (" -> m (p c)" if by_panels else " -> m j")
    if operands[-1].ndim:  # which entry a row belongs to depends on the rows before it
        rule = rule.replace("m", "r").replace(" ->", "h ->")
    return spread(_on_one_device, operands, spec, rule)


def _on_one_device(x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Product) -> jax.Array:
    if not native_available():
        return _reference(x, act_scale, *weight, spec=spec)
    data, scale, zero, tensor_scale, layer = weight
    return matmul(
        x,
        data,
        scale,
        zero,
        tensor_scale,
        layer,
        act_scale,
        qtype=spec.qtype,
        k=spec.k,
        n=spec.n,
        group=spec.tile,
        act="dynamic" if spec.act == "dynamic" else "none",
        act_tile=spec.act_tile,
        transposed=spec.transposed,
        out_dtype=spec.out_dtype,
    )


def _reference(x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Product) -> jax.Array:
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
    rows = QArray(x, act_scale)
    if spec.act == "dynamic":
        rows = quantize(x, "int8", channelwise_axes=(0,))
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
    if spec.act == "dynamic":
        tiled = {1: spec.act_tile} if spec.act_tile else None
        return dequantize(quantize(x, "int8", channelwise_axes=(0,), tiled_axes=tiled), jnp.float32)
    if spec.act == "codes":
        tiles = ((-1, spec.act_tile),) if spec.act_tile and spec.k % spec.act_tile else ()
        return dequantize(QArray(x, act_scale, tiles=tiles), jnp.float32)
    return x.astype(jnp.float32)


mlir.register_lowering(panel_dot_p, mlir.lower_fun(_reference, multiple_results=False))
mlir.register_lowering(
    panel_dot_p, native_lowering(_native, _on_one_device, _reference), platform="cpu"
)


# --- derivatives ----------------------------------------------------------------------------------


def _transpose(g: Any, x: Any, *rest: Any, spec: Product) -> list[Any]:
    if isinstance(g, ad.Zero):
        return [None] * (1 + len(rest))
    back = dataclasses.replace(
        spec, transposed=not spec.transposed, out_dtype=x.aval.dtype.name, act="none"
    )
    return [_bind(g, *rest, spec=back)] + [None] * len(rest)


ad.primitive_jvps[panel_dot_p] = jvp_in_x("product with quantized activations", _bind, _reference)
ad.primitive_transposes[panel_dot_p] = _transpose


# --- vmap ----------------------------------------------------------------------------------------


def _batch(args: Any, dims: Any, *, spec: Product) -> tuple[jax.Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    x, act_scale, *weight = args
    if all(d is None for d in dims[2:]) and args[-1].ndim == 0:  # more rows of one product
        x = leading(x, dims[0], size)
        scaled = act_scale.ndim - (dims[1] is not None) == 2
        if scaled:
            act_scale = leading(act_scale, dims[1], size)
            shape = (size * x.shape[1], act_scale.shape[2])
            act_scale = jnp.broadcast_to(act_scale, (size, x.shape[1], act_scale.shape[2])).reshape(
                shape
            )
        elif dims[1] is not None:
            act_scale = jnp.zeros((0,), act_scale.dtype)
        rows = x.reshape(size * x.shape[1], x.shape[2])
        out = panel_dot_p.bind(rows, act_scale, *weight, spec=spec)
        return out.reshape(size, x.shape[1], spec.width), 0
    return one_by_one(panel_dot_p.bind, args, dims, spec)


batching.primitive_batchers[panel_dot_p] = _batch
