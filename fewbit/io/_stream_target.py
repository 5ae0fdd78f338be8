"""Where a streamed checkpoint goes: a folder that is not there before it is whole.

A new folder is put together inside `<path>.partial` and gets its name last. One that is there
already is written like every checkpoint: shards beside the old ones, the manifest over the old one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

from fewbit.io import _manifest
from fewbit.io._folder import _MSG_BUSY as _FOLDER_BUSY
from fewbit.io._folder import _MSG_FILE, Folder
from fewbit.io._partial import Partial, busy
from fewbit.io.errors import CheckpointError
from fewbit.io.safetensors_file import sync_folder

_WHOLE = "whole"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class Target:
    """The result's folder; one that exists is held for the whole run: nobody else writes to it."""

    def __init__(self, path: str, partial: str):
        self.path, self._partial = path, partial
        self._folder: Folder | None = None

    def __enter__(self) -> Target:
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise CheckpointError(self.path, _MSG_FILE)
        if os.path.isdir(self.path):
            self._hold()
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._partial)
        except OSError as error:
            self.__exit__(type(error), error, None)
            raise Folder(self.path).failed(error) from error
        return self

    def __exit__(self, *error: Any) -> None:
        if self._folder is not None:
            self._folder.__exit__(*error)

    def _hold(self) -> Folder:
        folder = Folder(self.path)
        try:
            self._folder = folder.__enter__()
        except CheckpointError as error:
            if _FOLDER_BUSY not in str(error):
                raise
            raise busy(self.path, self._partial) from None
        return self._folder

    def publish(
        self, partial: Partial, manifest: _manifest.Manifest, files: Mapping[str, str]
    ) -> None:
        """Give the shards (by name, where they lie now) and the manifest their place."""
        if self._folder is None and not self._publish_new(partial, manifest, files):
            self._hold()  # somebody made a folder of that name in the meantime
        if self._folder is not None:
            self._publish_into(self._folder, manifest, files)

    def _publish_into(
        self, folder: Folder, manifest: _manifest.Manifest, files: Mapping[str, str]
    ) -> None:
        try:
            for name, path in files.items():
                _link(path, os.path.join(folder.path, name))
        except OSError as error:
            raise folder.failed(error) from error
        folder.publish(_manifest.to_bytes(manifest), set(files))

    def _publish_new(
        self, partial: Partial, manifest: _manifest.Manifest, files: Mapping[str, str]
    ) -> bool:
        """Whether there was still room for a folder of that name."""
        whole = os.path.join(partial.path, _WHOLE)
        with partial.told():
            if os.path.isdir(whole):
                shutil.rmtree(whole)
            os.mkdir(whole)
            try:
                with Folder(whole) as folder:
                    self._publish_into(folder, manifest, files)
            except CheckpointError as error:  # what the disk says is about the partial folder
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
                raise
            try:
                os.rename(whole, self.path)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    return False
                raise Folder(self.path).failed(error) from error
            sync_folder(os.path.dirname(os.path.abspath(self.path)))
        return True


def _link(path: str, place: str) -> None:
    """A second name for a file, or, on disks that have none (exFAT, some networks), a copy.

    The first name stays: should this run be killed now, the next one still finds it. A file that
    has the second name already may be a damaged one of an older checkpoint, and is replaced.
    """
    folder, name = os.path.split(place)
    beside = os.path.join(folder, f".{name}.tmp-{secrets.token_hex(6)}")
    try:
        os.link(path, beside)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with open(path, "rb") as source, open(beside, "xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    os.replace(beside, place)
    with contextlib.suppress(FileNotFoundError):  # two names of one file: nothing was renamed
        os.unlink(beside)
