"""Checkpoints in 8-bit floats, scaled by blocks (DeepSeek), channels or tensors.

    weight            float8_e4m3fn[..., out, in]
    weight_scale_inv  float32[..., ceil(out / 128), ceil(in / 128)]   the number is weight * scale

Despite the name the scale is multiplied. `weight_scale` of one number, or one per output, is the
older form of the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit.io.foreign._weights import Foreign, Kernel, two_sizes
from fewbit.qarray import QArray

TYPES = ("float8_e4m3fn", "float8_e5m2")
_FMT = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def part_of(name: str) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and which part.

    >>> part_of('mlp.up.weight_scale_inv'), part_of('mlp.up.weight_scale')
    (('mlp.up.weight', 'scale_inv'), ('mlp.up.weight', 'scale'))
    """
    if name.endswith("_scale_inv"):
        return name.removesuffix("_scale_inv"), "scale_inv"
    if name.endswith("weight_scale"):
        return name.removesuffix("_scale"), "scale"
    return None


def check(config: Mapping[str, Any], path: str) -> None:
    """Raise if a setting is not of the kind that it should be."""
    two_sizes(path, "weight_block_size", config.get("weight_block_size"))


def describe(config: Mapping[str, Any]) -> str:
    """The format in a few words."""
    block = two_sizes("config.json", "weight_block_size", config.get("weight_block_size"))
    return "fp8, " + (f"blocks of {'x'.join(map(str, block))}" if block else "a scale per tensor")


def read(weight: Foreign) -> Kernel:
    """One weight as a `[..., in, out]` QArray."""
    weight.only_one_of("scale", "scale_inv")
    part = "scale" if "scale" in weight.parts else "scale_inv"
    codes = weight.need("weight")
    if codes.dtype.name not in TYPES:
        fix = "write the quant_method that made this file"
        raise weight.contradicts(codes.dtype.name, "quant_method", "fp8", fix)
    said = weight.config.get("fmt")
    if isinstance(said, str) and _FMT.get(said.lower(), codes.dtype.name) != codes.dtype.name:
        other = next(name for name in _FMT if name != said.lower())
        raise weight.contradicts(codes.dtype.name, "fmt", said, f"write {other!r} there")
    block = two_sizes(weight.path, "weight_block_size", weight.config.get("weight_block_size"))
    return Kernel(scaled_floats(weight, codes, part, block))


def scaled_floats(
    weight: Foreign, codes: np.ndarray, part: str, block: tuple[int, int] | None
) -> QArray:
    """Float codes with a scale for the tensor, for each output, or for each block."""
    scale = weight.need_scales(part)
    weight.need_axes("weight", codes)
    tiles: tuple[tuple[int, int], ...] = ()
    *stack, out, rows = codes.shape
    if scale.size == 1:
        scale = scale.reshape((1,) * codes.ndim)
    elif scale.shape == (*stack, out):
        scale = scale[..., None]
    if scale.size > 1 and block and scale.shape != (*stack, out, 1):
        high, wide = block
        why = f"a weight of {out}x{rows} in blocks of {high}x{wide}"
        weight.check_shape(part, scale, (*stack, -(-out // high), -(-rows // wide)), why)
        sizes = zip(scale.shape[-2:], ((-2, high, out), (-1, wide, rows)), strict=True)
        tiles = tuple(
            (axis, tile) for count, (axis, tile, dim) in sizes if count > 1 and count * tile != dim
        )
    elif scale.size > 1:
        why = f"a weight of {out}x{rows}, with a number for all or one for each output"
        weight.check_shape(part, scale, (*stack, out, 1), why)
    return QArray(jnp.asarray(codes), jnp.asarray(scale), tiles=tiles).mT
