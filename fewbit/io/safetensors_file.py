"""Safetensors files, read strictly and written piece by piece.

Of our own, because tensors have to stream into a file one at a time, and because bfloat16 and the
8- and 4-bit types must be read without another framework. `_safetensors_header` has the format.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from fewbit.io._given_files import open_checkpoint_file
from fewbit.io._safetensors_header import DTYPES as DTYPES
from fewbit.io._safetensors_header import MOST_HEADER_BYTES, read_header, write_header
from fewbit.io._safetensors_header import TensorInfo as TensorInfo
from fewbit.io._safetensors_header import dtype_name as dtype_name
from fewbit.io.errors import CheckpointError

PIECE = 8 * 2**20  # bytes read or written at a time

_MSG_NO_DTYPE = "is {dtype}, which has no array type here; use raw(name)"
_MSG_ORDER = "{path}: {found!r} was written where {expected!r} comes next; keep the given order."
_MSG_FAILED = "could not be written ({reason}); nothing of it was kept"


def new_checksum() -> Any:
    """The hash that checkpoints carry for each tensor: BLAKE2b, 128 bits.

    >>> new_checksum().hexdigest()
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(digest_size=16)


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
                raise CheckpointError(
                    self.path,
                    "is no safetensors file",
                    expected="at least 8 bytes",
                    found=len(head),
                )
            length = int.from_bytes(head, "little")
            most = min(MOST_HEADER_BYTES, self.nbytes - 8)
            if length > most:
                raise CheckpointError(
                    self.path,
                    "is cut off or no safetensors file",
                    expected=f"a header of at most {most} bytes",
                    found=length,
                )
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
        data = self._own(info) if copy else np.frombuffer(self.raw(name), np.uint8)
        if bits == 4:
            halves = np.stack([data & 15, data >> 4], axis=-1)
            return halves.reshape(info.shape).view(dtype)
        if info.dtype == "BOOL" and data.size and np.max(data) > 1:
            raise CheckpointError(
                self.path, "is no BOOL", tensor=name, expected="bytes 0 and 1", found=np.max(data)
            )
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

    def _own(self, info: TensorInfo) -> np.ndarray:
        data = np.empty(info.nbytes, np.uint8)
        view, done = data.data, 0
        try:
            while done < info.nbytes:
                part = view[done : done + PIECE]
                got = os.preadv(self._file, [part], info.begin + done)
                if not got:
                    raise self._shrunk(info)
                done += got
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error.strerror})") from error
        return data

    def _shrunk(self, info: TensorInfo) -> CheckpointError:
        size = os.fstat(self._file).st_size
        return CheckpointError(
            self.path,
            "is gone; the file was changed while it was read",
            tensor=info.name,
            expected=f"{self.nbytes} bytes",
            found=size,
        )


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
        folder, name = os.path.split(self.path)
        self._temporary = os.path.join(folder, f".{name}.tmp-{secrets.token_hex(6)}")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _bytes_of(self, name: str, array: np.ndarray) -> memoryview:
        info = self._infos.get(name)
        given = dtype_name(array.dtype), array.shape
        if info is not None and given != (info.dtype, info.shape):
            raise ValueError(f"{name} is {info.dtype} {info.shape}, but {given} was given.")
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if array.dtype == ml_dtypes.float4_e2m1fn:
            return ((flat[::2] & 15) | (flat[1::2] << 4)).data
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


def sync_folder(path: str) -> None:
    """Make the names in a folder last through a power cut."""
    number = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not all disks sync folders
            raise
    finally:
        os.close(number)
