"""What every saved piece of a quantized Keras model carries: format, versions, a checksum.

A `record` is a dict of plain JSON values. `sealed` adds the three; `opened` checks them, so that a
newer, changed or half-written record is an error that names the layer, before anything is built.
"""

import functools
import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Mapping
from typing import Any

from fewbit._version import __version__

FORMAT = 1
_PACKAGES = {"keras": "keras", "keras_hub": "keras-hub"}

_MSG_NEWER = (
    "{where} was saved by a newer fewbit (format {found}); fewbit {version} reads up to format "
    "{format}. Upgrade: pip install --upgrade fewbit."
)
_MSG_DAMAGED = (
    "{where}: {what} was changed or cut after it was saved ({detail}). Save the model again, or "
    "copy the file again from where it came from."
)
_MSG_VERSIONS = (
    "This model was saved with {saved} and is loaded with {here}. It was read in full, but results "
    "may differ where a layer's own code changed; install the saved versions for equal ones."
)


def checksum(data: Any) -> str:
    """The hash of an array's or a text's bytes.

    >>> checksum(b'abc')
    'cf4ab791c62b8d2b2109c90275287816'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """The versions that write a file."""
    found = {"fewbit": __version__}
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with format, versions and checksum.

    >>> sorted(sealed({'kind': 'dynamic'}))
    ['checksum', 'format', 'kind', 'versions']
    """
    whole = {**record, "format": FORMAT, "versions": dict(versions())}
    return {**whole, "checksum": _digest(whole)}


def opened(record: Any, where: str, what: str = "its fewbit record") -> dict[str, Any]:
    """The fields of a sealed record, after every check.

    >>> opened(sealed({'kind': 'dynamic'}), 'dense')['kind']
    'dynamic'
    """
    if not isinstance(record, Mapping) or "format" not in record:
        raise damaged(where, what, "it is no record")
    number = record["format"]
    if type(number) is int and number > FORMAT:
        raise ValueError(
            _MSG_NEWER.format(where=where, found=number, version=__version__, format=FORMAT)
        )
    fields = {key: value for key, value in record.items() if key != "checksum"}
    if number != FORMAT or record.get("checksum") != _digest(fields):
        raise damaged(where, what, "checksum")
    warn_of_versions(fields["versions"])
    return fields


def damaged(where: str, what: str, detail: str) -> ValueError:
    """The error for a file that is not what was written."""
    return ValueError(_MSG_DAMAGED.format(where=where, what=what, detail=detail))


def warn_of_versions(saved: Mapping[str, str]) -> None:
    """One warning, whose text is the same for every layer of a file, if versions differ."""
    here = versions()
    differ = [name for name in saved if here.get(name, "none") != saved[name]]
    if differ:
        warnings.warn(
            _MSG_VERSIONS.format(
                saved=", ".join(f"{name} {saved[name]}" for name in differ),
                here=", ".join(f"{name} {here.get(name, 'none')}" for name in differ),
            ),
            stacklevel=2,
        )


def _digest(fields: Mapping[str, Any]) -> str:
    # Through JSON once, so that tuples and lists, as Keras may exchange them, count as equal.
    return checksum(json.dumps(fields, sort_keys=True, default=list).encode())
