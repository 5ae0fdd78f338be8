"""Convolutions with a quantized kernel: which of them native code runs, and how axes get there.

Native code convolves images [N, H, W, C]. A kernel in panels qualifies when it was packed for a
convolution: its spatial axes in any order, then its input channels. Where a group has few output
channels (depthwise), the plain kernel is decoded on the way: it is tiny.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fewbit import kernels
from fewbit.kernels import Window
from fewbit.numerics import format_of
from fewbit.ops._arithmetic import INT32_MAX, code_reach, is_constant, is_tiled
from fewbit.ops._on_panels import on_explicit_mesh, packed_order
from fewbit.ops._operand import Deferred, is_placed
from fewbit.qarray import COLUMNS, PanelArray, QArray, dequantize

_FLOATS = ("float32", "bfloat16", "float16")
_MOST_DEPTH = 64  # input channels of a group that the kernel for few output channels copes with


@dataclasses.dataclass(frozen=True)
class NativeConv:
    """A convolution that native code runs."""

    weight: QArray  # in panels, or plain with few output channels per group
    numbers: lax.ConvDimensionNumbers
    spatial: tuple[int, ...]  # the spatial axes (counted among themselves) in the packed order
    window: Window

    @property
    def terms(self) -> int:
        return math.prod(self.weight.shape[a] for a in self.numbers.rhs_spec[1:])


def reads_panels(kernel_shape: Sequence[int], params: Mapping[str, Any]) -> bool:
    """Whether native code runs this conv_general_dilated with a kernel in panels."""
    features = kernel_shape[params["dimension_numbers"].rhs_spec[0]]
    groups = params["feature_group_count"]
    whole = groups == 1 or (features // groups) % COLUMNS == 0
    return whole and _is_plain(params["lhs_dilation"], params["batch_group_count"], kernel_shape)


def _is_plain(lhs_dilation: Any, batch_group_count: int, kernel_shape: Sequence[int]) -> bool:
    """Neither transposed nor grouped by images, and over one or two axes."""
    spread = lhs_dilation is not None and any(d != 1 for d in lhs_dilation)
    return not spread and batch_group_count == 1 and len(kernel_shape) in (3, 4)


def find_native_conv(
    lhs: Any,
    rhs: Any,
    numbers: lax.ConvDimensionNumbers,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
) -> NativeConv | None:
    """The native form of a conv_general_dilated, or None; abstract operands do."""
    if not isinstance(rhs, QArray) or isinstance(lhs, PanelArray):
        return None
    if not _is_plain(lhs_dilation, batch_group_count, rhs.shape) or not kernels.native_available():
        return None
    if lhs.dtype.name not in _FLOATS or 0 in lhs.shape or 0 in rhs.shape:
        return None
    if on_explicit_mesh(rhs) or is_placed(lhs):
        return None
    spatial = _panel_order(rhs, numbers) if isinstance(rhs, PanelArray) else None
    if spatial is None:
        if isinstance(rhs, PanelArray) or not _few_outputs(rhs, numbers, feature_group_count):
            return None
        spatial = tuple(range(rhs.ndim - 2))
    dilation = tuple(rhs_dilation or (1,) * len(spatial))
    sizes = [lhs.shape[a] for a in numbers.lhs_spec[2:]]
    taps = [rhs.shape[a] for a in numbers.rhs_spec[2:]]
    if isinstance(padding, str):
        seen = [(n - 1) * d + 1 for n, d in zip(taps, dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, seen, window_strides, padding)

    # The kernels slide over two axes: before a single one stands another, of length one.
    def two(values, filler):
        ordered = [values[a] for a in spatial]
        return tuple([filler] * (2 - len(ordered)) + ordered)

    window = Window(
        two(taps, 1),
        two(list(window_strides), 1),
        two([(int(low), int(high)) for low, high in padding], (0, 0)),
        two(dilation, 1),
        feature_group_count,
    )
    return NativeConv(rhs, numbers, spatial, window)


def _panel_order(weight: PanelArray, numbers: lax.ConvDimensionNumbers) -> tuple[int, ...] | None:
    """The spatial axes in the order in which they are packed; None if that is no convolution."""
    if weight.lead:
        return None
    axes, roles = weight.panels.axes, weight.panels.roles
    feature, channel, *spatial = numbers.rhs_spec
    wanted = {feature: "n", channel: "c"} | dict.fromkeys(spatial, "k")
    for axis, role in wanted.items():
        if {roles[atom.axis] for atom in axes[axis]} - {role}:  # type: ignore[index]
            return None
        if packed_order(axes[axis]) != list(range(len(axes[axis]))):
            return None
    order = sorted(range(len(spatial)), key=lambda i: _place(axes[spatial[i]]))
    atoms = tuple(atom for i in order for atom in axes[spatial[i]])
    return tuple(order) if packed_order(atoms) == list(range(len(atoms))) else None


def _place(atoms: Any) -> tuple[int, int]:
    return (atoms[0].axis, -atoms[0].stride) if atoms else (-1, 0)


def _few_outputs(weight: QArray, numbers: lax.ConvDimensionNumbers, groups: int) -> bool:
    feature, channel = numbers.rhs_spec[:2]
    per_group, depth = weight.shape[feature] // groups, weight.shape[channel]
    terms = math.prod(weight.shape) // weight.shape[feature]
    narrow = groups > 1 and per_group < COLUMNS and depth <= _MOST_DEPTH
    tiled = any(is_tiled(weight, axis) for axis in range(weight.ndim))
    return narrow and not tiled and terms <= kernels.LONGEST_CHANNEL_SUM


def arithmetic(conv: NativeConv, x: Any) -> str:
    """What native code does with the images: 'dynamic', 'codes' or 'none'."""
    if not isinstance(x, QArray | Deferred) or not _weight_on_codes(conv):
        return "none"
    image = conv.numbers.lhs_spec[0]
    if isinstance(x, Deferred):
        if _plain_int8(x, image):
            return "dynamic"
        x = jax.eval_shape(Deferred.quantized, x)
    row = format_of(x.qtype)
    integer = row.kind == "int" and row.storage.name in ("int8", "int4") and x.zero_point is None
    alike = all(is_constant(x, a) for a in range(x.ndim) if a != image)
    return "codes" if integer and alike else "none"


def _weight_on_codes(conv: NativeConv) -> bool:
    """Whether the kernel's codes can be multiplied as they are, one scale per output feature."""
    q, form = conv.weight, format_of(conv.weight.qtype)
    signed = form.kind == "sign" or (form.kind == "int" and form.name.startswith("int"))
    if not signed or form.storage.name == "int16":
        return False
    plain = q if not isinstance(q, PanelArray) else jax.eval_shape(PanelArray.plain, q)
    if plain.zero_point is not None or conv.terms * code_reach(plain) * 128 > INT32_MAX:
        return False
    feature = conv.numbers.rhs_spec[0]
    return all(is_constant(plain, a) for a in range(plain.ndim) if a != feature)


def _plain_int8(x: Deferred, image: int) -> bool:
    """Whether native code measures and quantizes images just as `how` says."""
    how = x.how
    simple = format_of(how.qtype).name == "int8" and how.calibration_method == "absmax"
    if (
        x.scale is not None
        or not simple
        or how.noise_fn is not None
        or how.scale_dtype is not None
        or how.tiled_axes
    ):
        return False
    return {a % x.ndim for a in how.channelwise_axes} == {image} and x.dtype.name in kernels.ROWS


def describe(conv: NativeConv, x: Any) -> str:
    """The plan's word for it."""
    return "native int8" if arithmetic(conv, x) != "none" else "native float"


def run_native_conv(conv: NativeConv, x: Any, dtype: Any) -> jax.Array:
    """The convolution, in `dtype`."""
    what = arithmetic(conv, x)
    settings: dict[str, Any] = dict(
        act=what, out_dtype=dtype if jnp.dtype(dtype).name in kernels.ROWS else jnp.float32
    )
    if what == "dynamic":
        images = x.array
    else:
        x = x.quantized() if isinstance(x, Deferred) else x
        if what == "codes":
            images = x.qvalue.astype(jnp.int8)
            settings["act_scale"] = x.scale.astype(jnp.float32).reshape(-1)
        else:
            images = dequantize(x, jnp.float32) if isinstance(x, QArray) else x
            images = images if images.dtype.name in kernels.ROWS else images.astype(jnp.float32)
    images = _images(conv, images)
    if isinstance(conv.weight, PanelArray):
        out = kernels.panel_conv(images, conv.weight, conv.window, **settings)
    elif what == "none":
        matrix = _matrix(conv, dequantize(conv.weight, jnp.float32))
        out = kernels.plain_conv(images, matrix, conv.window, **settings)
    else:
        matrix = _matrix(conv, conv.weight.qvalue.astype(jnp.int8).astype(jnp.float32))
        features = conv.weight.shape[conv.numbers.rhs_spec[0]]
        scale = conv.weight.scale.astype(jnp.float32).reshape(-1)
        scale = jnp.broadcast_to(scale, (features,))
        out = kernels.plain_conv(images, matrix, conv.window, scale=scale, **settings)
    return _result(conv, out).astype(dtype)


def _images(conv: NativeConv, x: jax.Array) -> jax.Array:
    """x as [N, H, W, C]."""
    image, channel, *spatial = conv.numbers.lhs_spec
    x = jnp.transpose(x, (image, *(spatial[a] for a in conv.spatial), channel))
    return x if x.ndim == 4 else jnp.expand_dims(x, 1)


def _matrix(conv: NativeConv, kernel: jax.Array) -> jax.Array:
    """A plain kernel as [k, n]."""
    feature, channel, *spatial = conv.numbers.rhs_spec
    kernel = jnp.transpose(kernel, (*spatial, channel, feature))
    return kernel.reshape(-1, kernel.shape[-1])


def _result(conv: NativeConv, out: jax.Array) -> jax.Array:
    """[N, H', W', n] as the axes of the result."""
    image, feature, *spatial = conv.numbers.out_spec
    if len(spatial) == 1:
        out = jnp.squeeze(out, 1)
    order = [0] * out.ndim
    order[image], order[feature] = 0, out.ndim - 1
    for place, axis in enumerate(conv.spatial):
        order[spatial[axis]] = 1 + place
    return jnp.transpose(out, order)
