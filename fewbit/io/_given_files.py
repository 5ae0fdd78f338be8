"""Files of checkpoints, ours and other people's: what is wrong with them as one kind of error."""

from __future__ import annotations

import json
import os
from typing import Any

from fewbit._documents import MOST_DEPTH, too_deep
from fewbit._files import LARGE_BYTES, NoPlainFile, open_file, read_file
from fewbit.io.errors import CheckpointError, cut

_MSG_JSON = "is no JSON ({reason})"
_MSG_DEEP = f"nested more than {MOST_DEPTH} levels deep"
_MSG_OPEN = "cannot be opened ({reason})"


def open_checkpoint_file(path: str | os.PathLike[str], most: int | None = None) -> int:
    """The number of an opened file that has at most so many bytes."""
    try:
        return open_file(path, most)
    except (NoPlainFile, OSError, ValueError) as error:
        raise _told(path, error) from error


def checkpoint_bytes(path: str | os.PathLike[str], most: int = LARGE_BYTES) -> bytes:
    """All of a file that has at most so many bytes."""
    try:
        return read_file(path, most)
    except (NoPlainFile, OSError, ValueError) as error:
        raise _told(path, error) from error


def read_object(path: str | os.PathLike[str], most: int = LARGE_BYTES) -> dict[str, Any]:
    """The JSON object in a file, as leniently as Python reads it: NaN and all."""
    data = checkpoint_bytes(path, most)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = _MSG_DEEP if isinstance(error, RecursionError) else cut(str(error), 100)
        raise CheckpointError(path, _MSG_JSON.format(reason=reason)) from None
    if not isinstance(found, dict):
        raise CheckpointError(path, _MSG_JSON.format(reason="not an object"))
    if too_deep(found):
        raise CheckpointError(path, _MSG_JSON.format(reason=_MSG_DEEP))
    return found


def _told(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    if isinstance(error, NoPlainFile):
        return CheckpointError(path, error.what)
    reason = getattr(error, "strerror", None) or cut(str(error), 100)
    return CheckpointError(path, _MSG_OPEN.format(reason=reason))
