"""Where tensors come from: a safetensors file, a folder of shards with an index, loose shards."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import numpy as np

from fewbit.io._given_files import read_object
from fewbit.io._safetensors_header import DTYPES, TensorInfo
from fewbit.io.errors import CheckpointError, cut
from fewbit.io.safetensors_file import SafetensorsFile

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


class TensorSource:
    """The tensors of a safetensors checkpoint by name, read when asked for.

    >>> import tempfile
    >>> from fewbit.io.safetensors_file import SafetensorsWriter
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
            close = difflib.get_close_matches(name, self._home, 3)
            near = f" The nearest are {', '.join(close)}." if close else ""
            raise CheckpointError(self.path, f"has no tensor {name!r}", fix=near.strip())
        return self._home[name]

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def _shards(path: str) -> Mapping[str, list[str] | None]:
    """Files, and the tensors wanted of each (None: all)."""
    if not os.path.isdir(path):
        if path.endswith(INDEX):
            return _indexed(path)
        return {path: None}
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


def _indexed(path: str) -> Mapping[str, list[str] | None]:
    try:
        items = [(str(name), str(shard)) for name, shard in read_object(path)["weight_map"].items()]
    except (KeyError, TypeError, AttributeError, CheckpointError) as error:
        reason = str(error).removeprefix(path).strip() if path in str(error) else cut(error, 100)
        raise CheckpointError(path, _MSG_INDEX.format(reason=reason.rstrip("."))) from None
    folder = os.path.dirname(path)
    shards: dict[str, list[str] | None] = {}
    for name, shard in items:
        # A file elsewhere is nothing of this checkpoint.
        if os.path.basename(shard) != shard or len(shard) > _MOST_NAME:
            reason = f"the place of {cut(name)} is {cut(shard)}"
            raise CheckpointError(path, _MSG_INDEX.format(reason=reason))
        wanted = shards.setdefault(os.path.join(folder, shard), [])
        assert wanted is not None
        wanted.append(name)
    for shard, wanted in shards.items():
        if not os.path.isfile(shard):
            index = os.path.basename(path)
            what = _MSG_SHARD.format(index=index, count=len(wanted or ()))
            raise CheckpointError(shard, what, fix="Fetch it, or the whole checkpoint again.")
    return shards
