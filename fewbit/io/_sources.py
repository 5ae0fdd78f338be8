"""Where tensors come from, by name, as they are asked for.

`TensorSource` is a safetensors file, a folder of shards with an index, or loose shards. A `Source`
is a float checkpoint to quantize from: safetensors by slices, Orbax by leaves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from fewbit._util import LARGE_BYTES, key_name, nearest
from fewbit.io._errors import (
    CheckpointError,
    cut,
    open_checkpoint_file,
    read_object,
)
from fewbit.io._safetensors import (
    DTYPES,
    MOST_HEADER_BYTES,
    MSG_GONE,
    SafetensorsFile,
    TensorInfo,
    new_checksum,
    read_into,
)

INDEX = ".safetensors.index.json"
OWN = "fewbit.json"
_MOST_NAME = 255  # characters; no disk has longer ones

_MSG_OURS = "is a checkpoint of fewbit"
_FIX_OURS = "fewbit.load(path) loads it."
_MSG_NOTHING = "has no safetensors file"
_FIX_NOTHING = (
    "Give a .safetensors file or the folder of a checkpoint. PyTorch's .bin files are pickles, "
    "which are never read: convert them with the safetensors package."
)
_MSG_INDEX = "is no index of a sharded checkpoint ({reason})"
_MSG_SHARD = "is missing, and {index} names it for {count} tensors"
_MSG_TWICE = "is in two files, {first} and {second}"

_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "_sharding")
# What Orbax reads whole and parses as JSON.
_ORBAX_DOCUMENTS = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray", "zarr.json")

_MSG_MISSING = "does not exist"
_MSG_FOREIGN = "is no checkpoint that can be read"
_FIX_FOREIGN = (
    "Give a .safetensors file, a folder of such files, or an Orbax checkpoint. PyTorch's .bin and "
    ".pt files are pickles, which are never read: convert them with the safetensors package."
)
_MSG_OURS_ALREADY = "is quantized already: it is a checkpoint of fewbit"
_FIX_OURS_ALREADY = (
    "Quantize the float checkpoint that it was made from; fewbit.load(path) loads this one."
)
_MSG_NEEDS = "is an Orbax checkpoint, and orbax-checkpoint is not installed"
_FIX_NEEDS = "pip install orbax-checkpoint."
_MSG_UNREADABLE = "cannot be read as an Orbax checkpoint of a pytree ({reason})"

# --- Safetensors, whole tensors -------------------------------------------------------------------


class TensorSource:
    """The tensors of a safetensors checkpoint by name, read when asked for.

    >>> import tempfile
    >>> from fewbit.io._safetensors import SafetensorsWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SafetensorsWriter(f'{folder}/model.safetensors', [('w', 'F32', (2,))]) as writer:
    ...         writer.write('w', np.zeros(2, np.float32))
    ...     TensorSource(folder).names
    ('w',)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._files: dict[str, SafetensorsFile] = {}
        self._home: dict[str, SafetensorsFile] = {}
        for shard, wanted in _shards(self.path).items():
            file = SafetensorsFile(shard)
            self._files[shard] = file
            for name in file.names if wanted is None else wanted:
                if name in self._home:
                    first = os.path.basename(self._home[name].path)
                    what = _MSG_TWICE.format(first=first, second=os.path.basename(shard))
                    raise CheckpointError(self.path, what, tensor=name)
                file.info(name)  # an index that names a tensor the file lacks is told at once
                self._home[name] = file

    @property
    def folder(self) -> str:
        """Where the settings lie beside the tensors."""
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."

    @property
    def files(self) -> tuple[str, ...]:
        """The files with tensors, in order."""
        return tuple(self._files)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""
        return self.file(name).info(name)

    def dtype(self, name: str) -> str:
        """The name of a tensor's NumPy dtype, without reading it."""
        kind = DTYPES[self.info(name).dtype][0]
        return self.info(name).dtype if kind is None else str(kind.name)

    def read(self, name: str, *, copy: bool = True) -> np.ndarray:
        """The tensor."""
        return self.file(name).read(name, copy=copy)

    def file(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor; an unknown name raises with the nearest."""
        if name not in self._home:
            near = nearest(name, self._home, "The nearest are {}.", 3, 0.6, show=str)
            raise CheckpointError(self.path, f"has no tensor {name!r}", fix=near)
        return self._home[name]

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def _shards(path: str) -> Mapping[str, list[str] | None]:
    """Files, and the tensors wanted of each (None: all)."""
    if not os.path.isdir(path):
        return _indexed(path) if path.endswith(INDEX) else {path: None}
    listing = sorted(os.listdir(path))
    if OWN in listing:
        raise CheckpointError(path, _MSG_OURS, fix=_FIX_OURS)
    indexes = [name for name in listing if name.endswith(INDEX)]
    if indexes:
        preferred = "model" + INDEX
        return _indexed(os.path.join(path, preferred if preferred in indexes else indexes[0]))
    files = [name for name in listing if name.endswith(".safetensors")]
    if not files:
        raise CheckpointError(path, _MSG_NOTHING, fix=_FIX_NOTHING)
    return {os.path.join(path, name): None for name in files}


def _indexed(path: str) -> Mapping[str, list[str]]:
    try:
        items = [(str(name), str(shard)) for name, shard in read_object(path)["weight_map"].items()]
    except (KeyError, TypeError, AttributeError, CheckpointError) as error:
        reason = str(error).removeprefix(path).strip() if path in str(error) else cut(error, 100)
        raise CheckpointError(path, _MSG_INDEX.format(reason=reason.rstrip("."))) from None
    shards: dict[str, list[str]] = {}
    for name, shard in items:
        # A file elsewhere is nothing of this checkpoint.
        if os.path.basename(shard) != shard or len(shard) > _MOST_NAME:
            reason = f"the place of {cut(name)} is {cut(shard)}"
            raise CheckpointError(path, _MSG_INDEX.format(reason=reason))
        shards.setdefault(os.path.join(os.path.dirname(path), shard), []).append(name)
    for shard, wanted in shards.items():
        if not os.path.isfile(shard):
            what = _MSG_SHARD.format(index=os.path.basename(path), count=len(wanted))
            raise CheckpointError(shard, what, fix="Fetch it, or the whole checkpoint again.")
    return shards


# --- Float checkpoints to quantize from -----------------------------------------------------------


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
        if OWN in names:
            raise CheckpointError(place, _MSG_OURS_ALREADY, fix=_FIX_OURS_ALREADY)
        if not any(name.endswith(".safetensors") for name in names):
            if any(name in names for name in _ORBAX_FILES) or "default" in names:
                return OrbaxSource(place)
            raise CheckpointError(place, _MSG_FOREIGN, fix=_FIX_FOREIGN)
    elif not place.endswith((".safetensors", INDEX)):
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
            file = self._tensors.file(name).path
            if not read_into(data[row * run : (row + 1) * run], self._open[file], place, file):
                raise CheckpointError(file, MSG_GONE, tensor=name)
        kind = DTYPES[info.dtype][0]
        return data.view(kind).reshape(*shape[:axis], end - begin, *shape[axis + 1 :])

    def read_all(self, name: str) -> np.ndarray:
        return self._tensors.read(name)

    def identity(self) -> dict[str, Any]:
        """What tells this source from another, or from itself after a change."""
        files = {}
        for path, number in self._open.items():
            info = os.fstat(number)
            length = min(int.from_bytes(os.pread(number, 8, 0), "little"), MOST_HEADER_BYTES)
            header = new_checksum(os.pread(number, length, 8)).hexdigest()
            files[os.path.basename(path)] = [info.st_size, info.st_mtime_ns, header]
        return {"safetensors": files}

    def close(self) -> None:
        """Close all files."""
        self._tensors.close()
        for number in self._open.values():
            os.close(number)
        self._open.clear()


class OrbaxSource:
    """The arrays of a pytree that Orbax saved, by `/`-joined path. Each is read as a whole."""

    slices = False

    def __init__(self, path: str):
        inner = os.path.join(path, "default")  # where a CheckpointManager puts its one item
        self.path = os.path.abspath(inner if os.path.isdir(inner) else path)
        try:
            import orbax.checkpoint as orbax
        except ImportError:
            raise CheckpointError(path, _MSG_NEEDS, fix=_FIX_NEEDS) from None
        _check_files(self.path)
        self._orbax = orbax
        self._checkpointer = orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
        try:
            found = self._checkpointer.metadata(self.path)
            found = getattr(found, "item_metadata", found)
            self._tree = getattr(found, "tree", found)
            flat = jax.tree_util.tree_flatten_with_path(self._tree)[0]
        except Exception as error:
            what = _MSG_UNREADABLE.format(reason=cut(str(error), 120))
            raise CheckpointError(path, what) from error
        self._keys = {key_name(key): key for key, _ in flat}
        self._infos = {key_name(key): info for key, info in flat}

    @property
    def names(self) -> tuple[str, ...]:
        items = self._infos.items()
        return tuple(n for n, info in items if getattr(info, "shape", None) is not None)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._infos[name].shape)

    def dtype(self, name: str) -> str:
        return str(np.dtype(self._infos[name].dtype).name)

    def itemsize(self, name: str) -> int:
        return int(np.dtype(self._infos[name].dtype).itemsize)

    def nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.itemsize(name)

    def read(self, name: str, axis: int, begin: int, end: int) -> np.ndarray:
        """The indices `begin` to `end` of an axis, after the whole array has been read."""
        return self.read_all(name)[(slice(None),) * axis + (slice(begin, end),)]

    def read_all(self, name: str) -> np.ndarray:
        """One array; all others stay on disk."""
        ours = self._keys[name]
        arrays = self._orbax.RestoreArgs(restore_type=np.ndarray)
        try:
            item = jax.tree_util.tree_map_with_path(
                lambda key, _: 0 if key == ours else self._orbax.PLACEHOLDER, self._tree
            )
            wanted = self._orbax.args.PyTreeRestore(
                item=item, restore_args=jax.tree.map(lambda _: arrays, self._tree)
            )
            found = self._checkpointer.restore(self.path, args=wanted)
        except Exception as error:
            what = _MSG_UNREADABLE.format(reason=cut(str(error), 120))
            raise CheckpointError(self.path, what, tensor=name) from error
        flat = jax.tree_util.tree_flatten_with_path(found)[0]
        return np.asarray(next(value for key, value in flat if key_name(key) == name))

    def identity(self) -> dict[str, Any]:
        """Names, sizes and times of all files."""
        total = new_checksum()
        for folder, folders, files in os.walk(self.path):
            folders.sort()
            for file in sorted(files):
                place = os.path.join(folder, file)
                info = os.stat(place)
                entry = (os.path.relpath(place, self.path), info.st_size, info.st_mtime_ns)
                total.update(repr(entry).encode())
        return {"orbax": total.hexdigest()}

    def close(self) -> None:
        """Let go of Orbax's resources."""
        self._checkpointer.close()


def _check_files(path: str) -> None:
    """Raise for what Orbax would wait for or never finish: it opens whatever it finds."""
    for folder, _, files in os.walk(path):
        for file in files:
            place = os.path.join(folder, file)
            most = LARGE_BYTES if file in _ORBAX_DOCUMENTS else None
            os.close(open_checkpoint_file(place, most))
