"""Convolutions with a quantized kernel: the native FFI calls, and the JAX primitive above them.

The primitive is native on a CPU and XLA's convolution elsewhere; its derivatives and its `vmap` are
here too. `ops/_panel_conv.py` says which convolutions come here, and brings their axes in order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from fewbit.kernels._library import exported, native_available
from fewbit.kernels._matmul import binding, entry_of, jvp_in_x, kernel_format, leading, one_by_one
from fewbit.kernels._partition import alike, lower_spread, shares_panels, spread, weight_rule
from fewbit.qarray import PACKED_AXES, PanelArray, QArray, dequantize, quantize

LONGEST_CHANNEL_SUM = 1024
"""Products of int8 codes that `channel_conv` sums exactly (in float32)."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The window of a convolution over images [N, H, W, C]; pairs are along H and W.

    >>> Window((3, 3), (2, 2), ((1, 1), (1, 1))).out_shape((1, 8, 8, 16))
    (4, 4)
    """

    taps: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def out_shape(self, x_shape: tuple[int, ...]) -> tuple[int, int]:
        """Height and width of the result."""
        height, width = (
            max(0, (size + sum(pad) - (taps - 1) * dilation - 1) // stride + 1)
            for size, taps, stride, pad, dilation in zip(
                x_shape[1:3], self.taps, self.strides, self.padding, self.dilation, strict=True
            )
        )
        return height, width

    @property
    def numbers(self) -> np.ndarray:
        """As the kernels read it."""
        low, high = zip(*self.padding, strict=True)
        parts = (*self.taps, *self.strides, *low, *high, *self.dilation)
        return np.asarray(parts, np.int64)


def conv(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    zero: jax.Array,
    tensor_scale: jax.Array,
    layer: jax.Array,
    act_scale: jax.Array,
    *,
    qtype: str,
    window: Window,
    k: int,
    n: int,
    group: int,
    act: str = "none",
    out_dtype: Any,
) -> jax.Array:
    """Images [N, H, W, C] convolved with entry `layer` of a packed weight, [N, H', W', n].

    The weight is that of `matmul`, with k = (y, x, channel of a group). A group's output channels
    must be whole panels of 64.

    Args:
      x: float32 or bfloat16, or int8 codes.
      data: the weight's bytes; `scale`, `zero`, `tensor_scale` and `layer` as in `matmul`.
      scale: as in `matmul`.
      zero: as in `matmul`.
      tensor_scale: as in `matmul`.
      layer: as in `matmul`.
      act_scale: float32 [N or 1] for int8 codes; [0] for a float x.
      qtype: name of the weight's format.
      window: taps, strides, padding, dilation and groups.
      k: values that an output sums over: taps times channels of a group.
      n: output channels.
      group: k that share a weight scale; 0 for all, which int8 images need.
      act: 'dynamic' quantizes every image of a float x to int8 first, as `fewbit.quantize` does.
      out_dtype: float32, bfloat16, or int32: the sums of codes, without any scale.

    >>> from fewbit.kernels import native_available
    >>> def convolved(x):  # 128 + 1 is the code of 1
    ...     data = jnp.full((1, 1, 8, 64, 4), 129, jnp.uint8)
    ...     scale, one = jnp.ones((1, 1, 64)), jnp.ones(())
    ...     parts = data, scale, jnp.zeros((0,), jnp.uint8), one, jnp.int32(0), jnp.zeros((0,))
    ...     window = Window((2, 2), (1, 1), ((0, 0), (0, 0)))
    ...     what = dict(qtype='int8', window=window, k=32, n=3, group=0, out_dtype='float32')
    ...     return conv(x, *parts, **what)[0, 0, 0].tolist()
    >>> convolved(jnp.ones((1, 2, 2, 8))) if native_available() else [32.0] * 3
    [32.0, 32.0, 32.0]
    """
    call = jax.ffi.ffi_call("fewbit_conv", _result(x, window, n, out_dtype))
    return call(
        x,
        data,
        scale,
        zero,
        tensor_scale,
        layer,
        act_scale,
        format=kernel_format(qtype),
        window=window.numbers,
        groups=np.int64(window.groups),
        k=np.int64(k),
        n=np.int64(n),
        group=np.int64(group),
        act=np.int64(act == "dynamic"),
    )


def channel_conv(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    act_scale: jax.Array,
    *,
    window: Window,
    act: str = "none",
    out_dtype: Any,
) -> jax.Array:
    """Images [N, H, W, C] convolved with a float32 weight [k, n] of few outputs per group.

    `weight` has k = (y, x, channel of a group); `scale` [n] (or [0]) multiplies the result.
    Everything else is as in `conv`. Codes are summed exactly up to `LONGEST_CHANNEL_SUM`.

    >>> from fewbit.kernels import native_available
    >>> def convolved(x):
    ...     window = Window((1, 1), (1, 1), ((0, 0), (0, 0)), groups=2)
    ...     weight, none = jnp.asarray([[2.0, 3.0]]), jnp.zeros((0,))
    ...     out = channel_conv(x, weight, none, none, window=window, out_dtype='float32')
    ...     return out[0, 0, 0].tolist()
    >>> convolved(jnp.ones((1, 1, 1, 2))) if native_available() else [2.0, 3.0]
    [2.0, 3.0]
    """
    n = weight.shape[1]
    call = jax.ffi.ffi_call("fewbit_channel_conv", _result(x, window, n, out_dtype))
    return call(
        x,
        weight,
        scale,
        act_scale,
        window=window.numbers,
        groups=np.int64(window.groups),
        n=np.int64(n),
        act=np.int64(act == "dynamic"),
    )


def _result(x: jax.Array, window: Window, n: int, dtype: Any) -> jax.ShapeDtypeStruct:
    shape = (x.shape[0], *window.out_shape(x.shape), n)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# --- A convolution as one JAX primitive: native on a CPU, by XLA elsewhere ------------------------

_NUMBERS = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Convolution:
    """What the kernel must know besides arrays."""

    window: Window
    k: int
    n: int
    act: str  # 'none' | 'dynamic': images are quantized to int8 on the way | 'codes'
    out_dtype: str
    qtype: str | None = None  # of a weight in panels; None: a plain float weight
    tile: int = 0  # k that share a scale of the weight; 0: all


def panel_conv(
    x: jax.Array,
    weight: PanelArray,
    window: Window,
    *,
    act: str = "none",
    act_scale: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """Images [N, H, W, C] convolved with a weight in panels, whose k is (y, x, channel).

    `act='dynamic'` quantizes images to int8 first, `act='codes'` says that x is int8 codes already,
    with `act_scale` [N or 1].

    >>> from fewbit.qarray._panels import to_panels
    >>> w = to_panels(quantize(jnp.ones((2, 2, 8, 64)), 'int8', channelwise_axes=(3,)), 'kkcn')
    >>> panel_conv(jnp.ones((1, 4, 4, 8)), w, Window((2, 2), (2, 2), ((0, 0), (0, 0)))).shape
    (1, 2, 2, 64)
    """
    view = weight.panels
    k = math.prod(window.taps) * x.shape[3] // window.groups
    if weight.lead:
        raise ValueError(f"{weight!r} is a stack: take an entry with at_layer(i) first.")
    if x.ndim != 4 or view.length("k") != k:
        raise ValueError(
            f"x of shape {tuple(x.shape)} and {window} give sums over {k} values, but the weight "
            f"{weight!r} has {view.length('k')} per output channel."
        )
    out = jnp.dtype(out_dtype).name
    n = view.length("n")
    spec = Convolution(window, k, n, act, out, str(weight._static[0]), view.tile)
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
        jnp.zeros((), jnp.int32) if weight.layer is None else weight.layer.reshape(()),
    )
    return _bind(*alike(args), spec=spec)


def plain_conv(
    x: jax.Array,
    weight: jax.Array,
    window: Window,
    *,
    scale: jax.Array | None = None,
    act: str = "none",
    act_scale: jax.Array | None = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """Images [N, H, W, C] convolved with a float32 weight [k, n], for few outputs per group.

    With int8 images the weight holds codes, and `scale` [n] what they are multiplied with.

    >>> window = Window((1, 1), (1, 1), ((0, 0), (0, 0)), groups=2)
    >>> plain_conv(jnp.ones((1, 1, 1, 2)), jnp.asarray([[2.0, 3.0]]), window).ravel().tolist()
    [2.0, 3.0]
    """
    none = jnp.zeros((0,), jnp.float32)
    k, n = weight.shape
    spec = Convolution(window, k, n, act, jnp.dtype(out_dtype).name)
    args = (
        x,
        none if act_scale is None else act_scale,
        weight,
        none if scale is None else scale,
        jnp.zeros((), jnp.int32),
    )
    return _bind(*alike(args), spec=spec)


panel_conv_p = Primitive("fewbit_panel_conv")
"""Operands: x and act_scale; `data`, `scale`, `zero`, `tensor_scale` of a weight in panels, or a
plain weight and its scale; last the layer. What is not there is empty."""


_bind = binding(panel_conv_p)


@panel_conv_p.def_abstract_eval
def _shape(x: Any, *rest: Any, spec: Convolution) -> Any:
    shape = (x.shape[0], *spec.window.out_shape(x.shape), spec.n)
    return x.update(shape=shape, dtype=jnp.dtype(spec.out_dtype))


# --- lowering -------------------------------------------------------------------------------------


def _on_one_device(x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Convolution) -> Any:
    if not native_available():
        return _reference(x, act_scale, *weight, spec=spec)
    common: dict[str, Any] = dict(window=spec.window, act=spec.act, out_dtype=spec.out_dtype)
    if spec.qtype is None:
        matrix, scale, _ = weight
        return channel_conv(x, matrix, scale, act_scale, **common)
    data, scale, zero, tensor, layer = weight
    common |= dict(qtype=spec.qtype, k=spec.k, n=spec.n, group=spec.tile)
    return conv(x, data, scale, zero, tensor, layer, act_scale, **common)


def _native(*operands: jax.Array, spec: Convolution) -> jax.Array:
    x, act_scale, *weight = operands
    by_panels = spec.qtype is not None and shares_panels(spec.n) and spec.window.groups == 1
    images = "m" if act_scale.shape == x.shape[:1] else "o"
    if spec.qtype is None:
        factors = ["k j", "j" if weight[1].size else "s", ""]
    else:
        factors = weight_rule("p" if by_panels else "q", weight[2].ndim > 1)
    rule = ", ".join(["m h w i", images, *factors])
    rule += " -> m y x (p c)" if by_panels else " -> m y x j"
    return spread(_on_one_device, operands, spec, rule)


def _reference(x: jax.Array, act_scale: jax.Array, *weight: Any, spec: Convolution) -> jax.Array:
    shape = (*spec.window.taps, x.shape[3] // spec.window.groups, spec.n)
    images: Any = x
    if spec.act == "dynamic":
        images = quantize(x, "int8", channelwise_axes=(0,))
    elif spec.act == "codes":
        images = QArray(x, act_scale.reshape(-1, 1, 1, 1))
    if spec.act == "none":
        out = _xla_conv(x.astype(jnp.float32), _float_kernel(weight, spec).reshape(shape), spec)
        return out.astype(spec.out_dtype)
    codes, scale = _codes_and_scale(weight, spec)
    total = _xla_conv(images.qvalue, codes.reshape(shape), spec, jnp.int32)
    total = total.astype(jnp.float32) * images.scale.astype(jnp.float32)
    return (total * scale.astype(jnp.float32).reshape(1, 1, 1, -1)).astype(spec.out_dtype)


def _xla_conv(x: jax.Array, kernel: jax.Array, spec: Convolution, dtype: Any = None) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        spec.window.strides,
        spec.window.padding,
        rhs_dilation=spec.window.dilation,
        dimension_numbers=_NUMBERS,
        feature_group_count=spec.window.groups,
        preferred_element_type=dtype,
    )


def _float_kernel(weight: Any, spec: Convolution) -> jax.Array:
    """The float32 matrix [k, n]."""
    if spec.qtype is not None:
        return dequantize(entry_of(spec, *weight), jnp.float32)
    matrix, scale = weight[:2]
    return matrix * scale.reshape(1, -1) if scale.size else matrix


def _codes_and_scale(weight: Any, spec: Convolution) -> tuple[jax.Array, jax.Array]:
    """int8 codes [k, n], and the scales [n] of the columns."""
    if spec.qtype is None:
        return weight[0].astype(jnp.int8), weight[1]
    plain = entry_of(spec, *weight).plain()
    return plain.qvalue.astype(jnp.int8), plain.scale.reshape(-1)


lower_spread(
    panel_conv_p, _native, _on_one_device, _reference, exported(_on_one_device, _reference)
)


# --- derivatives ----------------------------------------------------------------------------------


def _transpose(g: Any, x: Any, *rest: Any, spec: Convolution) -> list[Any]:
    if isinstance(g, ad.Zero):
        return [None] * (1 + len(rest))
    like = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
    (back,) = jax.linear_transpose(lambda x: _reference(x, *rest, spec=spec), like)(g)
    return [back] + [None] * len(rest)


ad.primitive_jvps[panel_conv_p] = jvp_in_x("convolution with quantized images", _bind, _reference)
ad.primitive_transposes[panel_conv_p] = _transpose


# --- vmap -----------------------------------------------------------------------------------------


def _batch(args: Any, dims: Any, *, spec: Convolution) -> tuple[jax.Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    x, act_scale, *weight = args
    if all(d is None for d in dims[2:]):  # more images of one convolution
        x = leading(x, dims[0], size)
        images = x.shape[1]
        act_scale = leading(act_scale, dims[1], size)
        if act_scale.shape[1]:
            act_scale = jnp.broadcast_to(act_scale, (size, images))
        out = panel_conv_p.bind(
            x.reshape(size * images, *x.shape[2:]),
            act_scale.reshape(size * act_scale.shape[1]),
            *weight,
            spec=spec,
        )
        return out.reshape(size, images, *out.shape[1:]), 0
    return one_by_one(panel_conv_p.bind, args, dims, spec)


batching.primitive_batchers[panel_conv_p] = _batch
