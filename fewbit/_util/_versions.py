"""What fewbit finds around it: the versions of other libraries, and its environment variables.

Nothing is decided by a version: a newer library that kept its word works, whatever its number.
`TESTED` lets `fewbit doctor` and errors say whether a version is one that was tried.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping

from fewbit._util._names import nearest
from fewbit._version import __version__

# Oldest and newest that the tests run with, both included; the first digits stand for all that
# begin with them. The README's table has the same rows, and a test holds the two together.
TESTED = {
    "python": ("3.11", "3.13"),
    "jax": ("0.10.2", "0.12.0.1"),
    "jaxlib": ("0.10.2", "0.12.0.1"),
    "flax": ("0.12.8", "0.12.12"),
    "keras": ("3.15", "3.15"),
    "keras-hub": ("0.32", "0.32"),
}


def known_range(name: str) -> str:
    """The tested versions of a library, in words.

    >>> known_range('jax'), known_range('keras')
    ('0.10.2 to 0.12.0.1', '3.15.x')
    """
    oldest, newest = TESTED[name]
    return f"{oldest}.x" if oldest == newest else f"{oldest} to {newest}"


def installed(name: str) -> str | None:
    """A library's version here, or None; nothing is imported for it.

    >>> installed('jax').count('.') >= 2, installed('no-such-library')
    (True, None)
    """
    if name == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions_of(libraries: Iterable[str]) -> list[tuple[str, str]]:
    """(name, version) of fewbit and of those libraries that are here.

    >>> [name for name, _ in versions_of(['jax', 'no-such-library'])]
    ['fewbit', 'jax']
    """
    found = [(name, installed(name)) for name in libraries]
    return [("fewbit", __version__), *((name, here) for name, here in found if here is not None)]


def is_known(name: str, version: str) -> bool:
    """Whether a version lies within the tested ones.

    >>> is_known('flax', '0.12.10'), is_known('flax', '0.12.7'), is_known('keras', '3.15.4')
    (True, False, True)
    """
    oldest, newest = (_digits(end) for end in TESTED[name])
    found = _digits(version)
    return oldest <= found and found[: len(newest)] <= newest


def judged(name: str, version: str | None) -> str:
    """A version beside the tested ones, as `fewbit doctor` prints it.

    >>> judged('jax', '0.11.0'), judged('numpy', '2.4.6')
    ('0.11.0 (tested: 0.10.2 to 0.12.0.1)', '2.4.6')
    >>> judged('jax', '0.9.1')
    '0.9.1, older than what fewbit is tested with: 0.10.2 to 0.12.0.1'
    """
    if version is None:
        return "not installed"
    if name not in TESTED:
        return version
    if is_known(name, version):
        return f"{version} (tested: {known_range(name)})"
    age = "older" if _digits(version) < _digits(TESTED[name][0]) else "newer"
    return f"{version}, {age} than what fewbit is tested with: {known_range(name)}"


def _digits(version: str) -> tuple[int, ...]:
    """The leading numbers, without what marks a release candidate or a build of one's own."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


# --- Environment variables ------------------------------------------------------------------------

# {name: (values, what it does, who reads it)}; docs/settings.md has the same rows.
VARIABLES: dict[str, tuple[str, str, str]] = {
    "FEWBIT_BACKEND": (
        "`native` or `xla`",
        "`xla` leaves the native kernels alone in the whole process",
        "fewbit",
    ),
    "FEWBIT_ISA": (
        "`avx512_vnni`, `avx2` or `portable`",
        "the kernels to use, of those that the CPU has; the best ones if unset",
        "fewbit",
    ),
    "FEWBIT_NATIVE_LIBRARY": (
        "a file, or empty",
        "the native part to open instead of the installed one; empty turns it off",
        "fewbit",
    ),
    "FEWBIT_PROGRESS": ("`0` or `1`", "`0` turns progress bars off", "fewbit"),
    "FEWBIT_DATA": ("a folder", "where data sets lie", "tests and examples"),
    "FEWBIT_PEERS_PYTHON": (
        "an interpreter",
        "the environment of the libraries that fewbit is compared with",
        "tests",
    ),
    "FEWBIT_REQUIRE_NATIVE": (
        "`1`",
        "a failed compilation is an error, not an installation without kernels",
        "the build",
    ),
}

_MSG_UNKNOWN = "{name} is set, but fewbit does not read it{hint}"
_MSG_SWITCH = "{name} is {value!r}, and can be 0 or 1. Set it to one of these, or unset it."


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that looks like one of fewbit's and is not.

    >>> unknown_variables({'FEWBIT_IAS': 'avx2', 'FEWBIT_ISA': 'avx2'})
    ['FEWBIT_IAS is set, but fewbit does not read it; did you mean FEWBIT_ISA?']
    """
    said = []
    for name in sorted(environment):
        if not name.upper().startswith("FEWBIT") or name in VARIABLES:
            continue
        hint = nearest(name.upper(), VARIABLES, "; did you mean {}?", cutoff=0.75, show=str)
        hint = hint or f". It reads {', '.join(VARIABLES)}"
        said.append(_MSG_UNKNOWN.format(name=name, hint=hint))
    return said


def is_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a switch is on, which it is unless it says 0; anything but 0 and 1 is an error.

    >>> is_on('FEWBIT_PROGRESS', {}), is_on('FEWBIT_PROGRESS', {'FEWBIT_PROGRESS': '0'})
    (True, False)
    """
    value = environment.get(name) or "1"
    if value not in ("0", "1"):
        raise ValueError(_MSG_SWITCH.format(name=name, value=value))
    return value == "1"
