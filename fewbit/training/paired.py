"""A float array beside its quantized form: the product sees one, the gradient goes to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fewbit.calibration import calibrate, parse_method
from fewbit.kernels import quantize_natively
from fewbit.numerics import format_of, get_symmetric_bound, wider
from fewbit.ops.scaling import operand, scale_in
from fewbit.qarray import (
    HowToQuantize,
    QArray,
    compute_scale_zero_point,
    get_tile_shape,
    quantize_with,
    quantize_with_scale_zero_point,
)
from fewbit.straight import with_derivative
from fewbit.tiling import map_tiles, uneven_tiles

CHECKPOINT_NAME = "fewbit_quantized"
"""The name that remat policies know quantized operands by."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paired:
    """An operand of a training product.

    `array` gets the gradient; `quantized` is what the product sees (codes, or numbers made of
    codes), or None where it sees the array itself. The array's gradient is not clipped by the
    product: whoever makes a pair with scales that clip gives `clip_gradient(array, quantized)`, as
    `pair` does.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> w = jnp.ones((4, 2))
    >>> Paired(w, quantize(w, 'int8', channelwise_axes=(1,))).shape
    (4, 2)
    """

    array: Any
    quantized: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return len(self.array.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def pair(array: jax.Array, how: HowToQuantize, *, clip: bool = True, collect: Any = None) -> Paired:
    """The array and its quantized form, which remat policies know as 'fewbit_quantized'.

    The gradient is zero where the calibration method clipped the array, unless `clip` is False.
    `collect` is given the calibration and returns the one to use, which may come from elsewhere.

    >>> import jax.numpy as jnp
    >>> how = HowToQuantize(qtype='int8', calibration_method='fixed,1')
    >>> pair(jnp.array([0.5, 3.0]), how).quantized.qvalue
    Array([ 64, 127], dtype=int8)
    """
    source = lax.stop_gradient(array)
    q = _quantized(source, how) if collect is None else _collected(source, how, collect)
    q = jax.tree.map(lambda part: checkpoint_name(part, CHECKPOINT_NAME), q)
    clips = parse_method(how.calibration_method).clips or collect is not None
    return Paired(clip_gradient(array, q) if clip and clips else array, q)


def _quantized(array: jax.Array, how: HowToQuantize) -> QArray:
    native = quantize_natively(array, how)
    return quantize_with(array, how) if native is None else native


def _collected(array: jax.Array, how: HowToQuantize, collect: Any) -> QArray:
    calibration = collect(calibrate(array, how))
    scale, zero_point = compute_scale_zero_point(calibration, how.qtype, how.scale_dtype)
    tiles = uneven_tiles(array.shape, scale.shape, get_tile_shape(array.shape, how))
    return quantize_with_scale_zero_point(array, how.qtype, scale, zero_point, tiles=tiles)


def clip_gradient(array: jax.Array, qarray: QArray) -> jax.Array:
    """The array itself; its gradient is zero where it lies outside the range of the scales.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> x = jnp.array([0.5, 3.0, -3.0])
    >>> q = quantize(x, 'int8', calibration_method='fixed,1')
    >>> jax.grad(lambda x: clip_gradient(x, q).sum())(x)
    Array([1., 0., 0.], dtype=float32)
    """
    return _clip_gradient(array, lax.stop_gradient(operand(qarray)))


@jax.custom_jvp
def _clip_gradient(array: jax.Array, q: QArray) -> jax.Array:
    return with_derivative(array, _clip_gradient, array, q)


@_clip_gradient.defjvp
def _clip_tangent(primals: Any, tangents: Any) -> Any:
    (array, q), (tangent, _) = primals, tangents
    kept = inside_range(array, q)
    return array, jnp.where(kept, tangent, jnp.zeros_like(tangent))


def inside_range(array: jax.Array, q: QArray) -> jax.Array:
    """Where the array lies within the range that the scales cover, as booleans.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> x = jnp.array([0.5, 3.0])
    >>> inside_range(x, quantize(x, 'int8', calibration_method='fixed,1')).tolist()
    [True, False]
    """
    row = format_of(q.qtype)
    wide = wider(array.dtype, jnp.float32)
    scale = scale_in(q, wide)
    # The edge itself is inside; the scale was rounded after the range had been divided.
    slack = 1 + 2 * float(jnp.finfo(q.scale.dtype).eps if q.scale.dtype.itemsize > 1 else 0)

    if q.zero_point is None:
        bound = get_symmetric_bound(row) * slack
        return map_tiles(
            lambda x, s: jnp.abs(x.astype(wide)) <= s * bound, array, scale, tile_shape=q.tile_shape
        )
    low, high = row.asymmetric or (0, 0)

    def within(x: jax.Array, s: jax.Array, z: jax.Array) -> jax.Array:
        units = x.astype(wide) / s + z.astype(wide)
        return (units >= low - 0.5) & (units <= high + 0.5)

    return map_tiles(within, array, scale, q.zero_point, tile_shape=q.tile_shape)
