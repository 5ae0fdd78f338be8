"""Checkpoints of compressed-tensors (llm-compressor): int8, fp8, and 2 to 8 bits in words.

    weight             int8 or float8_e4m3fn[out, in]
    weight_packed      int32[out, ceil(in / (32 // bits))]   codes + 2**(bits-1), lowest bits first
    weight_shape       int64[2]                              of the weight before packing
    weight_scale       float[1], [out, 1], [out, groups] or one per block
    weight_zero_point  int8 like the scale, or int32[ceil(out / (32 // bits)), groups] if packed
    weight_g_idx       int32[in]                             the group of each input (act-order)

The number is `(code - zero_point) * scale`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fewbit.io.foreign_fp8 import TYPES, scaled_floats
from fewbit.io.foreign_kernels import Foreign, Kernel, by_group_index, centred
from fewbit.io.foreign_words import unpack_words

BITS = (2, 3, 4, 5, 6, 7, 8)
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("dense", "mixed-precision"),
)
PARTS = ("packed", "scale", "zero_point", "g_idx", "shape")

_MSG_FORMAT = "is compressed-tensors of the format {found!r}, and these are read: {known}"
_MSG_SPARSE = "is also compressed as sparse ({found!r}), which is not read"
_FIX_FORMAT = (
    "Decompress it with the tool that made it and quantize the float checkpoint: "
    "fewbit.quantize_checkpoint."
)


def part_of(name: str) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and which part.

    >>> part_of('up.weight_packed'), part_of('up.weight'), part_of('up.input_scale')
    (('up.weight', 'packed'), None, None)
    """
    for part in PARTS:
        if name.endswith(f"weight_{part}"):
            return name.removesuffix(f"_{part}"), part
    return None


def describe(config: Mapping[str, Any]) -> str:
    """The format in a few words."""
    kinds = []
    for scheme in (config.get("config_groups") or {}).values():
        weights = scheme.get("weights") or {}
        size = weights.get("group_size")
        groups = f", groups of {size}" if size else f", per {weights.get('strategy', 'tensor')}"
        kinds.append(f"{weights.get('type', 'int')}{weights.get('num_bits')}{groups}")
    return f"compressed-tensors ({config.get('format')}): " + "; ".join(kinds)


def read(weight: Foreign) -> Kernel:
    """One weight as an `[in, out]` QArray."""
    _check_format(weight)
    settings = _settings(weight)
    if "packed" in weight.parts:
        return _packed(weight, settings)
    codes = weight.need("weight", "int8", *TYPES)
    if codes.dtype != np.int8:
        block = settings.get("block_structure")
        if isinstance(block, str):  # older files write '128x128'
            block = [int(n) for n in block.split("x")]
        return Kernel(scaled_floats(weight, codes, "scale", block))
    weight.check_bits(settings.get("num_bits", 8), BITS)
    group, scale = _spread(weight, "scale", codes.shape, settings)
    zeros = None
    if "zero_point" in weight.parts:
        zeros = _spread(weight, "zero_point", codes.shape, settings, "int8")[1].T
        zeros = zeros if zeros.any() else None
    return by_group_index(weight, codes.T, scale.T, zeros, group, "int8")


def _packed(weight: Foreign, settings: Mapping[str, Any]) -> Kernel:
    bits = weight.check_bits(settings.get("num_bits"), BITS)
    packed, shape = weight.need("packed", "int32"), weight.need("shape", "int64", "int32")
    weight.check_shape("shape", shape, (2,), "a weight of two axes, out and in")
    out, rows = (int(n) for n in shape)
    fields = 32 // bits
    why = f"a weight of {out}x{rows} with {fields} codes in a word"
    weight.check_shape("packed", packed, (out, -(-rows // fields)), why)
    group, scale = _spread(weight, "scale", (out, rows), settings)
    zeros = weight.parts.get("zero_point")
    if zeros is not None and zeros.dtype == np.int32:
        wanted = (-(-scale.shape[0] // fields), scale.shape[1])
        weight.check_shape("zero_point", zeros, wanted, why)
        zeros = unpack_words(zeros, bits, scale.shape[0], axis=0)
    elif zeros is not None:
        zeros = _spread(weight, "zero_point", (out, rows), settings, "int8")[1]
        zeros = (zeros.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    codes, points = centred(unpack_words(packed, bits, rows), zeros, bits)
    points = None if points is None else points.T
    return by_group_index(weight, codes.T, scale.T, points, group, f"int{bits}")


def _spread(
    weight: Foreign, part: str, shape: tuple[int, ...], settings: Mapping[str, Any], dtype: str = ""
) -> tuple[int, np.ndarray]:
    """The inputs that share a number, and the numbers as `[out or 1, groups]`."""
    array = weight.need(part, dtype) if dtype else weight.need_scales(part)
    out, rows = shape
    if array.size == 1:
        return rows, array.reshape(1, 1)
    group = weight.check_group(settings.get("group_size"), rows)
    if array.ndim == 1:
        array = array[:, None]
    why = f"a weight of {out}x{rows} in groups of {group}"
    weight.check_shape(part, array, (out, -(-rows // group)), why)
    return group, array


def _check_format(weight: Foreign) -> None:
    found = weight.config.get("format", "dense")
    if found not in FORMATS:
        what = _MSG_FORMAT.format(found=found, known=", ".join(FORMATS))
        raise weight.error(what, fix=_FIX_FORMAT)
    sparse = (weight.config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise weight.error(_MSG_SPARSE.format(found=sparse), fix=_FIX_FORMAT)


def _settings(weight: Foreign) -> Mapping[str, Any]:
    """The settings of the group that the module belongs to."""
    groups = list((weight.config.get("config_groups") or {}).values())
    module = weight.name.removesuffix(".weight")
    for group in groups:
        if any(_targets(target, module) for target in group.get("targets") or ()):
            return group.get("weights") or {}
    # What is left are names of classes ('Linear'), which tensors do not tell.
    classes = [g for g in groups if any(_is_class(t) for t in g.get("targets") or ())]
    return (classes[0].get("weights") or {}) if classes else {}


def _targets(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target
