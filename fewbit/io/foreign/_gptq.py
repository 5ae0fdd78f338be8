"""GPTQ checkpoints: `qweight`, `qzeros`, `scales`, `g_idx` of AutoGPTQ and GPTQModel.

    qweight  int32[in * bits / 32, out]      codes of one column down the rows, lowest bits first
    qzeros   int32[groups, out * bits / 32]  zero points along the columns; v1 stores them minus 1
    scales   float16[groups, out]
    g_idx    int32[in]                       the group of each row; out of order with desc_act

The number is `(code - zero) * scale`. 3-bit codes run through three words as one string of bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fewbit.io._errors import cut
from fewbit.io.foreign._weights import (
    Foreign,
    Kernel,
    an_object,
    begins_like,
    by_group_index,
    centred,
    check_pattern,
    unpack_stream,
)

BITS = (2, 3, 4, 8)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
_V1 = ("gptq", None)
_V2 = ("gptq_v2",)

_MSG_FORMAT = "is GPTQ stored as {found}, and 'gptq' and 'gptq_v2' are read"
_FIX_FORMAT = "Save it again in one of them (GPTQModel: format='gptq')."

# What turns stored zero points into zero points, added to whole words as GPTQModel does: its own
# v1 files were made by the opposite subtraction, so a carry between fields undoes a borrow.
_ONES: dict[int, tuple[int, ...]] = {2: (0x55555555,), 4: (0x11111111,), 8: (0x01010101,)}
# The constants that GPTQModel subtracts for 3 bits are not ones in every field; only adding the
# same words gives back what it had.
_GPTQMODEL_3 = (0x24924924, 0x92492492, 0x49249249)


def part_of(name: str) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and which part.

    >>> part_of('layers.0.up.qweight')
    ('layers.0.up.weight', 'qweight')
    """
    module, _, part = name.rpartition(".")
    return (f"{module}.weight".lstrip("."), part) if part in PARTS else None


def check(config: Mapping[str, Any], path: str) -> None:
    """Raise if a setting is not of the kind that it should be."""
    an_object(path, "meta", config.get("meta"))
    for pattern, changes in an_object(path, "dynamic", config.get("dynamic")).items():
        check_pattern(path, "dynamic", _bare(pattern))
        an_object(path, f"dynamic[{cut(pattern)}]", changes)


def describe(config: Mapping[str, Any]) -> str:
    """The format in a few words."""
    version = "v2" if config.get("checkpoint_format") in _V2 else "v1"
    order = ", act-order" if config.get("desc_act") else ""
    group = config.get("group_size", -1)
    groups = "one group" if group in (-1, None) else f"groups of {group}"
    return f"GPTQ {version}, {config.get('bits')} bits, {groups}{order}"


def read(weight: Foreign) -> Kernel:
    """One weight as an `[in, out]` QArray of signed codes."""
    weight.only_one_of("qweight", "weight")
    version = weight.config.get("checkpoint_format")
    if version not in (*_V1, *_V2):
        raise weight.error(_MSG_FORMAT.format(found=cut(version)), fix=_FIX_FORMAT)
    settings = _settings(weight)
    bits = weight.check_bits(settings.get("bits"), BITS)
    qweight, qzeros = weight.need_matrix("qweight", "int32"), weight.need("qzeros", "int32")
    scales = weight.need_scales("scales")
    rows, columns = qweight.shape[0] * 32 // bits, qweight.shape[1]
    group = weight.check_group(settings.get("group_size", -1), rows)
    groups = -(-rows // group)
    why = f"a qweight of {rows}x{columns} codes of {bits} bits in groups of {group}"
    weight.check_shape("scales", scales, (groups, columns), why)
    weight.check_shape("qzeros", qzeros, (groups, -(-columns * bits // 32)), why)
    codes = unpack_stream(qweight, bits, rows, axis=0)
    signed, zeros = centred(codes, _zeros(qzeros, bits, columns, weight.config), bits)
    return by_group_index(weight, signed, scales, zeros, group, f"int{bits}")


def _zeros(words: np.ndarray, bits: int, count: int, config: Mapping[str, Any]) -> np.ndarray:
    if config.get("checkpoint_format") in _V2:
        return unpack_stream(words, bits, count)
    ones = _ONES.get(bits)
    meta = an_object("config.json", "meta", config.get("meta"))
    if ones is None and "gptqmodel" in str(meta.get("quantizer", "")).lower():
        ones = _GPTQMODEL_3
    if ones is None:
        return (unpack_stream(words, bits, count) + np.uint8(1)) & np.uint8(2**bits - 1)
    added = np.resize(np.array(ones, np.uint32), words.shape[-1])
    return unpack_stream(np.ascontiguousarray(words).view(np.uint32) + added, bits, count)


def _settings(weight: Foreign) -> Mapping[str, Any]:
    """The module's own width and groups, where `dynamic` gives it some."""
    for pattern, changes in (weight.config.get("dynamic") or {}).items():
        if begins_like(_bare(pattern), weight.module):
            if pattern.startswith("-:"):
                raise weight.contradicts("quantized", "dynamic", pattern, "leave the pattern out")
            return {**weight.config, **(changes or {})}
    return weight.config


def _bare(pattern: str) -> str:
    return pattern[2:] if pattern.startswith(("-:", "+:")) else pattern
