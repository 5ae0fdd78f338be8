"""Safetensors files, read strictly and written piece by piece.

Of our own, because tensors have to stream into a file one at a time, and because bfloat16 and the
8- and 4-bit types must be read without another framework. A file is a header, JSON that says which
bytes are which tensor, and these bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from fewbit._util import MOST_DEPTH, sync_folder, too_deep
from fewbit.io._errors import CheckpointError, cut, open_checkpoint_file

PIECE = 8 * 2**20  # bytes read or written at a time
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
_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items() if dtype is not None}

MSG_GONE = "is gone; the file was changed while it was read"
_MSG_NO_DTYPE = "is {dtype}, which has no array type here; use raw(name)"
_MSG_ORDER = "{path}: {found!r} was written where {expected!r} comes next; keep the given order."
_MSG_FAILED = "could not be written ({reason}); nothing of it was kept"

# --- The header -----------------------------------------------------------------------------------


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
    return _NAMES.get(np.dtype(dtype))


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
    begin = 0
    for name, dtype, shape in tensors:
        size = byte_count(dtype, shape)
        if size is None:
            raise ValueError(f"{name}: {tuple(shape)} numbers of {dtype} do not fill whole bytes.")
        if name in entries or name == "__metadata__":
            raise ValueError(f"{name!r} is given twice or taken: each tensor needs its own name.")
        offsets = [begin, begin + size]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        begin += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    entries.pop("__metadata__", None)
    infos = {name: _info(name, entry, 8 + len(text)) for name, entry in entries.items()}
    return len(text).to_bytes(8, "little") + text, infos


def read_header(
    path: str, head: bytes, text: bytes, file_size: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a file, every entry checked against its size."""
    start = len(head) + len(text)
    if text[:1] != b"{":
        raise _bad(path, "has no header", "'{' at byte 8", cut(text[:1]))
    entries = parse_json(path, text, "header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, "has bad metadata", "strings by name", cut(metadata))
    infos = [_entry(path, name, entry, start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    reached = start
    for info in infos:
        if info.begin != reached:
            what = "does not begin where the one before it ends"
            raise _bad(path, what, f"byte {reached - start}", info.begin - start, info.name)
        reached = info.end
        if reached > file_size:
            what = "is cut off; the file is shorter than its header says"
            wanted, found = f"bytes up to {reached}", f"{file_size} in the file"
            raise _bad(path, what, wanted, found, info.name)
    if reached != file_size:
        raise _bad(path, "has bytes that belong to no tensor", f"{reached} bytes", file_size)
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
        raise _bad(path, f"has a bad {what}", "a JSON object", cut(parsed))
    return parsed


def _entry(path: str, name: str, entry: Any, start: int) -> TensorInfo:
    def bad(what: str, expected: str, found: Any) -> CheckpointError:
        return _bad(path, what, expected, cut(found), name)

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
        wanted = f"{needs} for {dtype} of shape {tuple(shape)}"
        raise bad("has the wrong size", wanted, offsets[1] - offsets[0])
    return _info(name, entry, start)


def _info(name: str, entry: Mapping[str, Any], start: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(name, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)


def _counts(value: Any) -> bool:
    # bool is an int to Python: `type` rather than isinstance.
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _LARGEST for v in value)


def _volume(shape: Sequence[int]) -> int:
    """The product of what is not zero: NumPy refuses a huge axis even beside an empty one."""
    return math.prod(size for size in shape if size)


def _bad(
    path: str, what: str, expected: str, found: Any, tensor: str | None = None
) -> CheckpointError:
    return CheckpointError(path, what, tensor=tensor, expected=expected, found=found)


# --- Files, read when asked for and written in order ----------------------------------------------


class SafetensorsFile:
    """One safetensors file, checked when it is opened; tensors are read when asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SafetensorsWriter(f'{folder}/a', [('w', 'BF16', (2,))]) as writer:
    ...         writer.write('w', np.array([1, 2], ml_dtypes.bfloat16))
    ...     file = SafetensorsFile(f'{folder}/a')
    >>> file.names, file.read('w')
    (('w',), array([1, 2], dtype=bfloat16))
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._map: mmap.mmap | None = None
        self._file = open_checkpoint_file(self.path)
        # Closes with the last reference: whoever loads lazily has no good moment to do it.
        self._closing = weakref.finalize(self, os.close, self._file)
        try:
            self.nbytes = os.fstat(self._file).st_size
            head = self._at(0, 8)
            if len(head) < 8:
                raise _bad(self.path, "is no safetensors file", "at least 8 bytes", len(head))
            length = int.from_bytes(head, "little")
            most = min(MOST_HEADER_BYTES, self.nbytes - 8)
            if length > most:
                wanted = f"a header of at most {most} bytes"
                raise _bad(self.path, "is cut off or no safetensors file", wanted, length)
            text = self._at(8, length)
            self._infos, self.metadata = read_header(self.path, head, text, self.nbytes)
        except BaseException:
            self._closing()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, in the order of their bytes."""
        return tuple(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""
        if name not in self._infos:
            raise CheckpointError(self.path, "is missing from the file", tensor=name)
        return self._infos[name]

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes, mapped: pages are read when they are touched."""
        info = self.info(name)
        if self._map is None:
            self._map = mmap.mmap(self._file, self.nbytes, access=mmap.ACCESS_READ)
        return memoryview(self._map)[info.begin : info.end]

    def pieces(self, name: str, size: int = PIECE) -> Iterator[bytes]:
        """The tensor's bytes, `size` at a time, without mapping the file."""
        info = self.info(name)
        for begin in range(info.begin, info.end, size):
            wanted = min(size, info.end - begin)
            piece = self._at(begin, wanted)
            if len(piece) < wanted:
                raise self._shrunk(info)
            yield piece

    def read(self, name: str, *, copy: bool = False) -> np.ndarray:
        """The tensor as an array: a view of the mapped file, or a copy that is the caller's own.

        Mapped pages count as this process's memory while they are in use, and a file that shrinks
        under a mapping ends the process; `copy=True` has neither trouble.
        """
        info = self.info(name)
        dtype, bits = DTYPES[info.dtype]
        if dtype is None:
            raise CheckpointError(self.path, _MSG_NO_DTYPE.format(dtype=info.dtype), tensor=name)
        if copy:
            data = np.empty(info.nbytes, np.uint8)
            if not read_into(data, self._file, info.begin, self.path):
                raise self._shrunk(info)
        else:
            data = np.frombuffer(self.raw(name), np.uint8)
        if bits == 4:
            halves = np.stack([data & 15, data >> 4], axis=-1)
            return halves.reshape(info.shape).view(dtype)
        if info.dtype == "BOOL" and data.size and np.max(data) > 1:
            raise _bad(self.path, "is no BOOL", "bytes 0 and 1", np.max(data), name)
        return data.view(dtype).reshape(info.shape)

    def checksum(self, name: str) -> str:
        """The hash of the tensor's bytes (`new_checksum`), in hexadecimal."""
        total = new_checksum()
        for piece in self.pieces(name):
            total.update(piece)
        return str(total.hexdigest())

    def close(self) -> None:
        """Close the file; arrays that view it stay valid."""
        self._map = None
        self._closing()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _at(self, begin: int, size: int) -> bytes:
        try:
            return os.pread(self._file, size, begin)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error.strerror})") from error

    def _shrunk(self, info: TensorInfo) -> CheckpointError:
        size = os.fstat(self._file).st_size
        return _bad(self.path, MSG_GONE, f"{self.nbytes} bytes", size, info.name)


def read_into(data: np.ndarray, number: int, offset: int, path: str) -> bool:
    """Fill an array of bytes from an opened file; False where the file ends before."""
    left = data.data
    try:
        while left:
            got = os.preadv(number, [left[:PIECE]], offset)
            if not got:
                return False
            left, offset = left[got:], offset + got
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from error
    return True


class SafetensorsWriter:
    """Writes a file whose tensors are known beforehand, one after another, a piece at a time.

    The file appears under its name when all is written and on disk; until then, and after an
    error, there is at most a hidden file beside it. Same tensors, same metadata: same bytes.
    `checksums` holds the hash of each tensor that is complete.

    >>> import tempfile
    >>> tensors = [('codes', 'U8', (4,)), ('scale', 'F32', ())]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SafetensorsWriter(f'{folder}/a', tensors, {'by': 'me'}) as writer:
    ...         writer.append('codes', b'ab')
    ...         writer.append('codes', b'cd')
    ...         writer.write('scale', np.float32(1))
    ...     bytes(SafetensorsFile(f'{folder}/a').raw('codes'))
    b'abcd'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self.path = os.fspath(path)
        self.checksums: dict[str, str] = {}
        header, self._infos = write_header(tensors, metadata or {})
        self._waiting = list(self._infos.values())[::-1]
        self._left = self._waiting[-1].nbytes if self._waiting else 0
        self._sum = new_checksum()
        self._temporary = hidden_beside(self.path)
        self._file: BinaryIO | None = None
        with self._told():
            self._file = open(self._temporary, "xb", buffering=0)
            self._put(memoryview(header))

    def write(self, name: str, data: Any) -> None:
        """The whole of the next tensor: an array of its dtype and shape, or its bytes."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            data = self._bytes_of(name, np.asarray(data))
        self.append(name, data)
        if self._waiting and self._waiting[-1].name == name and self._left:
            total = self._infos[name].nbytes
            raise ValueError(f"{name}: {total} bytes are needed, {total - self._left} were given.")

    def append(self, name: str, piece: bytes | bytearray | memoryview) -> None:
        """Some more bytes of the next tensor."""
        expected = self._waiting[-1].name if self._waiting else "nothing"
        if name != expected:
            raise ValueError(_MSG_ORDER.format(path=self.path, found=name, expected=expected))
        view = memoryview(piece).cast("B")
        if len(view) > self._left:
            raise ValueError(f"{name}: {len(view) - self._left} bytes more than the shape takes.")
        with self._told():
            for begin in range(0, len(view), PIECE):
                part = view[begin : begin + PIECE]
                self._sum.update(part)
                self._put(part)
        self._left -= len(view)
        if not self._left:
            self.checksums[name] = self._sum.hexdigest()
            self._waiting.pop()
            self._left = self._waiting[-1].nbytes if self._waiting else 0
            self._sum = new_checksum()

    def close(self) -> None:
        """Bring everything to disk and give the file its name."""
        if self._file is None:
            return
        if self._waiting:
            missing = self._waiting[-1].name
            self.abort()
            raise ValueError(f"{self.path} is not complete: {missing!r} was not written.")
        with self._told():
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
            sync_folder(os.path.dirname(self.path))
        self._file = None

    def abort(self) -> None:
        """Give up; what was written is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _bytes_of(self, name: str, array: np.ndarray) -> memoryview:
        info = self._infos.get(name)
        given = dtype_name(array.dtype), array.shape
        if info is not None and given != (info.dtype, info.shape):
            raise ValueError(f"{name} is {info.dtype} {info.shape}, but {given} was given.")
        flat: np.ndarray = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if array.dtype == ml_dtypes.float4_e2m1fn:
            flat = (flat[::2] & 15) | (flat[1::2] << 4)
        return flat.data

    def _put(self, data: memoryview) -> None:
        assert self._file is not None
        while data:  # a nearly full disk takes less than it is given
            data = data[self._file.write(data) :]

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            reason = error.strerror or str(error)
            raise CheckpointError(self.path, _MSG_FAILED.format(reason=reason)) from error


def raw_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in order, without a copy where it lies so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def new_checksum(data: Any = b"") -> Any:
    """The hash that checkpoints carry for each tensor: BLAKE2b, 128 bits.

    >>> new_checksum().hexdigest()
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(data, digest_size=16)


def hidden_beside(path: str) -> str:
    """A name that is not taken, for a file that gets this path when it is whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.tmp-{secrets.token_hex(6)}")
