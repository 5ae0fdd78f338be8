"""Float checkpoints as sources to quantize from: safetensors by slices, Orbax by leaves."""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any, Protocol

import numpy as np

from fewbit.io._given_files import open_checkpoint_file
from fewbit.io._safetensors_header import DTYPES, MOST_HEADER_BYTES
from fewbit.io.errors import CheckpointError
from fewbit.io.tensor_sources import TensorSource

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "_sharding")

_MSG_MISSING = "does not exist"
_MSG_FOREIGN = "is no checkpoint that can be read"
_FIX_FOREIGN = (
    "Give a .safetensors file, a folder of such files, or an Orbax checkpoint. PyTorch's .bin and "
    ".pt files are pickles, which are never read: convert them with the safetensors package."
)
_MSG_OURS = "is quantized already: it is a checkpoint of fewbit"
_FIX_OURS = "Quantize the float checkpoint that it was made from; fewbit.load(path) loads this one."


class Source(Protocol):
    """Tensors by name. With `slices` any range of an axis can be read without the rest."""

    path: str
    slices: bool

    @property
    def names(self) -> tuple[str, ...]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def itemsize(self, name: str) -> int: ...
    def nbytes(self, name: str) -> int: ...
    def read(self, name: str, axis: int, begin: int, end: int) -> np.ndarray: ...
    def read_all(self, name: str) -> np.ndarray: ...
    def identity(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source at a path, whatever of the known kinds it is."""
    place = os.fspath(path)
    if not os.path.lexists(place):
        raise CheckpointError(place, _MSG_MISSING)
    if os.path.isdir(place):
        names = os.listdir(place)
        if "fewbit.json" in names:
            raise CheckpointError(place, _MSG_OURS, fix=_FIX_OURS)
        if not any(name.endswith(".safetensors") for name in names):
            if any(name in names for name in _ORBAX_FILES) or "default" in names:
                from fewbit.io.orbax_source import OrbaxSource

                return OrbaxSource(place)
            raise CheckpointError(place, _MSG_FOREIGN, fix=_FIX_FOREIGN)
    elif not place.endswith((".safetensors", ".safetensors.index.json")):
        raise CheckpointError(place, _MSG_FOREIGN, fix=_FIX_FOREIGN)
    return SafetensorsSource(place)


class SafetensorsSource:
    """A safetensors checkpoint, read by ranges and never mapped, so that memory stays small."""

    slices = True

    def __init__(self, path: str):
        self.path = path
        self._tensors = TensorSource(path)
        self._open = {file: open_checkpoint_file(file) for file in self._tensors.files}

    @property
    def names(self) -> tuple[str, ...]:
        return self._tensors.names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors.info(name).shape)

    def dtype(self, name: str) -> str:
        return self._tensors.dtype(name)

    def itemsize(self, name: str) -> int:
        return int(DTYPES[self._tensors.info(name).dtype][1]) // 8

    def nbytes(self, name: str) -> int:
        return int(self._tensors.info(name).nbytes)

    def read(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        """The indices `begin` to `end` of an axis."""
        info, shape = self._tensors.info(name), self.shape(name)
        inner = math.prod(shape[axis + 1 :]) * self.itemsize(name)
        outer = math.prod(shape[:axis])
        run, step = (end - begin) * inner, shape[axis] * inner
        data = np.empty(outer * run, np.uint8)
        if run == step:
            outer, run = 1, outer * run
        for row in range(outer):
            place = info.begin + row * step + begin * inner
            self._fill(name, data[row * run : (row + 1) * run], place)
        kind = DTYPES[info.dtype][0]
        return data.view(kind).reshape(*shape[:axis], end - begin, *shape[axis + 1 :])

    def read_all(self, name: str) -> np.ndarray:
        return self._tensors.read(name)

    def _fill(self, name: str, data: np.ndarray, offset: int) -> None:
        file = self._tensors.file(name)
        done = 0
        while done < data.size:
            try:
                got = os.preadv(self._open[file.path], [data[done:].data], offset + done)
            except OSError as error:
                raise CheckpointError(file.path, f"cannot be read ({error.strerror})") from error
            if not got:
                what = "is gone; the file was changed while it was read"
                raise CheckpointError(file.path, what, tensor=name)
            done += got

    def identity(self) -> dict[str, Any]:
        """What tells this source from another, or from itself after a change."""
        files = {}
        for path, number in self._open.items():
            info = os.fstat(number)
            length = min(int.from_bytes(os.pread(number, 8, 0), "little"), MOST_HEADER_BYTES)
            header = hashlib.blake2b(os.pread(number, length, 8), digest_size=16).hexdigest()
            files[os.path.basename(path)] = [info.st_size, info.st_mtime_ns, header]
        return {"safetensors": files}

    def close(self) -> None:
        """Close all files."""
        self._tensors.close()
        for number in self._open.values():
            os.close(number)
        self._open.clear()
