"""The table of quantized formats: how a code is stored, how wide it is, what range it has.

The table is data: a new format is a row here and, if it is a new kind, a branch in `numerics`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._util import nearest

QType = Any  # a dtype, a scalar type such as jnp.int8, or a name such as 'nf4'


@dataclasses.dataclass(frozen=True)
class Format:
    """One row of the format table.

    `storage` is the dtype of a plain qvalue and `bits` the true width of a code. `bound` is the
    value of |x|/scale that the range's edge maps to (None: the type has no symmetric form) and
    `asymmetric` the code range with a zero point (None: it has none). `tile` and `scale_dtype`
    are set for formats that fix them.
    """

    name: str
    storage: np.dtype
    bits: int
    bound: float | None
    asymmetric: tuple[int, int] | None
    kind: str  # 'int' | 'float' | 'table' | 'sign'
    tile: int | None = None
    scale_dtype: str | None = None

    @property
    def native(self) -> bool:
        """Whether the name is a dtype by itself, so that the dtype alone identifies the format."""
        return self.storage.name == self.name


def _int_format(bits: int) -> Format:
    storage = {8: "int8", 16: "int16"}.get(bits, "int4" if bits <= 4 else "int8")
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    # The half step lets the extreme value use the whole last bin; int16 is used where the
    # neighbours expect a power of two.
    bound = 32768.0 if bits == 16 else qmax + 0.5
    return Format(f"int{bits}", jnp.dtype(storage), bits, bound, (qmin, qmax), "int")


def _float_format(name: str) -> Format:
    dtype = jnp.dtype(name)
    bits = 4 if name.startswith("float4") else 8
    return Format(name, dtype, bits, float(jnp.finfo(dtype).max), None, "float")


def _block_format(name: str, storage: str, tile: int, scale_dtype: str) -> Format:
    return dataclasses.replace(
        _float_format(storage), name=name, tile=tile, scale_dtype=scale_dtype
    )


_FLOAT_TYPES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float8_e4m3",
    "float8_e3m4",
    "float4_e2m1fn",
)

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("int1", jnp.dtype("int4"), 1, 1.0, None, "sign"),
        *(_int_format(bits) for bits in (2, 3, 4, 5, 6, 7, 8, 16)),
        Format("uint4", jnp.dtype("uint4"), 4, None, (0, 15), "int"),
        Format("uint8", jnp.dtype("uint8"), 8, None, (0, 255), "int"),
        *(_float_format(name) for name in _FLOAT_TYPES),
        Format("nf4", jnp.dtype("uint4"), 4, 1.0, None, "table"),
        _block_format("mxfp8", "float8_e4m3fn", 32, "float8_e8m0fnu"),
        _block_format("mxfp8_16", "float8_e4m3fn", 16, "float8_e8m0fnu"),
        _block_format("mxfp4", "float4_e2m1fn", 32, "float8_e8m0fnu"),
        _block_format("nvfp4", "float4_e2m1fn", 16, "float8_e4m3fn"),
    )
}

ALIASES: dict[str, str] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
    "e2m1": "float4_e2m1fn",
    "e2m1fn": "float4_e2m1fn",
    **{name.removeprefix("float8_"): name for name in _FLOAT_TYPES if name.startswith("float8_")},
    **{name.replace("float8_", "fp8_"): name for name in _FLOAT_TYPES if "e4m3f" in name},
}


def canonical_qtype(qtype: QType) -> np.dtype | str:
    """The one spelling of a quantized type: a dtype for native types, a name for emulated ones.

    >>> canonical_qtype(jnp.int8), canonical_qtype('INT3'), canonical_qtype('fp8')
    (dtype('int8'), 'int3', dtype(float8_e4m3fn))
    """
    row = format_of(qtype)
    return row.storage if row.native else row.name


def qtype_name(qtype: QType) -> str:
    """The short name of a quantized type, as tables and JSON show it.

    >>> qtype_name(jnp.float8_e4m3fn), qtype_name('fp4')
    ('float8_e4m3fn', 'float4_e2m1fn')
    """
    return format_of(qtype).name


def format_of(qtype: QType) -> Format:
    """The row of `FORMATS` that a type, dtype, name or alias stands for.

    >>> format_of('mxfp4').tile, format_of('int3').storage
    (32, dtype(int4))
    """
    if isinstance(qtype, Format):
        return qtype
    if isinstance(qtype, str):
        return _format_by_name(qtype)
    if qtype is None:
        raise ValueError(
            "Cannot use None as qtype. None means 'not quantized' in a rule, but here a type is "
            f"needed; use one of {_known()}."
        )
    try:
        name = np.dtype(qtype).name
    except TypeError as error:
        raise ValueError(
            f"Cannot use {qtype!r} as qtype. Pass a dtype such as jnp.int8 or one of {_known()}."
        ) from error
    return _format_of_dtype(name)


@functools.cache
def _format_by_name(name: str) -> Format:
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in FORMATS:
        return FORMATS[key]
    try:
        return _format_of_dtype(jnp.dtype(key).name)
    except TypeError:
        hint = nearest(key, [*FORMATS, *ALIASES], n=3, between=" or ")
    raise ValueError(f"data type {name!r} not understood.{hint} Quantized types: {_known()}.")


def _format_of_dtype(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(
            f"Cannot use {name} as qtype. It is not a quantized type; to leave an array in {name}, "
            f"do not quantize it (None in a rule), else use one of {_known()}."
        )
    return FORMATS[name]


def _known() -> str:
    return ", ".join(FORMATS)


def dtype_bits(dtype: Any) -> int:
    """True bits per element of a dtype; a 4-bit dtype has a one-byte `itemsize` in NumPy.

    >>> dtype_bits('int4'), dtype_bits(jnp.bfloat16)
    (4, 16)
    """
    dtype = jnp.dtype(dtype)
    narrow = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    return narrow.get(dtype.name, dtype.itemsize * 8)


def wider(a: Any, b: Any) -> np.dtype:
    """The float type that holds the numbers of both; unlike JAX's rules, it is never refused.

    >>> wider(jnp.bfloat16, jnp.float16), wider('float32', 'bfloat16')
    (dtype('float32'), dtype('float32'))
    """
    a, b = jnp.dtype(a), jnp.dtype(b)
    if a == b:
        return a
    if a.itemsize == b.itemsize:
        return jnp.dtype(jnp.float32)
    return a if a.itemsize > b.itemsize else b


def bits_per_weight(
    qtype: QType,
    tile: int | None = None,
    scale_dtype: Any = "float32",
    zero_point: bool = False,
) -> float:
    """True bits that one weight costs, its share of the group's scale and zero point included.

    >>> bits_per_weight('int4', tile=32, scale_dtype='float16'), bits_per_weight('mxfp4')
    (4.5, 4.25)
    """
    row = format_of(qtype)
    group = row.tile if tile is None else tile
    if group is None:
        return float(row.bits)
    shared = dtype_bits(row.scale_dtype or scale_dtype)
    if zero_point:
        shared += dtype_bits(row.storage)
    return row.bits + shared / group
