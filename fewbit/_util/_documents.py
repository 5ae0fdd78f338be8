"""Documents that somebody else wrote: JSON, YAML and plain files, read as far as is sensible.

Nothing in them is given twice, nothing is without end, and only a file is read as one.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

SMALL_BYTES = 16 * 2**20  # a file that people write: rules, a config
LARGE_BYTES = 256 * 2**20  # one that programs write: an index, a manifest
MOST_DEPTH = 300  # levels; the deepest tree of parameters that can be saved has fewer
MOST_YAML = 500_000  # characters: some seconds
MOST_NODES = 200_000  # of a YAML document whose aliases are written out
_MOST_SCALAR = 60_000

_MSG_DEEP = f"it is nested more than {MOST_DEPTH} levels deep"
_MSG_YAML_LONG = "it has {length:,} characters, and at most {most:,} are read; write it as JSON"
_MSG_YAML_LARGE = f"its aliases stand for more than {MOST_NODES:,} values; write out what is meant"
_MSG_YAML_ITSELF = "the alias *{name} stands inside of what it names"
_MSG_YAML_SCALAR = f"a value has more than {_MOST_SCALAR:,} characters"
_MSG_KIND = "is not a file, but {kind}"
_MSG_LARGE = "is larger than such a file can be: {size:,} bytes, and at most {most:,} are read"

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def load_json(text: str | bytes, where: str) -> Any:
    """Parsed JSON; bad syntax, a repeated key or NaN is an error that says where.

    >>> load_json('{"a": 1, "a": 2}', 'rules')
    Traceback (most recent call last):
    ...
    ValueError: rules: key 'a' is given twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"{where}: key {key!r} is given twice.")
            result[key] = value
        return result

    def refuse(constant: str) -> Any:
        raise ValueError(f"{where}: {constant} is not a value JSON has.")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no text in UTF-8 ({error}).") from error
    except RecursionError:
        raise ValueError(f"{where} is not read: {_MSG_DEEP}.") from None
    except ValueError as error:  # a number of thousands of digits
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where} is not read: {error}.") from None
    if too_deep(value):
        raise ValueError(f"{where} is not read: {_MSG_DEEP}.")
    return value


def too_deep(value: Any, most: int = MOST_DEPTH) -> bool:
    """Whether lists and dicts lie deeper in each other than functions can follow.

    >>> too_deep([[[]]], 2), too_deep([[[]]], 3)
    (True, False)
    """
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def load_yaml(text: str, where: str) -> Any:
    """Parsed YAML; bad syntax, a repeated key or aliases of aliases without end are errors."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        """Refuses a key given twice, which YAML loaders otherwise drop without a word."""

        depth = nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            alias = self.check_event(yaml.AliasEvent) and self.peek_event().anchor
            before, self.depth = self.nodes, self.depth + 1
            if self.depth > MOST_DEPTH // 3:  # each level takes three calls
                raise ValueError(f"{where} is not read: {_MSG_DEEP}.")
            node = super().compose_node(parent, index)
            self.depth -= 1
            if alias and not hasattr(node, "values_inside"):
                what = _MSG_YAML_ITSELF.format(name=alias)
                raise ValueError(f"{where} is not read: {what}.")
            self.nodes += node.values_inside if alias else 1
            if self.nodes > MOST_NODES:
                raise ValueError(f"{where} is not read: {_MSG_YAML_LARGE}.")
            if isinstance(node, yaml.ScalarNode) and len(node.value) > _MOST_SCALAR:
                raise ValueError(f"{where} is not read: {_MSG_YAML_SCALAR}.")
            if not alias:
                node.values_inside = self.nodes - before
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                try:
                    twice = key in seen
                    seen.add(key)
                except TypeError:  # no key of a dict; what is below says so
                    break
                if twice:
                    line = key_node.start_mark.line + 1
                    raise ValueError(f"{where}: key {key!r} is given twice (line {line}).")
            return super().construct_mapping(node, deep)

    if len(text) > MOST_YAML:
        long = _MSG_YAML_LONG.format(length=len(text), most=MOST_YAML)
        raise ValueError(f"{where} is not read: {long}.")
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {error}") from error
    except ValueError as error:
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where} is not YAML: {error}.") from error


def dump_yaml(document: Any) -> str:
    """YAML of plain values, in their order."""
    return str(_yaml().safe_dump(document, sort_keys=False, allow_unicode=True))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "Rules in YAML need PyYAML (pip install pyyaml). JSON needs nothing: "
            "see rules_from_json."
        ) from error
    return yaml


# --- Files that somebody else named ---------------------------------------------------------------


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
    fewbit._util._documents.NoPlainFile: /dev/zero is not a file, but a device.
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
