"""The one error that files raise: which file, which tensor, expected and found."""

from __future__ import annotations

import os
from typing import Any

_MSG_DIFFERS = "expected {expected}, found {found}"


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
        # A file may hold any name, of any length.
        where = self.path if tensor is None else f"{self.path}: tensor {_short(tensor)!r}"
        text = f"{where} {what}"
        if expected is not None:
            text += ": " + _MSG_DIFFERS.format(expected=expected, found=found)
        super().__init__(f"{text}. {fix}".rstrip() if fix else f"{text}.")


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:100]}...{name[-97:]}"


def cut(value: Any, length: int = 60) -> str:
    """A value out of a file, as a message may show it: short, and printable whatever it holds.

    >>> cut('a' * 100, 10)
    "'aaaaaa..."
    >>> cut(float('nan'))
    'nan'
    """
    text = ascii(value)
    return text if len(text) <= length else text[: length - 3] + "..."
