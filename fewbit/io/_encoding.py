"""How an array lies in a file: which safetensors type, which shape, which bits.

`plain`: as it is, in a type that safetensors has. `bits`: codes of `bits` bits, packed along the
last axis (`numerics.pack_pieces`), as U8. `sign`: the same for int1, a set bit meaning -1. `bytes`:
the bytes of a type that safetensors does not have, as U8, the last axis as many times as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fewbit.io._safetensors import DTYPES, dtype_name, raw_bytes
from fewbit.numerics import dtype_bits, format_of, pack_pieces, packed_length, unpack

_EXTENSIONS = (
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn"),
    *("float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# Every dtype a file may name, so that none comes into being from a file's own words.
KNOWN_DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENSIONS},
    **{name: np.dtype(name) for name in ("bool", "float16", "float32", "float64")},
    **{name: np.dtype(name) for name in ("complex64", "complex128")},
    **{f"{sign}int{n}": np.dtype(f"{sign}int{n}") for sign in ("", "u") for n in (8, 16, 32, 64)},
}
ENCODINGS = ("plain", "bits", "sign", "bytes")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One array in a file: what it is (`dtype`, `shape`), and how it lies there.

    >>> encoding_of((64, 10), 'int4', 'int3')
    Encoding(dtype='int4', shape=(64, 10), bits=3, kind='bits')
    >>> encoding_of((64, 10), 'int4', 'int3').stored_shape
    (64, 4)
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int
    kind: str

    @property
    def stored_dtype(self) -> str:
        """The safetensors type."""
        return str(dtype_name(KNOWN_DTYPES[self.dtype])) if self.kind == "plain" else "U8"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.kind == "plain":
            return self.shape
        last = self.shape[-1] if self.shape else 1
        return (*self.shape[:-1], packed_length(last, self.bits))

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored_shape) * DTYPES[self.stored_dtype][1] // 8

    def problem(self) -> str | None:
        """What contradicts itself, for an encoding that was read from a file."""
        if self.dtype not in KNOWN_DTYPES:
            return f"dtype {self.dtype[:40]!r} is not known"
        dtype = KNOWN_DTYPES[self.dtype]
        if self.kind == "plain":
            fits = self.bits == dtype_bits(dtype) and dtype_name(dtype) not in (None, "F4")
        elif self.kind == "bytes":
            fits = self.bits == 8 * dtype.itemsize
        else:
            narrow = dtype.itemsize == 1 and self.dtype != "bool"
            fits = narrow and 1 <= self.bits < 8 and (self.kind == "bits" or self.bits == 1)
        return None if fits else f"{self.bits} bits of {self.dtype} cannot be {self.kind!r}"


def encoding_of(shape: Sequence[int], dtype: Any, qtype: Any = None) -> Encoding:
    """How an array of this kind is stored; `qtype` if it holds the codes of a format."""
    name, shape = np.dtype(dtype).name, tuple(int(size) for size in shape)
    bits = dtype_bits(dtype)
    kind = "plain" if dtype_name(dtype) is not None else "bytes"
    if qtype is not None:
        row = format_of(qtype)
        bits, kind = row.bits, "sign" if row.kind == "sign" else kind
    return Encoding(name, shape, bits, "bits" if bits < 8 and kind != "sign" else kind)


def encode(array: np.ndarray, encoding: Encoding) -> Iterator[memoryview]:
    """The bytes of an array in a file, piece by piece."""
    if encoding.kind in ("plain", "bytes"):
        yield raw_bytes(array)
        return
    if encoding.kind == "sign":
        array = array.view(np.uint8) >> 3 & 1  # of four bits, the highest is set in -1 alone
    for piece in pack_pieces(array, encoding.bits):
        yield np.ascontiguousarray(piece).data


def decode(stored: np.ndarray, encoding: Encoding) -> np.ndarray:
    """The array again from its stored form."""
    if encoding.kind == "plain":
        return stored
    return decode_part(stored, encoding, tuple(slice(None) for _ in encoding.shape))


def decode_part(stored: np.ndarray, encoding: Encoding, index: tuple[slice, ...]) -> np.ndarray:
    """A rectangular part of the array; only that part is unpacked."""
    if encoding.kind == "plain":
        return np.array(stored[index], order="C")  # JAX may keep it, so never a view of a file
    dtype = KNOWN_DTYPES[encoding.dtype]
    last = encoding.shape[-1] if encoding.shape else 1
    begin, end, _ = (index[-1] if index else slice(None)).indices(last)
    first = begin // 8 * 8  # a code whose bits begin a byte
    bits = encoding.bits
    some = stored[(*index[:-1], slice(first * bits // 8, packed_length(end, bits)))]
    if encoding.kind == "bytes":
        part = np.array(some, order="C").view(dtype)
    elif encoding.kind == "sign":
        part = (1 - 2 * unpack(some, 1, end - first, np.uint8).astype(np.int8)).view(dtype)
    else:
        part = unpack(some, bits, end - first, dtype)
    part = part[..., begin - first :]
    return part if encoding.shape else part.reshape(())


def to_numpy(array: Any) -> np.ndarray:
    """The numbers of an array, without leaving a second copy of them behind."""
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return array.astype(array.dtype.newbyteorder("="), copy=False)  # files are little-endian
    if len(array.sharding.device_set) == 1 or array.is_fully_replicated:
        return _passing(array.addressable_data(0))
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = _passing(shard.data)
    return whole


def _passing(array: jax.Array) -> np.ndarray:
    # What JAX cannot show in place (4-bit types) it copies, and keeps the copy with the array that
    # was asked, as long as that lives: another one is asked.
    return np.asarray(jax.device_put(array, array.sharding, may_alias=False))
