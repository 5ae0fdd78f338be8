"""Arrays as a Keras weights file holds them: types that HDF5 knows, codes at their true width.

Rows of codes are packed along the last axis, each row beginning on a byte (`packing_numpy`): the
same on every machine, whatever its kernels read.
"""

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fewbit.keras._serial_format import checksum, damaged
from fewbit.numerics import format_of
from fewbit.packing import packed_length
from fewbit.packing_numpy import pack_pieces, unpack

_PLAIN = (
    *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
_EXTENSIONS = (
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn"),
    *("float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# Every dtype that a file may name, so that none comes into being from a file's own words.
_DTYPES = {name: np.dtype(name) for name in _PLAIN}
_DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENSIONS}


def to_file(array: Any, qtype: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
    """The array for the file and what to remember of it; `qtype` if it holds codes of a format.

    >>> stored, about = to_file(np.array([[1, -2, 3, 0]], np.int8), 'int3')
    >>> stored.shape, about['bits']
    ((1, 2), 3)
    """
    array = _numpy(array)
    name, bits = array.dtype.name, None
    if qtype is not None and format_of(qtype).bits < 8:
        row = format_of(qtype)
        bits = row.bits
        codes = array.view(np.uint8)
        if row.kind == "sign":
            codes = codes >> 3 & 1  # of four bits, the highest is set in -1 alone
        last = array.shape[-1] if array.ndim else 1
        stored = np.empty((*array.shape[:-1], packed_length(last, bits)), np.uint8)
        _fill(stored.reshape(-1), codes, bits)
    elif name in _PLAIN:
        stored = array
    else:
        stored = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    about = {"dtype": name, "shape": list(array.shape), "bits": bits, "checksum": _hash(stored)}
    return stored, about


def from_file(stored: Any, about: Any, where: str, what: str, qtype: Any = None) -> np.ndarray:
    """The array that `to_file` was given."""
    stored, dtype, shape = checked(stored, about, where, what)
    bits = about["bits"]
    if bits is None:
        plain = dtype.name in _PLAIN
        return stored if plain else np.array(stored).view(dtype).reshape(shape)
    last = shape[-1] if shape else 1
    if qtype is not None and format_of(qtype).kind == "sign":
        signs = unpack(stored, 1, last, np.uint8)
        return (1 - 2 * signs.astype(np.int8)).view(dtype).reshape(shape)
    return unpack(stored, bits, last, dtype).reshape(shape)


def checked(
    stored: Any, about: Any, where: str, what: str
) -> tuple[np.ndarray, np.dtype, tuple[int, ...]]:
    """What a file holds, with the dtype and shape it stands for, if it is what was written."""
    try:
        dtype, shape = _DTYPES[about["dtype"]], tuple(about["shape"])
        wanted, given = stored_shape(about), about["checksum"]
    except (KeyError, TypeError) as error:
        raise damaged(where, what, f"its description lacks {error}") from None
    stored = np.asarray(stored)
    if stored.shape != wanted:
        raise damaged(where, what, f"expected the shape {wanted}, found {stored.shape}")
    if _hash(stored) != given:
        raise damaged(where, what, "checksum")
    return stored, dtype, shape


def stored_shape(about: Any) -> tuple[int, ...]:
    """The shape in the file of an array that is described so.

    >>> stored_shape({'dtype': 'int4', 'shape': [3, 5], 'bits': 4})
    (3, 3)
    """
    dtype, shape, bits = _DTYPES[about["dtype"]], tuple(about["shape"]), about["bits"]
    if bits is not None:
        return (*shape[:-1], packed_length(shape[-1] if shape else 1, bits))
    return shape if dtype.name in _PLAIN else (math.prod(shape) * dtype.itemsize,)


def _fill(to: np.ndarray, codes: np.ndarray, bits: int) -> None:
    begin = 0
    for piece in pack_pieces(codes, bits):
        to[begin : begin + piece.size] = piece
        begin += piece.size


def _numpy(array: Any) -> np.ndarray:
    """The numbers of an array, gathered from all devices."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        array = jax.device_get(array)
    return np.asarray(array)


def _hash(stored: np.ndarray) -> str:
    return checksum(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)
