"""Files and folders that are whole or not there: made beside, brought to the disk, then renamed.

What is being made is `.<name>.<letters>.fewbit.tmp` beside its target, locked by the process that
makes it. The lock ends with the process, however that ends: the next one that writes into the same
folder knows what a dead one left, and removes it.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_SUFFIX = ".fewbit.tmp"
_OLD, _NAME = "old", "name"  # what `_moved_in_steps` leaves for `tidy` if it is killed in between
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], Any]) -> None:
    """Let `write(file)` make the file at `path`; whatever goes wrong, the old one stays whole.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / 'a'
    >>> write_atomically(path, lambda file: file.write(b'whole'))
    >>> path.read_bytes()
    b'whole'
    """
    target = followed(path)
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    tidy(target.parent)
    made, number = _locked(target, folder=False)
    with os.fdopen(number, "wb") as file:  # closed last: the lock is what keeps it from `tidy`
        try:
            write(file)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.replace(made, target)
        except BaseException:
            Path(made).unlink(missing_ok=True)
            raise
    sync_folder(target.parent)


@contextlib.contextmanager
def beside(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder on the target's disk to make something in; it is gone afterwards.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with beside(folder / 'a') as place:
    ...     _ = (place / 'new').write_bytes(b'whole')
    ...     move_into_place(place / 'new', folder / 'a')
    >>> [file.name for file in folder.iterdir()]
    ['a']
    """
    path = followed(target)
    tidy(path.parent)
    place, number = _locked(path, folder=True)
    try:
        yield Path(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(number)


def move_into_place(written: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a finished file or folder its name, once all of it is on the disk.

    A folder takes the place of an old one in a single step, and the old one is removed.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ('new', 'a'):
    ...     (folder / name).mkdir()
    >>> move_into_place(folder / 'new', folder / 'a')
    >>> [file.name for file in folder.iterdir()]
    ['a']
    """
    path, place = Path(written), followed(target)
    _sync_all(path)
    if not (path.is_dir() and place.is_dir()):
        os.replace(path, place)
    elif exchanged(path, place):
        sync_folder(place.parent)
        shutil.rmtree(path, ignore_errors=True)  # the old one; in a `beside` it goes anyway
    else:
        _moved_in_steps(path, place)
    sync_folder(place.parent)


def exchanged(one: Path, other: Path) -> bool:
    """Whether two paths now have each other's content; no kill can divide it. Not all disks can."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _moved_in_steps(path: Path, place: Path) -> None:
    """Between its two steps there is nothing at `place`: if killed there, `tidy` puts it back."""
    with beside(place) as aside:
        (aside / _NAME).write_text(place.name, encoding="utf-8")
        _sync_all(aside)
        sync_folder(place.parent)
        os.rename(place, aside / _OLD)
        try:
            os.rename(path, place)
        except BaseException:
            os.rename(aside / _OLD, place)
            raise
        sync_folder(place.parent)


def tidy(folder: str | os.PathLike[str]) -> None:
    """Remove what processes that died while writing into the folder left; put back what they moved.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> (folder / '.a.0123abcd.fewbit.tmp').mkdir()
    >>> tidy(folder)
    >>> list(folder.iterdir())
    []
    """
    with contextlib.suppress(OSError):  # a folder that cannot be listed is written to all the same
        for name in os.listdir(folder):
            if name.startswith(".") and name.endswith(_SUFFIX):
                _remove_dead(Path(folder) / name)


def _remove_dead(path: Path) -> None:
    with contextlib.suppress(OSError):  # of somebody else, or gone: not ours to complain about
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _put_back(path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            os.close(number)


def _put_back(path: Path) -> None:
    if (path / _OLD).exists() and (path / _NAME).exists():
        place = path.parent / (path / _NAME).read_text(encoding="utf-8")
        if place.parent == path.parent and not os.path.lexists(place):
            os.rename(path / _OLD, place)


def _locked(target: Path, folder: bool) -> tuple[str, int]:
    """What was made beside it, and a descriptor with its lock; again if `tidy` came in between."""
    names: Any = {"prefix": f".{target.name[:40]}.", "suffix": _SUFFIX, "dir": target.parent}
    while True:
        if folder:
            made = tempfile.mkdtemp(**names)
            number = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        else:
            number, made = tempfile.mkstemp(**names)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # then nobody can find it dead either
                os.close(number)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(made), os.fstat(number)):
                return made, number
        os.close(number)


def followed(path: str | os.PathLike[str]) -> Path:
    """The path without links and dots: what a link points to is replaced, not the link."""
    return Path(path).resolve()


@functools.cache
def _renameat2() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_all(path: Path) -> None:
    """Bring a file, or a folder with all that is in it, to the disk."""
    folders = list(os.walk(path, topdown=False))
    files = [Path(folder, name) for folder, _, names in folders for name in names]
    for file in files if folders else [path]:
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    for folder, _, _ in folders:
        sync_folder(folder)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder ('' is the current one) last through a power cut."""
    number = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # not all disks sync folders
            raise
    finally:
        os.close(number)
