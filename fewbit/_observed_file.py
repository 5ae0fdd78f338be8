"""Statistics in a file: a zip of `.npy` arrays with a readable `manifest.json`; `numpy.load` reads
it too. Every array has its checksum in the manifest; nothing is ever unpickled.
"""

import hashlib
import io
import json
import os
import zipfile
from typing import Any, BinaryIO

import numpy as np

from fewbit._atomic import write_atomically
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
        with zipfile.ZipFile(path) as archive:
            manifest = _manifest(archive, name)
            return _read(archive, manifest, name)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK":
            raise ValueError(_MSG_FOREIGN.format(path=name, why="it is no zip archive")) from error
        raise ValueError(_MSG_DAMAGED.format(path=name, what=error or "it is cut off")) from error


def _manifest(archive: zipfile.ZipFile, path: str) -> dict[str, Any]:
    if _MANIFEST not in archive.namelist():
        raise ValueError(_MSG_FOREIGN.format(path=path, why=f"it has no {_MANIFEST}"))
    try:
        manifest = json.loads(archive.read(_MANIFEST))
    except ValueError as error:
        raise ValueError(_MSG_DAMAGED.format(path=path, what=f"{_MANIFEST}: {error}")) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ValueError(_MSG_FOREIGN.format(path=path, why=f"its format is {found!r}"))
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        facts = dict(found=version, own=__version__, version=VERSION)
        raise ValueError(_MSG_NEWER.format(path=path, writer=manifest.get("fewbit"), **facts))
    return manifest


def _read(archive: zipfile.ZipFile, manifest: dict[str, Any], path: str) -> Statistics:
    def get(place: Any, what: str) -> np.ndarray:
        member, wanted = place["array"], place["sha256"]
        data = archive.read(member)
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            text = _MSG_CHECKSUM.format(array=what, found=found[:16], wanted=str(wanted)[:16])
            raise ValueError(_MSG_DAMAGED.format(path=path, what=text))
        try:
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except ValueError as error:
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
        return Statistics(manifest["kind"], manifest["model"], int(manifest["batches"]), entries)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"its manifest is not complete ({type(error).__name__}: {error})"
        raise ValueError(_MSG_DAMAGED.format(path=path, what=what)) from error
