"""Files that are whole or not there: written beside, flushed to the disk, then renamed."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Let `write(file)` make the file at `path`; whatever goes wrong, the old one stays whole.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / 'a'
    >>> write_atomically(path, lambda file: file.write(b'whole'))
    >>> path.read_bytes()
    b'whole'
    """
    target = Path(path)
    if target.is_symlink():
        target = target.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    number, beside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            write(file)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    _flush_directory(target.parent)


def move_into_place(written: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a finished file or folder its name, once all of it is on the disk.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / 'new').write_bytes(b'whole')
    >>> move_into_place(folder / 'new', folder / 'a')
    >>> [file.name for file in folder.iterdir()]
    ['a']
    """
    path = Path(written)
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    os.replace(path, target)
    _flush_directory(Path(target).absolute().parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush_directory(directory: Path) -> None:
    """A rename is on the disk when its directory is."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
