"""Files looked at before they are read: what they are, and how much they would become in memory.

Keras writes archives and arrays uncompressed. A file that would become much more than it is was
made by somebody else, and may be there to fill the memory or the disk.
"""

import io
import os
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras

from fewbit._util import tidy
from fewbit.keras.saving._whole import is_local

_SPARE, _MOST_TIMES = 64 * 2**20, 4  # of what is stored, an archive packed again may become
_MOST_JSON = 64 * 2**20
_MOST_MEMBERS = 10_000
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

_MSG_KIND = "{path} is {kind}, not a file."
_MSG_MISSING = "{path} does not exist."
_MSG_NO_ZIP = (
    "{path} is no archive of Keras, or it was cut: copy it again from where it came from, or save "
    "the model again."
)
_MSG_BOMB = (
    "{path}: {name} would become {claimed:,} bytes out of {stored:,}, and Keras compresses "
    "nothing. If you trust it, unpack it and pack it again without compression (zip -0)."
)
_MSG_JSON = "{path}: {name} has {size:,} bytes, more than any model's configuration."
_MSG_MEMBERS = "{path} has {count:,} members, more than any saved model."
_MSG_LACKS = "{path} lacks {name}: it holds no model."
_MSG_NO_H5 = "{path} is no weights file of Keras, or it was cut ({reason})."
_MSG_NOT_LOADED = "{path} could not be loaded. {why}"


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """`keras.saving.load_model` after `check_saved`; what goes wrong is told with the file's name.

    >>> load_model('nowhere.keras')
    Traceback (most recent call last):
    ...
    ValueError: nowhere.keras does not exist.
    """
    if is_local(filepath):
        tidy(Path(filepath).absolute().parent)
        check_saved(filepath)
    try:
        return keras.saving.load_model(filepath, custom_objects, compile, safe_mode)
    except (ValueError, TypeError, KeyError, OSError, RecursionError, zipfile.BadZipFile) as error:
        raise ValueError(_MSG_NOT_LOADED.format(path=filepath, why=error)) from error


def check_saved(path: str | os.PathLike[str]) -> None:
    """Look at a `.keras` file, a `.weights.h5` file, or the folder of a preset or unzipped model.

    Raises ValueError for what is no regular file (a pipe would be waited for), what was cut, and
    what would become much more in memory than it is on the disk. It reads no values and runs
    nothing, so it is quick for files of any size.
    """
    place = Path(path)
    if not place.is_dir():
        _check_regular(place)
        _check_archive(place) if place.suffix == ".keras" else check_weights(place)
        return
    if not (place / "config.json").exists():
        raise ValueError(_MSG_LACKS.format(path=place, name="config.json"))
    for file in place.iterdir():
        if not file.is_dir():
            _check_regular(file)
        if file.suffix == ".json":
            _check_json(file, file.name, file.stat().st_size)
        elif file.name.endswith(".weights.h5"):
            check_weights(file)


def check_weights(path: Any) -> None:
    """Look at a file of weights; other files, and those that are not here, are left to Keras."""
    if not is_local(path) or not str(path).endswith((".h5", ".hdf5")):
        return
    place = Path(path)
    _check_regular(place)
    _check_h5(place, place, place.stat().st_size)


def _check_h5(file: Any, path: Path, size: int) -> None:
    try:
        with h5py.File(file, "r") as opened:
            _check_arrays(opened, path, size)
    except (OSError, RuntimeError, KeyError) as error:
        reason = str(error).partition("(")[2].rstrip(")") or str(error)
        raise OSError(_MSG_NO_H5.format(path=path, reason=reason)) from error


def _check_arrays(file: h5py.File, path: Path, size: int) -> None:
    """That the arrays are not larger than what a file of this size holds of them."""
    total = 0

    def check(name: str, item: Any) -> None:
        nonlocal total
        if isinstance(item, h5py.Dataset):
            total += item.nbytes
            stored = item.id.get_storage_size()
            if item.nbytes > _SPARE + _MOST_TIMES * stored or total > _SPARE + _MOST_TIMES * size:
                text = _MSG_BOMB.format(path=path, name=name, claimed=item.nbytes, stored=stored)
                raise ValueError(text)

    file.visititems(check)  # each object once, and no links


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(archive.infolist(), path)
            for member in archive.infolist():
                if member.filename.endswith(".h5"):
                    with _opened(archive, member, path) as file:
                        _check_h5(file, path, member.file_size)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error) as error:
        raise ValueError(_MSG_NO_ZIP.format(path=path)) from error


def _check_members(members: list[zipfile.ZipInfo], path: Path) -> None:
    if len(members) > _MOST_MEMBERS:
        raise ValueError(_MSG_MEMBERS.format(path=path, count=len(members)))
    if "config.json" not in {member.filename for member in members}:
        raise ValueError(_MSG_LACKS.format(path=path, name="config.json"))
    size, total = path.stat().st_size, 0
    for member in members:
        total += member.file_size
        stored = min(member.compress_size, size)
        if member.file_size > _SPARE + _MOST_TIMES * stored or total > _SPARE + _MOST_TIMES * size:
            text = dict(name=member.filename, claimed=member.file_size, stored=stored)
            raise ValueError(_MSG_BOMB.format(path=path, **text))
        if member.filename.endswith(".json"):
            _check_json(path, member.filename, member.file_size)


def _opened(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Any:
    """A member to jump about in: zipfile reads all that lies before the place it goes to."""
    if member.compress_type != zipfile.ZIP_STORED:
        return archive.open(member)
    file = open(path, "rb")
    file.seek(member.header_offset + 26)
    lengths = struct.unpack("<HH", file.read(4))
    return _Part(file, member.header_offset + 30 + sum(lengths), member.file_size)


class _Part(io.RawIOBase):
    """Some bytes of a file as a file of their own."""

    def __init__(self, file: Any, begin: int, size: int):
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        room = memoryview(buffer)[: max(0, self._size - self._at)]
        count = int(self._file.readinto(room))
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _check_json(path: Path, name: str, size: int) -> None:
    if size > _MOST_JSON:
        raise ValueError(_MSG_JSON.format(path=path, name=name, size=size))


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ValueError(_MSG_MISSING.format(path=path)) from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(_MSG_KIND.format(path=path, kind=kind))
