"""Activations as codes of a scale that was stored when the model was calibrated."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fewbit._how import HowToQuantize
from fewbit._qarray_type import QArray
from fewbit.numerics import format_of
from fewbit.qarray import get_tile_shape, quantize_with_scale_zero_point
from fewbit.tiling import uneven_tiles


def quantize_static(array: Any, how: HowToQuantize, scale: Any, zero_point: Any) -> QArray:
    """Quantize an activation with its stored scale; what lies outside its range clips.

    Integer codes have no NaN: a channel that holds one has a NaN for its scale, as if measured.

    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(0,))
    >>> quantize_static(jnp.array([[0.5, 90.0]]), how, jnp.array([[0.5]]), None).qvalue.tolist()
    [[1, 127]]
    """
    if not jnp.issubdtype(format_of(how.qtype).storage, jnp.inexact):
        kept = {axis % array.ndim for axis in how.channelwise_axes}
        others = tuple(axis for axis in range(array.ndim) if axis not in kept)
        lost = jnp.any(jnp.isnan(array), axis=others, keepdims=True)
        scale = jnp.where(lost, jnp.array(jnp.nan, scale.dtype), scale)
        if zero_point is not None:
            zero_point = jnp.broadcast_to(zero_point, scale.shape)
    tile_shape = get_tile_shape(array.shape, how)
    tiles = uneven_tiles(array.shape, scale.shape, tile_shape)
    tiles = tuple((axis, tile) for axis, tile in tiles if scale.shape[axis] != 1)
    return quantize_with_scale_zero_point(array, how.qtype, scale, zero_point, tiles=tiles)
