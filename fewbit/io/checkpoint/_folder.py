"""A checkpoint's folder: one writer at a time, and never a moment without a whole checkpoint.

Shards get names of their own and lie beside those of the old checkpoint; the manifest names the
shards that count and is renamed over the old one last. Whatever the manifest does not name is left
over from a writer that died, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Any

from fewbit._util import NoPlainFile, sync_folder
from fewbit.io._errors import CheckpointError, checkpoint_bytes, first_few
from fewbit.io._safetensors import hidden_beside
from fewbit.io.checkpoint import _manifest

_TEMPORARY = ".tmp-"

MSG_FILE = "is a file. A checkpoint is a folder: give another path, or move the file away"
_MSG_FOREIGN = (
    "holds other files ({names}) and no fewbit checkpoint. Give a folder of its own, or an empty "
    "one"
)
MSG_BUSY = (
    "is being written by another process. Wait until it has finished, or save to another path"
)
_MSG_FAILED = "could not be written ({reason}). {kept}"
_KEPT_OLD = "The checkpoint that was there is whole"
_KEPT_NONE = "Nothing was left behind"
_MSG_MISSING = "does not exist. fewbit.save(path, params, plan) makes a checkpoint"
_MSG_NO_MANIFEST = "is no checkpoint of fewbit: it has no {file}. {fix}"
_FIX_SAFETENSORS = (
    "It holds safetensors files of another program: fewbit.quantize_checkpoint(src, dst, plan) "
    "reads those"
)
_FIX_INTERRUPTED = "A save into it was interrupted before anything was complete; save again"
_FIX_ORBAX = "It looks like an Orbax checkpoint: orbax.checkpoint reads it as a pytree"
_FIX_NOTHING = "fewbit.save(path, params, plan) makes one"
_MSG_SINGLE = "is a file, and a checkpoint of fewbit is a folder. {fix}"


def read_manifest(path: str) -> _manifest.Manifest:
    """The manifest of the checkpoint at a path, or an error that says what is there instead."""
    return _manifest.from_bytes(os.path.join(path, _manifest.FILE), manifest_bytes(path))


def manifest_bytes(path: str) -> bytes:
    """The manifest's bytes."""
    file = os.path.join(path, _manifest.FILE)
    try:
        return checkpoint_bytes(file, _manifest.MOST_BYTES)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise CheckpointError(path, _what_else(path)) from None
        if isinstance(error.__cause__, NoPlainFile):
            raise CheckpointError(file, f"is no manifest: it {error.__cause__.what}") from None
        raise


def _what_else(path: str) -> str:
    if not os.path.lexists(path):
        return _MSG_MISSING
    if not os.path.isdir(path):
        fix = _FIX_SAFETENSORS if path.endswith(".safetensors") else _FIX_NOTHING
        return _MSG_SINGLE.format(fix=fix)
    names = os.listdir(path)
    fix = _FIX_NOTHING
    if any(n.endswith(".safetensors") and not _manifest.is_shard(n) for n in names):
        fix = _FIX_SAFETENSORS
    elif any(map(is_ours, names)):
        fix = _FIX_INTERRUPTED
    elif {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"} & set(names):
        fix = _FIX_ORBAX
    return _MSG_NO_MANIFEST.format(file=_manifest.FILE, fix=fix)


def is_ours(name: str) -> bool:
    """Whether a file of this name is one that a save makes: a shard, or a temporary one.

    >>> is_ours('tokenizer.json'), is_ours('.fewbit.json.tmp-0123456789ab')
    (False, True)
    """
    known = name.startswith((".fewbit.json", ".weights-")) and _TEMPORARY in name
    return known or _manifest.is_shard(name)


def lock_folder(number: int) -> bool:
    """Whether an opened folder is ours alone. The lock ends with the process, however it ends.

    Some network disks have none; there it is always ours.
    """
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return True


class Folder:
    """The folder of a checkpoint while it is written: `with Folder(path) as folder`.

    Leaving it with an error removes what this writer made; the old checkpoint stays as it was.
    """

    def __init__(self, path: str):
        self.path = path
        self._lock = -1
        self._made_folder = False

    def __enter__(self) -> Folder:
        try:
            self._enter()
        except OSError as error:
            raise self.failed(error) from error
        return self

    def _enter(self) -> None:
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise CheckpointError(self.path, MSG_FILE)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path)
            self._made_folder = True
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not lock_folder(self._lock):
                raise CheckpointError(self.path, MSG_BUSY)
            others = [n for n in sorted(os.listdir(self.path)) if not is_ours(n)]
            if others and _manifest.FILE not in others:
                raise CheckpointError(self.path, _MSG_FOREIGN.format(names=first_few(others, 3)))
            self.clean(self._named())
        except BaseException:
            os.close(self._lock)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is not None:
                with contextlib.suppress(OSError):
                    self.clean(self._named())
                    if self._made_folder:
                        os.rmdir(self.path)
        finally:
            os.close(self._lock)

    def publish(self, data: bytes, shards: set[str]) -> None:
        """Make these shards, complete and on disk, the checkpoint; then remove the old ones."""
        file = os.path.join(self.path, _manifest.FILE)
        temporary = hidden_beside(file)
        try:
            sync_folder(self.path)
            with open(temporary, "xb") as opened:
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(temporary, file)
            sync_folder(self.path)
            if self._made_folder:
                sync_folder(os.path.dirname(os.path.abspath(self.path)))
        except OSError as error:
            raise self.failed(error) from error
        with contextlib.suppress(OSError):  # the next writer will
            self.clean(shards)

    def clean(self, named: set[str] | None) -> None:
        """Remove files of ours that no manifest names; None: only temporary ones are known dead."""
        for name in os.listdir(self.path):
            dead = _TEMPORARY in name if named is None else name not in named
            if is_ours(name) and dead:
                os.unlink(os.path.join(self.path, name))

    def failed(self, error: OSError) -> CheckpointError:
        """What to tell the user about an error of the disk."""
        kept = _KEPT_OLD if os.path.exists(os.path.join(self.path, _manifest.FILE)) else _KEPT_NONE
        reason = error.strerror or str(error)
        parent = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(parent):
            reason += f": there is no folder {parent}; make it first"
        return CheckpointError(self.path, _MSG_FAILED.format(reason=reason, kept=kept))

    def _named(self) -> set[str] | None:
        """The shards of the checkpoint that is there; None if its manifest cannot tell."""
        if not os.path.lexists(os.path.join(self.path, _manifest.FILE)):
            return set()
        try:
            return {name for name, _ in read_manifest(self.path).shards}
        except CheckpointError:
            return None


@contextlib.contextmanager
def telling(folder: Folder) -> Iterator[None]:
    """Errors of the disk as errors about the checkpoint."""
    try:
        yield
    except OSError as error:
        raise folder.failed(error) from error
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # a shard that could not be written
            raise folder.failed(error.__cause__) from error.__cause__
        raise
