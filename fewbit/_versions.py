"""The versions of other libraries that fewbit is tested with, for messages alone.

Nothing is decided by a version: a newer library that kept its word works, whatever its number.
This table lets `fewbit doctor` and errors say whether a version is one that was tried.
"""

import importlib.metadata
import platform
import re

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
