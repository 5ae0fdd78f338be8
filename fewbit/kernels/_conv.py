"""The native convolutions as FFI calls; axes, `vmap` and the choice of a backend are elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.kernels._matmul import kernel_format

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
