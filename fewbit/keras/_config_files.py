"""Configs as dicts and JSON, in both dialects that are in use.

Nested, which is written: `{"quantization_type": "static_quant", "config": {...}}` and
`{"quantization_type": "composable", "configs": [...]}`; flat, which is read too: the fields alone.
What `set_local` was told is under `local`, beside the fields in the flat dialect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewbit._atomic import write_atomically
from fewbit._documents import load_json
from fewbit._errors import describe
from fewbit._files import read_file as read_bytes
from fewbit._rule_checks import nearest
from fewbit.keras._config_checks import DEFAULTS

KIND, FIELDS, PARTS, LOCAL = "quantization_type", "config", "configs", "local"
COMPOSABLE = ("composable", "composable_config")

_MSG_KIND = (
    "Unknown config class: {kind}. Must be one of: {known}.{hint} A config is written as "
    '{{"quantization_type": "static_quant", "config": {{...}}}}{flat}.'
)
_MSG_FLAT = (
    "; the fields alone are read by the class they are for: StaticQuantConfig.from_dict(...) or "
    "DynamicQuantConfig.from_dict(...)"
)
_MSG_NO_MAPPING = "{where}: {place} must be a mapping, got {value}."
_MSG_NO_LIST = "{where}: 'configs' must be a list of configs, got {value}."
_MSG_KEY = "{where}: {kind} has the key {key!r}.{hint} Its keys are {known}."
_MSG_NO_FILE = "No config file {path!r}.{hint}"
_MSG_NO_TEXT = "{path} is no text in UTF-8 ({error})."


def from_document(document: Any, leaves: Mapping[str, type], composable: type, flat: Any) -> Any:
    """The config that a dict of either dialect describes.

    `leaves` are the config classes by name; `flat` is the one of them that reads fields alone, or
    None where the caller does not say which.
    """
    where = "from_dict"
    if not isinstance(document, Mapping):
        raise TypeError(
            _MSG_NO_MAPPING.format(where=where, place="a config", value=describe(document))
        )
    if KIND not in document:
        if flat is None:
            raise ValueError(_kind_message(None, leaves))
        return _leaf(flat, document)
    kind = document[KIND]
    if isinstance(kind, str) and kind in COMPOSABLE:
        _check_keys(where, kind, document, (KIND, PARTS))
        parts = document.get(PARTS)
        if not isinstance(parts, list | tuple):
            raise TypeError(_MSG_NO_LIST.format(where=where, value=describe(parts)))
        return composable([from_document(part, leaves, composable, None) for part in parts])
    if not isinstance(kind, str) or kind not in leaves:
        raise ValueError(_kind_message(kind, leaves))
    _check_keys(where, kind, document, (KIND, FIELDS, LOCAL))
    fields = document.get(FIELDS, {})
    if not isinstance(fields, Mapping):
        raise TypeError(
            _MSG_NO_MAPPING.format(where=where, place=f"'config' of {kind}", value=describe(fields))
        )
    local = {LOCAL: document[LOCAL]} if LOCAL in document else {}
    return _leaf(leaves[kind], {**fields, **local})


def _leaf(cls: type, document: Mapping[str, Any]) -> Any:
    for key in document:
        if not isinstance(key, str):
            raise TypeError(f"{cls.__name__}: {key!r} is no name of a field.")
    fields = {key: value for key, value in document.items() if key != LOCAL}
    config = cls(**fields)
    local = document.get(LOCAL, {})
    if not isinstance(local, Mapping):
        place = f"'local' of {cls.__name__}"
        raise TypeError(
            _MSG_NO_MAPPING.format(where="from_dict", place=place, value=describe(local))
        )
    for entry, part in local.items():
        config.set_local(entry, cls.from_dict(part))  # type: ignore[attr-defined]
    return config


def _check_keys(where: str, kind: str, document: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in document:
        if key not in known:
            hint = nearest(key, known)
            if key in DEFAULTS:
                hint = f" A field belongs inside {FIELDS!r}."
            listed = ", ".join(known)
            raise ValueError(
                _MSG_KEY.format(where=where, kind=kind, key=key, hint=hint, known=listed)
            )


def _kind_message(kind: Any, leaves: Mapping[str, type]) -> str:
    names = sorted(leaves)
    hint = "" if kind is None else nearest(kind, [*names, *COMPOSABLE])
    flat = _MSG_FLAT if kind is None else ""
    return _MSG_KIND.format(kind=kind, known=" or ".join(names), hint=hint, flat=flat)


def to_text(document: Mapping[str, Any]) -> str:
    """The JSON of a config's dict.

    >>> print(to_text({'quantization_type': 'static_quant', 'config': {}}))
    {
      "quantization_type": "static_quant",
      "config": {}
    }
    """
    return json.dumps(document, indent=2, allow_nan=False)


def read_text(text: str) -> Any:
    """What a JSON text holds; a mistake in it is an error with its line."""
    if not isinstance(text, str):
        raise TypeError(f"from_json_string needs JSON text, got {describe(text)}.")
    return load_json(text, "config")


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """The file is whole or, when writing fails, what it was."""
    write_atomically(path, lambda file: _write(file, text))


def _write(file: Any, text: str) -> None:
    file.write((text + "\n").encode("utf-8"))


def read_file(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds."""
    place = Path(path)
    if not place.exists():
        siblings = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
        raise FileNotFoundError(
            _MSG_NO_FILE.format(path=str(place), hint=nearest(place.name, siblings))
        )
    try:
        text = read_bytes(place).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(_MSG_NO_TEXT.format(path=place, error=error)) from error
    return load_json(text, str(place))
