"""The header of a safetensors file: JSON that says which bytes are which tensor.

A file is: 8 bytes, the header's length N as a little-endian integer; N bytes of JSON, padded with
spaces; the tensors, one after another without a gap. The header holds, for each name, `dtype`,
`shape` and `data_offsets` (begin and end, counted from the end of the header), and optionally
`__metadata__`, strings by name. Nothing in a header is believed before it is checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fewbit._documents import MOST_DEPTH, too_deep
from fewbit.io.errors import CheckpointError, cut

MOST_HEADER_BYTES = 100_000_000  # as in the format's own library
_MOST_AXES = 32
_ALIGNMENT = 64  # of the first tensor, so that JAX can take it without a copy
_LARGEST = 2**63 - 1

# Name in the file: (dtype in memory, bits in the file). None: raw bytes only.
DTYPES: dict[str, tuple[Any, int]] = {
    "BOOL": (np.dtype(np.bool_), 8),
    "U8": (np.dtype(np.uint8), 8),
    "I8": (np.dtype(np.int8), 8),
    "U16": (np.dtype(np.uint16), 16),
    "I16": (np.dtype(np.int16), 16),
    "U32": (np.dtype(np.uint32), 32),
    "I32": (np.dtype(np.int32), 32),
    "U64": (np.dtype(np.uint64), 64),
    "I64": (np.dtype(np.int64), 64),
    "F16": (np.dtype(np.float16), 16),
    "F32": (np.dtype(np.float32), 32),
    "F64": (np.dtype(np.float64), 64),
    "C64": (np.dtype(np.complex64), 64),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E4M3FNUZ": (np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    "F8_E5M2FNUZ": (np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F4": (np.dtype(ml_dtypes.float4_e2m1fn), 4),  # two in a byte, the first in its low half
    "F6_E2M3": (None, 6),
    "F6_E3M2": (None, 6),
}
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items() if dtype is not None}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `begin` and `end` are bytes of the file.

    >>> TensorInfo('w', 'BF16', (2, 3), 64, 76).nbytes
    12
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def dtype_name(dtype: Any) -> str | None:
    """How the format calls a dtype of NumPy, ml_dtypes or JAX; None if it does not know it.

    >>> dtype_name('bfloat16'), dtype_name(np.int8), dtype_name(ml_dtypes.int4)
    ('BF16', 'I8', None)
    """
    return NAMES.get(np.dtype(dtype))


def byte_count(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes that a tensor takes in a file; None where they are not whole.

    >>> byte_count('F32', (2, 3)), byte_count('F4', (3,))
    (24, None)
    """
    bits = math.prod(shape) * DTYPES[dtype][1]
    return None if bits % 8 else bits // 8


def write_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The bytes before the first tensor, and where each will lie in the file.

    >>> header, infos = write_header([('w', 'F32', (2,))], {})
    >>> len(header), infos['w'].begin, infos['w'].end
    (64, 64, 72)
    """
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = {key: metadata[key] for key in sorted(metadata)}
    begin, infos = 0, {}
    for name, dtype, shape in tensors:
        size = byte_count(dtype, shape)
        if size is None:
            raise ValueError(f"{name}: {tuple(shape)} numbers of {dtype} do not fill whole bytes.")
        if name in entries or name == "__metadata__":
            raise ValueError(f"{name!r} is given twice or taken: each tensor needs its own name.")
        end = begin + size
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        infos[name] = TensorInfo(name, dtype, tuple(shape), begin, end)
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    moved = {
        name: dataclasses.replace(info, begin=info.begin + start, end=info.end + start)
        for name, info in infos.items()
    }
    return len(text).to_bytes(8, "little") + text, moved


def read_header(
    path: str, head: bytes, text: bytes, file_size: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a file, every entry checked against its size."""
    start = len(head) + len(text)
    if text[:1] != b"{":
        raise CheckpointError(path, "has no header", expected="'{' at byte 8", found=cut(text[:1]))
    entries = parse_json(path, text, "header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            path, "has bad metadata", expected="strings by name", found=cut(metadata)
        )
    infos = [_entry(path, name, entry, start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    reached = start
    for info in infos:
        if info.begin != reached:
            raise CheckpointError(
                path,
                "does not begin where the one before it ends",
                tensor=info.name,
                expected=f"byte {reached - start}",
                found=info.begin - start,
            )
        reached = info.end
        if reached > file_size:
            raise CheckpointError(
                path,
                "is cut off; the file is shorter than its header says",
                tensor=info.name,
                expected=f"bytes up to {reached}",
                found=f"{file_size} in the file",
            )
    if reached != file_size:
        raise CheckpointError(
            path,
            "has bytes that belong to no tensor",
            expected=f"{reached} bytes",
            found=file_size,
        )
    return {info.name: info for info in infos}, metadata


def parse_json(path: str, text: bytes, what: str) -> dict[str, Any]:
    """A JSON object out of a file: UTF-8, no key twice, no NaN, not nested without end."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            for name, _ in items:
                if name in seen:
                    raise ValueError(f"the key {cut(name)} stands there twice")
                seen.add(name)
        return made

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    # Lists in lists are cheap to write and dear to hold; no file of tensors is made of them.
    if text.count(b"[") + text.count(b"{") > 10_000 + len(text) // 8:
        raise CheckpointError(path, f"has a {what} that is not JSON (almost only brackets)")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
        if too_deep(parsed):
            raise ValueError(f"nested more than {MOST_DEPTH} levels deep")
        if b"\\u" in text:  # half of a surrogate pair can be escaped in JSON, but is no text
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = cut(str(error) or type(error).__name__, 120)
        raise CheckpointError(path, f"has a {what} that is not JSON ({reason})") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(
            path, f"has a bad {what}", expected="a JSON object", found=cut(parsed)
        )
    return parsed


def _entry(path: str, name: str, entry: Any, start: int) -> TensorInfo:
    def bad(what: str, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(path, what, tensor=name, expected=expected, found=cut(found))

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("has a bad entry", "dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad("has an unknown dtype", f"one of {', '.join(DTYPES)}", dtype)
    if not _counts(shape) or len(shape) > _MOST_AXES or _volume(shape) > _LARGEST // 8:
        raise bad("has a bad shape", f"a list of at most {_MOST_AXES} sizes", shape)
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad("has bad data_offsets", "begin and end", offsets)
    size = byte_count(dtype, shape)
    if size != offsets[1] - offsets[0]:
        needs = "whole bytes" if size is None else f"{size} bytes"
        of = f" for {dtype} of shape {tuple(shape)}"
        raise bad("has the wrong size", needs + of, offsets[1] - offsets[0])
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _counts(value: Any) -> bool:
    # bool is an int to Python: `type` rather than isinstance.
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _LARGEST for v in value)


def _volume(shape: Sequence[int]) -> int:
    """The product of what is not zero: NumPy refuses a huge axis even beside an empty one."""
    return math.prod(size for size in shape if size)
