"""The product with a packed weight: the native FFI call, and the JAX primitive above it.

The primitive is native on a CPU and a product with the unpacked weight elsewhere; its derivatives
and its `vmap` are here too, and what the primitive of convolutions shares with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from fewbit._util import nearest
from fewbit.kernels._finish import check_activation, check_bias, finish, fused_activation
from fewbit.kernels._library import exported, native_available
from fewbit.kernels._partition import (
    alike,
    lower_spread,
    push_forward,
    run_eagerly,
    shares_panels,
    spread,
    weight_rule,
    zero_with_devices,
)
from fewbit.numerics import format_of
from fewbit.qarray import (
    PACKED_AXES,
    HowToQuantize,
    PanelArray,
    Panels,
    QArray,
    dequantize,
    pack_parts,
    quantize_static,
    quantize_with,
    unpack_parts,
    whole_axes,
)

FORMATS = (
    *(f"int{bits}" for bits in range(1, 9)),
    "uint4",
    "uint8",
    "nf4",
    "float4_e2m1fn",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""What the kernels read (native/common/formats.cc); mx and nvfp4 are one of the float types."""

_ACT = {"none": 0, "dynamic": 1, "static": 2}
_MSG_FORMAT = "The kernels cannot read {name!r}. They read {known}, and the mx and nvfp4 types."
_MSG_ACT = (
    "act={act!r} is not known{hint}. Use 'none' (x as it is), 'dynamic' (int8 rows) or 'static' "
    "(int8 rows with act_scale)."
)


def kernel_format(qtype: str) -> str:
    """The kernels' name of a format.

    >>> kernel_format('mxfp8')
    'float8_e4m3fn'
    """
    row = format_of(qtype)
    name = row.name if row.tile is None else row.storage.name
    if name not in FORMATS:
        raise ValueError(_MSG_FORMAT.format(name=row.name, known=", ".join(FORMATS)))
    return name


def matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    zero: jax.Array,
    tensor_scale: jax.Array,
    layer: jax.Array,
    act_scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    qtype: str,
    k: int,
    n: int,
    group: int,
    act: str = "none",
    act_tile: int = 0,
    transposed: bool = False,
    out_dtype: Any,
    activation: str | None = None,
) -> jax.Array:
    """x [M, k] times entry `layer` of the packed weight, [M, n]; or x [M, n] times its transpose.

    Runs on a CPU with the compiled part only (`kernels.native_available()`). Shapes and types that
    do not fit are errors of the call, raised when it runs.

    Args:
      x: float32 or bfloat16, or int8 codes.
      data: uint8[*lead, n/64, k/32, bits, 64, 4], sizes rounded up.
      scale: [*lead, n/64, groups, 64] in float32, float16, bfloat16, float8_e8m0fnu or
        float8_e4m3fn.
      zero: uint8 of the same shape, in units of the unsigned codes; uint8[0] if there is none.
      tensor_scale: float32 scalar, a factor of the whole result.
      layer: int32 scalar, which entry of the (flattened) lead axes; or int32 for each of them:
        how many rows of x, one after the other, are multiplied with it.
      act_scale: [M or 1, 1 or groups] for int8 codes or `act='static'`; else [0].
      bias: float32 or bfloat16 [n/64, 64], added to the scaled columns.
      qtype: name of the weight's format.
      k: length of the contraction.
      n: number of columns.
      group: k that share a weight scale: 16 or a multiple of 32; 0 for all.
      act: 'dynamic' quantizes the rows of a float x to int8 first, as `fewbit.quantize` does;
        'static' with the given act_scale, which has x's type.
      act_tile: k that share an activation scale: 0 for all, or `group`.
      transposed: x is a float [M, n], and the result [M, k].
      out_dtype: float32, bfloat16, or int32: the sums of codes, without any scale.
      activation: a function of each result, after the bias, by the kernels' own name
        (`_finish.fused_activation`).

    >>> from fewbit.kernels import native_available
    >>> def ones(shape, dtype):
    ...     return jnp.ones(shape, dtype)
    >>> def product(x):  # 128 + 1 is the code of 1
    ...     none, one = jnp.zeros((0,)), ones((), jnp.float32)
    ...     data = jnp.full((1, 1, 8, 64, 4), 129, jnp.uint8)
    ...     scale, zero = ones((1, 1, 64), jnp.float32), jnp.zeros((0,), jnp.uint8)
    ...     what = dict(qtype='int8', k=32, n=3, group=0, out_dtype='float32')
    ...     return matmul(x, data, scale, zero, one, jnp.int32(0), none, **what)
    >>> product(ones((1, 32), jnp.float32)).tolist() if native_available() else [[32.0] * 3]
    [[32.0, 32.0, 32.0]]
    """
    name = kernel_format(qtype)
    if act not in _ACT:
        hint = nearest(act, _ACT, "; did you mean {}?", cutoff=0.6)
        raise ValueError(_MSG_ACT.format(act=act, hint=hint))
    shape = (x.shape[0], k if transposed else n)
    result = jax.ShapeDtypeStruct(shape, jnp.dtype(out_dtype))
    call = jax.ffi.ffi_call("fewbit_matmul", result)
    return call(
        x,
        data,
        scale,
        zero,
        tensor_scale,
        layer,
        act_scale,
        jnp.zeros((0,), jnp.float32) if bias is None else bias,
        format=name,
        k=np.int64(k),
        n=np.int64(n),
        group=np.int64(group),
        act=np.int64(_ACT[act]),
        act_tile=np.int64(act_tile),
        transposed=transposed,
        activation=activation or "none",
    )


# --- What primitives over a packed weight share: its plain form, derivatives, `vmap` --------------


def entry_of(
    spec: Any, data: Any, scale: Any, zero: Any, tensor_scale: Any, layer: Any
) -> PanelArray:
    """One entry of the stack as an array [k, n]."""
    dims, groups = (spec.k, spec.n), 1 if spec.tile == 0 else -(-spec.k // spec.tile)
    view = Panels("kn", dims, (groups, spec.n), spec.tile, whole_axes(dims), 1)
    tensor_scale = tensor_scale if spec.qtype == "nvfp4" else None
    parts = data, scale, zero if zero.size else None, tensor_scale
    return PanelArray(*parts, layer, static=(spec.qtype, "float32", (), "panels", view))


def binding(primitive: Primitive) -> Callable[..., jax.Array]:
    """How to bind it, with what its lowering needs around it; gives it its eager form too."""

    def bind(*args: jax.Array, spec: Any) -> jax.Array:
        return primitive.bind(*args[:-1], args[-1] + zero_with_devices(), spec=spec)

    run_eagerly(primitive, bind)
    return bind


def jvp_in_x(
    what: str, bind: Callable[..., jax.Array], reference: Callable[..., jax.Array]
) -> Callable[..., tuple[jax.Array, Any]]:
    """The derivative of what is linear in a float x.

    Straight-through rules for a quantized x are the caller's: this knows codes, not their gradient.
    """

    def jvp(primals: Any, tangents: Any, *, spec: Any) -> tuple[jax.Array, Any]:
        out = bind(*primals, spec=spec)
        if spec.act != "none":
            raise NotImplementedError(
                f"A {what} has no derivative of its own: differentiate the quantized model, whose "
                "rules pass gradients straight through."
            )
        if not all(isinstance(t, ad.Zero) for t in tangents[1:]):  # scales that are being trained
            whole = [ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for t in tangents]
            function = functools.partial(reference, spec=spec)
            return out, jax.jvp(function, tuple(primals), tuple(whole))[1]
        if isinstance(tangents[0], ad.Zero):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, bind(tangents[0], *primals[1:], spec=spec)

    return jvp


def one_by_one(
    bind: Callable[..., jax.Array], args: Any, dims: Any, spec: Any
) -> tuple[jax.Array, int]:
    """`vmap` where the weight is mapped over too: one call after the other."""
    moving = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None]

    def one(entries: Any) -> jax.Array:
        rest = iter(entries)
        each = [a if d is None else next(rest) for a, d in zip(args, dims, strict=True)]
        return bind(*each, spec=spec)

    return jax.lax.map(one, moving), 0


def leading(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    """`a` with its mapped axis in front, as often as needed if it is not mapped."""
    return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)


# --- A product with a weight in panels: its description, and the same product by XLA --------------


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


# --- x · W as one JAX primitive: native on a CPU, by XLA elsewhere --------------------------------

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

    >>> from fewbit.qarray._panels import to_panels
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


lower_spread(panel_dot_p, _native, _on_one_device, reference, exported(_on_one_device, reference))


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
    product = unfinished(spec, "float32")

    def apart(x, act_scale, bias, *weight):
        out = _bind(x, act_scale, jnp.zeros((0,), jnp.float32), *weight, spec=product)
        return finish(out, columns_of(bias, spec), spec.activation).astype(spec.out_dtype)

    return push_forward(apart, primals, tangents)


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
