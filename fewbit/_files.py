"""Files that somebody else named: opened if they are files, read as far as is sensible.

A pipe would wait for ever and a device never ends, so a path is looked at before it is opened, and
again after that. At most the size that a file had then is read.
"""

from __future__ import annotations

import os
import stat

SMALL_BYTES = 16 * 2**20  # a file that people write: rules, a config
LARGE_BYTES = 256 * 2**20  # one that programs write: an index, a manifest

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
_MSG_KIND = "is not a file, but {kind}"
_MSG_LARGE = "is larger than such a file can be: {size:,} bytes, and at most {most:,} are read"


class NoPlainFile(ValueError):
    """A path whose bytes are not read; `what` says why, as the end of a sentence about it."""

    def __init__(self, path: str | os.PathLike[str], what: str):
        self.path, self.what = os.fspath(path), what
        super().__init__(f"{self.path} {what}.")


def open_file(path: str | os.PathLike[str], most: int | None = None) -> int:
    """The number of the opened file, if it is one and has at most so many bytes.

    >>> open_file('/dev/zero')
    Traceback (most recent call last):
    ...
    fewbit._files.NoPlainFile: /dev/zero is not a file, but a device.
    """
    _check(path, os.stat(path), most)  # opening a device can do things already
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(number), most)
    except BaseException:
        os.close(number)
        raise
    return number


def read_file(path: str | os.PathLike[str], most: int = SMALL_BYTES) -> bytes:
    """The bytes of a file that has at most so many."""
    number = open_file(path, most)
    with open(number, "rb", buffering=0) as file:
        left, pieces = os.fstat(number).st_size, []
        while left and (piece := file.read(left)):
            pieces.append(piece)
            left -= len(piece)
    return b"".join(pieces)


def _check(path: str | os.PathLike[str], info: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise NoPlainFile(path, _MSG_KIND.format(kind=kind))
    if most is not None and info.st_size > most:
        raise NoPlainFile(path, _MSG_LARGE.format(size=info.st_size, most=most))
