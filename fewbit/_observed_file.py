"""Statistics in a file: a zip of `.npy` arrays with a readable `manifest.json`; `numpy.load` reads
it too. Every array has its checksum in the manifest; nothing is ever unpickled.
"""

import hashlib
import io
import json
import math
import os
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

from fewbit._atomic import write_atomically
from fewbit._documents import load_json
from fewbit._files import NoPlainFile, open_file
from fewbit._version import __version__
from fewbit.observed import Entry, Statistics

FORMAT, VERSION = "fewbit statistics", 1
_MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # same statistics, same bytes

_MSG_FOREIGN = (
    "{path} is no file of fewbit statistics: {why}. stats.save(path) writes one, and "
    "fewbit.Statistics.load(path) reads it."
)
_MSG_NEWER = (
    "{path} is in format {found} of fewbit statistics, and this fewbit ({own}) reads up to "
    "{version}. Use a newer fewbit (it was written by {writer}), or calibrate again."
)
_MSG_FAILED = (
    "The statistics cannot be written to {path}: {reason}. What was there before is whole."
)
_MSG_DAMAGED = "{path} is damaged: {what}. Take another copy of the file, or calibrate again."
_MSG_COMPRESSED = "{member} is compressed, which stats.save never does"
_MSG_MORE = "its manifest names more arrays than there is room for in the file"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OverflowError),
    *(struct.error, zlib.error, UnicodeDecodeError, OSError),
)
_MSG_CHECKSUM = "the checksum of {array} is {found}, expected {wanted}"


def save(stats: Statistics, path: str | os.PathLike[str]) -> None:
    """Write `stats` to `path`, whole or not at all."""
    arrays: dict[str, bytes] = {}
    rows = []

    def put(value: Any) -> dict[str, str]:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asarray(value), allow_pickle=False)
        data = stream.getvalue()
        member = f"arrays/{len(arrays)}.npy"
        arrays[member] = data
        return {"array": member, "sha256": hashlib.sha256(data).hexdigest()}

    for name, entry in stats.entries.items():
        states = {
            observer: {key: put(value) for key, value in state.items()}
            for observer, state in entry.states.items()
        }
        row = {"name": name, "site": entry.site, "side": entry.side, "count": put(entry.count)}
        rows.append({**row, "method": entry.method, "states": states})
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "fewbit": __version__,
        "kind": stats.kind,
        "model": stats.model,
        "batches": stats.batches,
        "operands": rows,
    }

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            text = json.dumps(manifest, indent=1).encode()
            for member, data in {_MANIFEST: text, **arrays}.items():
                archive.writestr(zipfile.ZipInfo(member, _EPOCH), data)

    try:
        write_atomically(path, write)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, _MSG_FAILED.format(path=path, reason=reason)) from error


def load(path: str | os.PathLike[str]) -> Statistics:
    """Read what `save` wrote; anything else is a ValueError that says what it is."""
    name = os.fspath(path)
    try:
        number = open_file(path)
    except NoPlainFile as error:
        raise ValueError(_MSG_FOREIGN.format(path=name, why=f"it {error.what}")) from None
    with open(number, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = _Members(archive, name, os.fstat(number).st_size)
                return _read(members, _manifest(members, name), name)
        except _ZIP_ERRORS as error:
            file.seek(0)
            if file.read(2) != b"PK":
                why = "it is no zip archive"
                raise ValueError(_MSG_FOREIGN.format(path=name, why=why)) from error
            what = error or "it is cut off"
            raise ValueError(_MSG_DAMAGED.format(path=name, what=what)) from error


class _Members:
    """The members of an archive, each as long as it is in the file and all no longer than it.

    `save` compresses nothing; an archive of a few bytes that unpacks to all of the memory is none
    of its own.
    """

    def __init__(self, archive: zipfile.ZipFile, path: str, left: int):
        self.archive, self._path, self._left = archive, path, left

    def __contains__(self, name: str) -> bool:
        return name in self.archive.namelist()

    def read(self, name: str) -> bytes:
        info = self.archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            what = _MSG_COMPRESSED.format(member=name)
            raise ValueError(_MSG_DAMAGED.format(path=self._path, what=what))
        self._left -= info.file_size
        if self._left < 0:
            raise ValueError(_MSG_DAMAGED.format(path=self._path, what=_MSG_MORE))
        return self.archive.read(info)


def _array(data: bytes) -> np.ndarray:
    """An array out of a member; its header is believed if as many bytes follow as it says."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the npy format")
    shape, _, dtype = _HEADERS[version](stream)
    follow = len(data) - stream.tell()
    if not dtype.hasobject and (not dtype.itemsize or math.prod(shape) * dtype.itemsize != follow):
        raise ValueError(f"{shape} of {dtype} in {follow} bytes")
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _manifest(archive: _Members, path: str) -> dict[str, Any]:
    if _MANIFEST not in archive:
        raise ValueError(_MSG_FOREIGN.format(path=path, why=f"it has no {_MANIFEST}"))
    manifest = load_json(archive.read(_MANIFEST), f"{path} is damaged: {_MANIFEST}")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ValueError(_MSG_FOREIGN.format(path=path, why=f"its format is {found!r}"))
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        facts = dict(found=version, own=__version__, version=VERSION)
        raise ValueError(_MSG_NEWER.format(path=path, writer=manifest.get("fewbit"), **facts))
    return manifest


def _read(archive: _Members, manifest: dict[str, Any], path: str) -> Statistics:
    def get(place: Any, what: str) -> np.ndarray:
        member, wanted = place["array"], place["sha256"]
        data = archive.read(member)
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            text = _MSG_CHECKSUM.format(array=what, found=found[:16], wanted=str(wanted)[:16])
            raise ValueError(_MSG_DAMAGED.format(path=path, what=text))
        try:
            return _array(data)
        except (ValueError, TypeError, ArithmeticError) as error:
            text = f"{what} is no plain array ({error})"
            raise ValueError(_MSG_DAMAGED.format(path=path, what=text)) from error

    try:
        entries = {}
        for row in manifest["operands"]:
            name = row["name"]
            states = {
                observer: {key: get(at, f"{name} {key}") for key, at in state.items()}
                for observer, state in row["states"].items()
            }
            count = get(row["count"], f"{name} count")
            method = row.get("method")  # older files do not say
            if method is not None and not isinstance(method, str):
                raise TypeError(f"the method of {name} is {method!r}")
            entries[name] = Entry(row["site"], row["side"], count, states, method)
        batches = manifest["batches"]
        if type(batches) is not int or not 0 <= batches < 2**63:
            raise TypeError(f"{batches!r:.40} batches")
        return Statistics(manifest["kind"], manifest["model"], batches, entries)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"its manifest is not complete ({type(error).__name__}: {error})"
        raise ValueError(_MSG_DAMAGED.format(path=path, what=what)) from error
