"""An Orbax checkpoint as a source to quantize from, one array at a time."""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import jax
import numpy as np

from fewbit._files import LARGE_BYTES
from fewbit.calls import key_name
from fewbit.io._given_files import open_checkpoint_file
from fewbit.io.errors import CheckpointError, cut

# What Orbax reads whole and parses as JSON.
_DOCUMENTS = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray", "zarr.json")

_MSG_NEEDS = "is an Orbax checkpoint, and orbax-checkpoint is not installed"
_FIX_NEEDS = "pip install orbax-checkpoint."
_MSG_UNREADABLE = "cannot be read as an Orbax checkpoint of a pytree ({reason})"


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
            reason = cut(str(error), 120)
            raise CheckpointError(path, _MSG_UNREADABLE.format(reason=reason)) from error
        self._keys = {key_name(key): key for key, _ in flat}
        self._infos = {key_name(key): info for key, info in flat}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(
            n for n, info in self._infos.items() if getattr(info, "shape", None) is not None
        )

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
        place = (slice(None),) * axis + (slice(begin, end),)
        return self.read_all(name)[place]

    def read_all(self, name: str) -> np.ndarray:
        """One array; all others stay on disk."""
        ours = self._keys[name]

        def of(key: Any, wanted: Any) -> Any:
            return wanted if key == ours else self._orbax.PLACEHOLDER

        visit = jax.tree_util.tree_map_with_path
        arrays = self._orbax.RestoreArgs(restore_type=np.ndarray)
        try:
            found = self._checkpointer.restore(
                self.path,
                args=self._orbax.args.PyTreeRestore(
                    item=visit(lambda key, _: of(key, 0), self._tree),
                    restore_args=visit(lambda key, _: arrays, self._tree),
                ),
            )
        except Exception as error:
            reason = cut(str(error), 120)
            what = _MSG_UNREADABLE.format(reason=reason)
            raise CheckpointError(self.path, what, tensor=name) from error
        flat = jax.tree_util.tree_flatten_with_path(found)[0]
        return np.asarray(next(value for key, value in flat if key_name(key) == name))

    def identity(self) -> dict[str, Any]:
        """Names, sizes and times of all files."""
        total = hashlib.blake2b(digest_size=16)
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
            most = LARGE_BYTES if file in _DOCUMENTS else None
            os.close(open_checkpoint_file(place, most))
