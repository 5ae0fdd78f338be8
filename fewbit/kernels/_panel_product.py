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
from fewbit.kernels._backend import exported
from fewbit.kernels._finish import check_activation, check_bias, finish
from fewbit.kernels._matmul import matmul
from fewbit.kernels._native import native_available
from fewbit.kernels._packed_weight import binding, jvp_in_x, leading, one_by_one
from fewbit.kernels._panel_reference import Product, columns_of, reference, unfinished
from fewbit.kernels._partition import (
    alike,
    native_lowering,
    shares_panels,
    spread,
    weight_rule,
)
from fewbit.kernels._steps import fused_activation
from fewbit.packing_panels import pack_parts

ROWS = ("float32", "bfloat16")
"""Types of the activations and results that the kernels read and write."""


def panel_product(
    x: jax.Array,
    weight: PanelArray,
    *,
    act: str = "none",
    act_scale: jax.Array | None = None,
    act_tile: int = 0,
    out_dtype: Any = jnp.float32,
    group_sizes: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """x [M, K] times the weight's matrix [K, N].

    `act='dynamic'` quantizes the rows of x to int8 first, `act='static'` does so with `act_scale`
    [M or 1, K/act_tile] in x's type, and `act='codes'` says that x is int8 codes of it already.
    With `group_sizes` the weight is a stack, of which each entry gets so many of the rows, as in
    `jax.lax.ragged_dot`. `bias` [N], float32 or bfloat16, and then `activation` ('relu', 'gelu',
    ...) are applied before the result is rounded to `out_dtype`; the activation by XLA where the
    kernels do not have its bits.

    >>> from fewbit._qarray_panels import to_panels
    >>> from fewbit.qarray import quantize
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
    check_activation(activation)
    check_bias(bias, n)
    if native_available() and fused_activation(activation) is None:
        given: dict[str, Any] = dict(act=act, act_scale=act_scale, act_tile=act_tile, bias=bias)
        wide = panel_product(x, weight, group_sizes=group_sizes, **given)
        return finish(wide, None, activation).astype(out_dtype)
    out = jnp.dtype(out_dtype).name
    spec = Product(
        str(weight._static[0]), k, n, view.tile, act, act_tile, out, activation=activation
    )
    data, scale, zero, tensor_scale = weight.packed_parts
    stack = data.shape[: data.ndim - PACKED_AXES]

    def flat(part):
        return part.reshape(math.prod(stack), *part.shape[len(stack) :])

    args = (
        x,
        jnp.zeros((0,), jnp.float32) if act_scale is None else act_scale,
        jnp.zeros((0,), jnp.float32) if bias is None else _by_panels(bias),
        flat(data),
        flat(scale),
        jnp.zeros((0,), jnp.uint8) if zero is None else flat(zero),
        jnp.ones((), jnp.float32)
        if tensor_scale is None
        else tensor_scale.astype(jnp.float32).reshape(()),
        _entries(weight, math.prod(stack), group_sizes),
    )
    return _bind(*alike(args), spec=spec)


def _by_panels(bias: jax.Array) -> jax.Array:
    """[N] as [N/64, 64], in a type that the kernels read."""
    bias = bias if bias.dtype.name in ROWS else bias.astype(jnp.float32)
    return pack_parts(bias[None, :], 0.0)[:, 0, :]


def _entries(weight: PanelArray, count: int, group_sizes: jax.Array | None) -> jax.Array:
    """The entry of the stack that is multiplied, or the rows of each of its `count` entries."""
    layer = jnp.zeros((), jnp.int32) if weight.layer is None else weight.layer.reshape(())
    if group_sizes is None:
        return layer
    sizes = group_sizes.astype(jnp.int32)
    first = layer * sizes.shape[0]
    return jax.lax.dynamic_update_slice(jnp.zeros((count,), jnp.int32), sizes, (first,))


panel_dot_p = Primitive("fewbit_panel_dot")
"""Operands: x, act_scale, bias, then `data`, `scale`, `zero`, `tensor_scale` and `layer` of the
weight; act_scale, bias and zero are empty where there is none."""


_bind = binding(panel_dot_p)


@panel_dot_p.def_abstract_eval
def _shape(x: Any, *rest: Any, spec: Product) -> Any:
    return x.update(shape=(x.shape[0], spec.width), dtype=jnp.dtype(spec.out_dtype))


def _native(*operands: jax.Array, spec: Product) -> jax.Array:
    x, act_scale, bias, _, _, zero, *_ = operands
    by_panels = shares_panels(spec.n) and not spec.transposed
    row = "m" if act_scale.shape[:1] == x.shape[:1] else "o"
    scales = f"{row} s" if act_scale.ndim == 2 else "s"
    weight = weight_rule("p" if by_panels else "q", zero.ndim > 1)
    columns = "y" if bias.ndim == 1 else "p c" if by_panels else "q c"
    rule = ", ".join(["m i", scales, columns, *weight]) + (
        " -> m (p c)" if by_panels else " -> m j"
    )
    if operands[-1].ndim:  # which entry a row belongs to depends on the rows before it
        rule = rule.replace("m", "r").replace(" ->", "h ->")
    return spread(_on_one_device, operands, spec, rule)


def _on_one_device(
    x: jax.Array, act_scale: jax.Array, bias: jax.Array, *weight: Any, spec: Product
) -> jax.Array:
    if not native_available():
        return reference(x, act_scale, bias, *weight, spec=spec)
    data, scale, zero, tensor_scale, layer = weight
    return matmul(
        x,
        data,
        scale,
        zero,
        tensor_scale,
        layer,
        act_scale,
        bias,
        qtype=spec.qtype,
        k=spec.k,
        n=spec.n,
        group=spec.tile,
        act="none" if spec.act == "codes" else spec.act,
        act_tile=spec.act_tile,
        transposed=spec.transposed,
        out_dtype=spec.out_dtype,
        activation=fused_activation(spec.activation),
    )


mlir.register_lowering(panel_dot_p, mlir.lower_fun(reference, multiple_results=False))
mlir.register_lowering(
    panel_dot_p,
    native_lowering(_native, _on_one_device, reference, exported(_on_one_device, reference)),
    platform="cpu",
)


# --- derivatives ----------------------------------------------------------------------------------


def _transpose(g: Any, x: Any, *rest: Any, spec: Product) -> list[Any]:
    if isinstance(g, ad.Zero):
        return [None] * (1 + len(rest))
    back = dataclasses.replace(
        spec, transposed=not spec.transposed, out_dtype=x.aval.dtype.name, act="none"
    )
    return [_bind(g, *rest, spec=back)] + [None] * len(rest)


_jvp_of_product = jvp_in_x("product with quantized activations", _bind, reference)


def _jvp(primals: Any, tangents: Any, *, spec: Product) -> tuple[jax.Array, Any]:
    """A bias or an activation is not fused where a derivative is taken."""
    if spec.activation is None and primals[2].ndim == 1:
        return _jvp_of_product(primals, tangents, spec=spec)
    moving = {k: p for k, p in enumerate(primals) if not isinstance(tangents[k], ad.Zero)}
    product = unfinished(spec, "float32")

    def apart(moving):
        x, act_scale, bias, *weight = (moving.get(k, p) for k, p in enumerate(primals))
        out = _bind(x, act_scale, jnp.zeros((0,), jnp.float32), *weight, spec=product)
        return finish(out, columns_of(bias, spec), spec.activation).astype(spec.out_dtype)

    return jax.jvp(apart, (moving,), ({k: tangents[k] for k in moving},))


ad.primitive_jvps[panel_dot_p] = _jvp
ad.primitive_transposes[panel_dot_p] = _transpose


# --- vmap ----------------------------------------------------------------------------------------


def _batch(args: Any, dims: Any, *, spec: Product) -> tuple[jax.Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    x, act_scale, *rest = args
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
        out = panel_dot_p.bind(rows, act_scale, *rest, spec=spec)
        return out.reshape(size, x.shape[1], spec.width), 0
    return one_by_one(panel_dot_p.bind, args, dims, spec)


batching.primitive_batchers[panel_dot_p] = _batch
