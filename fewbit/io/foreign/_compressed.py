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

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fewbit.io._errors import cut
from fewbit.io.foreign._fp8 import TYPES, scaled_floats
from fewbit.io.foreign._weights import (
    Foreign,
    Kernel,
    an_object,
    bad_setting,
    begins_like,
    by_group_index,
    centred,
    check_pattern,
    two_sizes,
    unpack_words,
)

BITS = (2, 3, 4, 5, 6, 7, 8)
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("dense", "mixed-precision"),
)
PARTS = ("packed", "scale", "zero_point", "g_idx", "shape")
# What the tensors of a format are; the other formats hold several kinds.
_KINDS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"}
_UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")

_MSG_FORMAT = "is compressed-tensors of the format {found}, and these are read: {known}"
_MSG_SPARSE = "is also compressed as sparse ({found}), which is not read"
_MSG_ZERO_POINTS = "cannot be read: its zero points are no codes"
_MSG_FLOAT_ZERO = "cannot be read: its codes are floats, and it has zero points that are not zero"
_FIX_ZERO_POINTS = "Fetch the file again, or quantize the float checkpoint anew."
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


def check(config: Mapping[str, Any], path: str) -> None:
    """Raise if a setting is not of the kind that it should be."""
    an_object(path, "sparsity_config", config.get("sparsity_config"))
    for key, group in an_object(path, "config_groups", config.get("config_groups")).items():
        where = f"config_groups.{key}"
        group = an_object(path, where, group)
        weights = an_object(path, f"{where}.weights", group.get("weights"))
        two_sizes(path, f"{where}.weights.block_structure", weights.get("block_structure"))
        targets = group.get("targets") or []
        if not isinstance(targets, list | tuple) or not all(isinstance(t, str) for t in targets):
            raise bad_setting(path, f"{where}.targets", "a list of names", targets)
        for target in targets:
            if target.startswith("re:"):
                check_pattern(path, f"{where}.targets", target.removeprefix("re:"))


def describe(config: Mapping[str, Any]) -> str:
    """The format in a few words."""
    kinds = []
    for _, _, weights in _schemes(config):
        size = weights.get("group_size")
        groups = f", groups of {size}" if size else f", per {weights.get('strategy', 'tensor')}"
        kinds.append(f"{weights.get('type', 'int')}{weights.get('num_bits')}{groups}")
    return f"compressed-tensors ({config.get('format')}): " + "; ".join(kinds)


def read(weight: Foreign) -> Kernel:
    """One weight as an `[in, out]` QArray."""
    weight.only_one_of("packed", "weight")
    where, settings = _settings(weight)
    _check_format(weight, where, settings)
    if "packed" in weight.parts:
        return _packed(weight, settings)
    codes = weight.need("weight")
    if codes.dtype != np.int8:
        zeros = weight.parts.get("zero_point")  # floats have none; older tools store zeros
        if zeros is not None and np.asarray(zeros, np.float32).any():
            raise weight.error(_MSG_FLOAT_ZERO, fix=_FIX_ZERO_POINTS)
        block = settings.get("block_structure")
        return Kernel(scaled_floats(weight, codes, "scale", two_sizes(weight.path, "", block)))
    codes = weight.need_matrix("weight")
    bits = weight.check_bits(settings.get("num_bits", 8), BITS)
    low, high = _range(codes)
    needed = max(high, ~low).bit_length() + 1  # a byte may hold a code of more bits than it should
    if needed > bits:
        found = f"of codes from {low} to {high}"
        raise weight.contradicts(found, f"{where}.num_bits", bits, f"write {needed} there")
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
        half = 1 << (bits - 1)
        low, high = _range(zeros)
        if low < -half or high >= half:
            raise weight.error(
                _MSG_ZERO_POINTS,
                expected=f"{-half} to {half - 1} for {bits} bits",
                found=f"{low} to {high}",
                fix=_FIX_ZERO_POINTS,
            )
        zeros = (zeros.astype(np.int16) + half).astype(np.uint8)
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


def _check_format(weight: Foreign, where: str, settings: Mapping[str, Any]) -> None:
    said = weight.config.get("format", "dense")
    if said not in FORMATS:
        what = _MSG_FORMAT.format(found=cut(said), known=", ".join(FORMATS))
        raise weight.error(what, fix=_FIX_FORMAT)
    sparse = (weight.config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise weight.error(_MSG_SPARSE.format(found=cut(sparse)), fix=_FIX_FORMAT)
    part = "packed" if "packed" in weight.parts else "weight"
    if part == "packed" and said in _UNPACKED:
        raise weight.contradicts("packed", "format", said, "write 'pack-quantized' there")
    known = ("int32",) if part == "packed" else ("int8", *TYPES)
    dtype = weight.need(part, *known).dtype.name
    kind = "float" if dtype in TYPES else "int"
    if kind != _KINDS.get(said, kind):
        raise weight.contradicts(dtype, "format", said, f"write '{kind}-quantized' there")
    said = settings.get("type", kind)
    if said != kind:
        raise weight.contradicts(dtype, f"{where}.type", said, f"write {kind!r} there")
    if kind == "float" and settings.get("num_bits", 8) != 8:
        found = settings["num_bits"]
        raise weight.contradicts(dtype, f"{where}.num_bits", found, "write 8 there")


def _range(codes: np.ndarray) -> tuple[int, int]:
    return (int(codes.min()), int(codes.max())) if codes.size else (0, 0)


def _settings(weight: Foreign) -> tuple[str, Mapping[str, Any]]:
    """The settings of the group that the module belongs to, and their place in the config."""
    schemes = list(_schemes(weight.config))
    for targets, where, weights in schemes:
        if any(_targets(target, weight.module) for target in targets):
            return where, weights
    # What is left are names of classes ('Linear'), which tensors do not tell.
    for targets, where, weights in schemes:
        if any(not target.startswith("re:") and "." not in target for target in targets):
            return where, weights
    return "config_groups", {}


def _schemes(config: Mapping[str, Any]) -> Iterator[tuple[Any, str, Mapping[str, Any]]]:
    """The targets of each group, and the place and the settings for its weights."""
    for key, group in (config.get("config_groups") or {}).items():
        group = group or {}
        where = f"config_groups.{key}.weights"
        yield group.get("targets") or (), where, group.get("weights") or {}


def _targets(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return begins_like(target.removeprefix("re:"), module)
    return target == module
