"""A checkpoint in the making, `<path>.partial`, and the folder that it becomes when it is whole.

What is done in the partial folder is not done again. The folder holds the shards as they grow and
a journal of one line per complete tensor. After a kill at any moment the journal tells a prefix of
the truth: what it lists is checked against its hash, everything behind that is cut off and made
again, so that the bytes come out the same.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from fewbit._util import LARGE_BYTES, NoPlainFile, open_file, read_file, sync_folder
from fewbit.io._errors import CheckpointError
from fewbit.io._safetensors import PIECE, hidden_beside, new_checksum, write_header
from fewbit.io.checkpoint import _manifest
from fewbit.io.checkpoint._folder import MSG_BUSY, MSG_FILE, Folder, lock_folder
from fewbit.io.checkpoint._tree import Leaf, Tensor

JOURNAL = "journal.jsonl"
WRITER = "writer.pid"
_WHOLE = "whole"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_MSG_OTHER = "holds an unfinished run of other inputs ({what})"
_FIX_OTHER = (
    "Run with the same inputs to finish it, or pass resume=False to drop it and start over."
)
_MSG_BUSY = "is being written by {who}"
_FIX_BUSY = "Wait until it has finished, or give another folder."
_FIX_NO_FILE = "Remove it; what is done so far is kept."
_MSG_CHANGED = "was changed while it was written"
_MSG_FAILED = "could not be written ({reason})"
_FIX_FAILED = "What is done so far is kept there, and the next run goes on from it."


class Partial:
    """The shards of a run, appended to in the order of their tensors.

    `identity` is everything the bytes depend on. A folder left by a run of another identity is an
    error; with `resume=False` what is left is dropped.
    """

    def __init__(
        self,
        target: str,
        path: str,
        groups: Sequence[Sequence[Tensor]],
        identity: Mapping[str, Any],
        resume: bool,
    ):
        self.path, self._target = path, target
        self._identity, self._resume = dict(identity), resume
        self._groups = groups
        self._home = {t.name: number for number, group in enumerate(groups) for t in group}
        self._headers: list[bytes] = []
        self._begins: dict[str, int] = {}
        self._ends: list[int] = []
        for group in groups:
            entries = [tensor.entry for tensor in group]
            header, infos = write_header(entries, {"format": _manifest.FORMAT})
            self._headers.append(header)
            self._begins |= {name: info.begin for name, info in infos.items()}
            self._ends.append(max((info.end for info in infos.values()), default=len(header)))
        self.checksums: dict[str, str] = {}
        self._files: dict[int, int] = {}
        self._journal = self._lock = -1
        self._open: tuple[str, Any, int] | None = None  # the tensor that is being written

    def __enter__(self) -> Partial:
        try:
            with self.told():
                self._take_lock()
                if not self._resume:
                    self._empty()
                known = self._read_journal()
                with self._anew(WRITER) as file:
                    file.write(str(os.getpid()))
                self.checksums = self._checked(known)
                self._rewrite_journal()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for number in (*self._files.values(), self._journal, self._lock):
            if number >= 0:
                os.close(number)

    def _take_lock(self) -> None:
        """It ends with the process. A folder that its owner removed meanwhile is made anew."""
        while self._lock < 0:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not lock_folder(lock):
                    raise busy(self._target, self.path)
                if os.path.samestat(os.fstat(lock), os.stat(self.path)):
                    self._lock = lock
            except FileNotFoundError:
                pass
            finally:
                if self._lock < 0:
                    os.close(lock)

    def _empty(self) -> None:
        for entry in list(os.scandir(self.path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def begin_at(self, leaves: Sequence[Leaf]) -> int:
        """The first leaf that is not complete; what is there of it and behind it is cut off."""
        done = 0
        while done < len(leaves) and all(t.name in self.checksums for t in leaves[done].tensors):
            done += 1
        names = [tensor.name for leaf in leaves[done:] for tensor in leaf.tensors]
        self.checksums = {n: c for n, c in self.checksums.items() if n not in set(names)}
        ends = dict(enumerate(self._ends))
        for name in reversed(names):
            ends[self._home[name]] = self._begins[name]
        with self.told():
            self._rewrite_journal()
            for number, end in ends.items():
                if os.fstat(self._file(number)).st_size > end:
                    os.ftruncate(self._own(number), end)
        return done

    def append(self, name: str, data: Any) -> None:
        """Some more bytes of a tensor; tensors come in the order of the file."""
        home = self._home[name]
        size = next(t for t in self._groups[home] if t.name == name).encoding.nbytes
        if self._open is None or self._open[0] != name:
            if self._open is not None or name in self.checksums:
                raise ValueError(f"{name} is written while another tensor is not complete.")
            self._open = (name, new_checksum(), 0)
        _, total, done = self._open
        view = memoryview(data).cast("B")
        if done + len(view) > size:
            raise ValueError(f"{name}: {done + len(view) - size} bytes more than its shape takes.")
        with self.told():
            file = self._own(home)
            place = self._begins[name] + done
            total.update(view)
            while view:
                written = os.pwrite(file, view[:PIECE], place)
                view, place = view[written:], place + written
        self._open = (name, total, place - self._begins[name])
        if self._open[2] == size:
            self.checksums[name] = total.hexdigest()
            self._open = None
            with self.told():
                line = json.dumps({"tensor": name, "checksum": self.checksums[name]}) + "\n"
                left = line.encode()
                while left:
                    left = left[os.write(self._journal, left) :]

    def shards(self) -> Iterator[tuple[str, int]]:
        """The finished shards, on disk: path and number."""
        with self.told():
            for number in range(len(self._groups)):
                file, place = self._file(number), self._shard(number)
                size = os.fstat(file).st_size
                if size != self._ends[number]:
                    wanted = f"{self._ends[number]} bytes"
                    raise CheckpointError(place, _MSG_CHANGED, expected=wanted, found=size)
                os.fsync(file)
                yield place, number
            sync_folder(self.path)

    def remove(self) -> None:
        """Drop the folder, after what was made in it has its place."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path)

    def _shard(self, number: int) -> str:
        return os.path.join(self.path, f"shard-{number + 1:05}")

    def _file(self, number: int) -> int:
        if number not in self._files:
            place, flags = self._shard(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            try:
                os.close(open_file(place))
            except FileNotFoundError:
                pass
            except NoPlainFile as error:
                raise CheckpointError(place, error.what, fix=_FIX_NO_FILE) from None
            self._files[number] = os.open(place, flags | os.O_NOFOLLOW, 0o666)
            header = self._headers[number]
            if os.pread(self._files[number], len(header), 0) != header:
                os.pwrite(self._own(number), header, 0)
        return self._files[number]

    def _own(self, number: int) -> int:
        """The shard to write to. One that a checkpoint holds under its own name is copied first."""
        file = self._file(number)
        if os.fstat(file).st_nlink > 1:
            place = self._shard(number)
            shutil.copyfile(place, place + ".new")
            os.replace(place + ".new", place)
            os.close(self._files.pop(number))
            file = self._file(number)
        return file

    def _read_journal(self) -> dict[str, str]:
        """Tensors that an earlier run of the same inputs completed; a torn last line is none."""
        try:
            lines = read_file(os.path.join(self.path, JOURNAL), LARGE_BYTES).decode().split("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return {}
        except NoPlainFile as error:
            raise CheckpointError(error.path, error.what, fix=_FIX_NO_FILE) from None
        found: dict[str, str] = {}
        for number, line in enumerate(lines[:-1]):
            try:
                entry = json.loads(line)
                if number == 0:
                    self._compare(entry["identity"])
                else:
                    found[str(entry["tensor"])] = str(entry["checksum"])
            except CheckpointError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                break  # the disk lost what came after a power cut: the truth ends here
        return found

    def _compare(self, other: Mapping[str, Any]) -> None:
        mine = json.loads(json.dumps(self._identity))
        differ = [key for key in mine if mine[key] != other.get(key)]
        differ += [key for key in other if key not in mine]
        if differ:
            what = f"another {' and '.join(differ)}"
            raise CheckpointError(self.path, _MSG_OTHER.format(what=what), fix=_FIX_OTHER)

    def _checked(self, known: Mapping[str, str]) -> dict[str, str]:
        """Of the known tensors, in order, those whose bytes are really there."""
        result: dict[str, str] = {}
        for group in self._groups:
            for tensor in group:
                if tensor.name not in known or self._hash(tensor) != known[tensor.name]:
                    return result
                result[tensor.name] = known[tensor.name]
        return result

    def _hash(self, tensor: Tensor) -> str:
        file, total = self._file(self._home[tensor.name]), new_checksum()
        begin = self._begins[tensor.name]
        end = begin + tensor.encoding.nbytes
        for place in range(begin, end, PIECE):
            total.update(os.pread(file, min(PIECE, end - place), place))
        return str(total.hexdigest())

    def _rewrite_journal(self) -> None:
        if self._journal >= 0:
            os.close(self._journal)
        place = os.path.join(self.path, JOURNAL)
        entries: list[Any] = [{"identity": self._identity}]
        entries += [{"tensor": n, "checksum": c} for n, c in self.checksums.items()]
        with self._anew(JOURNAL + ".new") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
            file.flush()
            os.fsync(file.fileno())
        os.replace(place + ".new", place)
        self._journal = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _anew(self, name: str) -> TextIO:
        """A file of our own, whatever has its name."""
        place = os.path.join(self.path, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        return open(place, "x", encoding="utf-8")

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Errors of the disk as errors about this folder."""
        try:
            yield
        except OSError as error:
            what = _MSG_FAILED.format(reason=error.strerror or str(error))
            raise CheckpointError(self.path, what, fix=_FIX_FAILED) from error


def busy(target: str, partial: str) -> CheckpointError:
    """What to tell a second writer."""
    return CheckpointError(target, _MSG_BUSY.format(who=writer_of(partial)), fix=_FIX_BUSY)


def writer_of(path: str) -> str:
    """Words about the process that writes to a partial folder, for whoever finds it busy.

    >>> writer_of('/nowhere')
    'another process'
    """
    try:
        return f"process {int(read_file(os.path.join(path, WRITER), 100))}"
    except (OSError, ValueError):
        return "another process"


# --- The folder of the result: not there before it is whole ---------------------------------------


class Destination:
    """The result's folder; one that exists is held for the whole run: nobody else writes to it."""

    def __init__(self, path: str, partial: str):
        self.path, self._partial = path, partial
        self._folder: Folder | None = None

    def __enter__(self) -> Destination:
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise CheckpointError(self.path, MSG_FILE)
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
            if MSG_BUSY not in str(error):
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
    beside = hidden_beside(place)
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
