"""AWQ checkpoints of the GEMM kind: `qweight`, `qzeros`, `scales` of AutoAWQ.

    qweight  int32[in, out / 8]      codes along the columns, field i of a word is column ORDER[i]
    qzeros   int32[groups, out / 8]  zero points, packed the same way
    scales   float16[groups, out]

The number is `(code - zero) * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbit.io._errors import cut
from fewbit.io.foreign._weights import Foreign, Kernel, centred, kernel, unpack_words

BITS = (4,)
PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_MSG_VERSION = "is AWQ of the version {found}, and 'gemm' is read, which most are"
_FIX_VERSION = "Convert it with the tool that made it (AutoAWQ: version='GEMM')."


def part_of(name: str) -> tuple[str, str] | None:
    """The weight that a tensor is a part of, and which part.

    >>> part_of('layers.0.up.qzeros')
    ('layers.0.up.weight', 'qzeros')
    """
    module, _, part = name.rpartition(".")
    return (f"{module}.weight".lstrip("."), part) if part in PARTS else None


def check(config: Mapping[str, Any], path: str) -> None:
    """Nothing here has parts of its own."""


def describe(config: Mapping[str, Any]) -> str:
    """The format in a few words."""
    bits, group = _either(config, "bits", "w_bit"), _either(config, "group_size", "q_group_size")
    return f"AWQ {_version(config)}, {bits} bits, groups of {group}"


def read(weight: Foreign) -> Kernel:
    """One weight as an `[in, out]` QArray of signed codes."""
    weight.only_one_of("qweight", "weight")
    config = weight.config
    if _version(config) != "gemm":
        raise weight.error(_MSG_VERSION.format(found=cut(_version(config))), fix=_FIX_VERSION)
    bits = weight.check_bits(_either(config, "bits", "w_bit"), BITS)
    qweight, scales = weight.need_matrix("qweight", "int32"), weight.need_scales("scales")
    rows, columns = qweight.shape[0], qweight.shape[1] * 32 // bits
    group = weight.check_group(_either(config, "group_size", "q_group_size"), rows)
    groups = -(-rows // group)
    why = f"a qweight of {rows}x{columns} codes of {bits} bits in groups of {group}"
    weight.check_shape("scales", scales, (groups, columns), why)
    zeros = None
    if config.get("zero_point", True) or "qzeros" in weight.parts:
        words = weight.need("qzeros", "int32")
        weight.check_shape("qzeros", words, (groups, qweight.shape[1]), why)
        zeros = unpack_words(words, bits, columns, order=ORDER)
    codes, points = centred(unpack_words(qweight, bits, columns, order=ORDER), zeros, bits)
    return Kernel(kernel(codes, scales, points, f"int{bits}", group))


def _version(config: Mapping[str, Any]) -> str:
    return str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()


def _either(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)
