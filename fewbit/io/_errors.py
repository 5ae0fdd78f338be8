"""What is wrong with a checkpoint's files, ours and other people's, as one kind of error.

It says which file, which tensor, what was expected and what was found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from fewbit._util import LARGE_BYTES, MOST_DEPTH, NoPlainFile, open_file, read_file, too_deep

_MSG_JSON = "is no JSON ({reason})"
_MSG_DEEP = f"nested more than {MOST_DEPTH} levels deep"
_MSG_OPEN = "cannot be opened ({reason})"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; `path` and `tensor` say where.

    >>> print(CheckpointError('a.safetensors', 'is too short', expected='8 bytes', found='3'))
    a.safetensors is too short: expected 8 bytes, found 3.
    >>> print(CheckpointError('a.safetensors', 'has no shape', tensor='up/kernel'))
    a.safetensors: tensor 'up/kernel' has no shape.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: str,
        *,
        tensor: str | None = None,
        expected: Any = None,
        found: Any = None,
        fix: str = "",
    ):
        self.path, self.tensor = os.fspath(path), tensor
        self.expected, self.found = expected, found
        text = f"{self.path} {what}"
        if tensor is not None:  # a file may hold any name, of any length
            name = tensor if len(tensor) <= 200 else f"{tensor[:100]}...{tensor[-97:]}"
            text = f"{self.path}: tensor {name!r} {what}"
        if expected is not None:
            text += f": expected {expected}, found {found}"
        super().__init__(f"{text}. {fix}".rstrip() if fix else f"{text}.")


def cut(value: Any, length: int = 60) -> str:
    """A value out of a file, as a message may show it: short, and printable whatever it holds.

    >>> cut('a' * 100, 10)
    "'aaaaaa..."
    >>> cut(float('nan'))
    'nan'
    """
    text = ascii(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def first_few(items: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of many, as a message may show them.

    >>> first_few(['a', 'b', 'c'], 2), first_few(['a', 'b'], 2)
    ('a, b, ...', 'a, b')
    """
    return between.join([*items[:most], "..."] if len(items) > most else items)


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


def _told(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    if isinstance(error, NoPlainFile):
        return CheckpointError(path, error.what)
    reason = getattr(error, "strerror", None) or cut(str(error), 100)
    return CheckpointError(path, _MSG_OPEN.format(reason=reason))


def read_object(path: str | os.PathLike[str], most: int = LARGE_BYTES) -> dict[str, Any]:
    """The JSON object in a file, as leniently as Python reads it: NaN and all."""
    data = checkpoint_bytes(path, most)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = _MSG_DEEP if isinstance(error, RecursionError) else cut(str(error), 100)
        raise CheckpointError(path, _MSG_JSON.format(reason=reason)) from None
    if not isinstance(found, dict) or too_deep(found):
        reason = _MSG_DEEP if isinstance(found, dict) else "not an object"
        raise CheckpointError(path, _MSG_JSON.format(reason=reason))
    return found
