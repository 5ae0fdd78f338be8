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

from fewbit._util import describe, load_json, nearest, write_atomically
from fewbit._util import read_file as read_bytes
from fewbit.keras.config._fields import DEFAULTS

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
_MSG_NO_MAPPING = "from_dict: {place} must be a mapping, got {value}."
_MSG_NO_LIST = "from_dict: 'configs' must be a list of configs, got {value}."
_MSG_KEY = "from_dict: {kind} has the key {key!r}.{hint} Its keys are {known}."
_MSG_NO_FILE = "No config file {path!r}.{hint}"
_MSG_NO_TEXT = "{path} is no text in UTF-8 ({error})."


def from_document(document: Any, leaves: Mapping[str, type], composable: type, flat: Any) -> Any:
    """The config that a dict of either dialect describes.

    `leaves` are the config classes by name; `flat` is the one of them that reads fields alone, or
    None where the caller does not say which.
    """
    _check_mapping(document, "a config")
    if KIND not in document and flat is not None:
        return _leaf(flat, document)
    kind = document.get(KIND)
    if isinstance(kind, str) and kind in COMPOSABLE:
        _check_keys(kind, document, (KIND, PARTS))
        parts = document.get(PARTS)
        if not isinstance(parts, list | tuple):
            raise TypeError(_MSG_NO_LIST.format(value=describe(parts)))
        return composable([from_document(part, leaves, composable, None) for part in parts])
    if not isinstance(kind, str) or kind not in leaves:
        raise ValueError(_kind_message(kind, leaves))
    _check_keys(kind, document, (KIND, FIELDS, LOCAL))
    fields = document.get(FIELDS, {})
    _check_mapping(fields, f"'config' of {kind}")
    local = {LOCAL: document[LOCAL]} if LOCAL in document else {}
    return _leaf(leaves[kind], {**fields, **local})


def _leaf(cls: type, document: Mapping[str, Any]) -> Any:
    for key in document:
        if not isinstance(key, str):
            raise TypeError(f"{cls.__name__}: {key!r} is no name of a field.")
    config = cls(**{key: value for key, value in document.items() if key != LOCAL})
    local = document.get(LOCAL, {})
    _check_mapping(local, f"'local' of {cls.__name__}")
    for entry, part in local.items():
        config.set_local(entry, cls.from_dict(part))  # type: ignore[attr-defined]
    return config


def _check_mapping(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(_MSG_NO_MAPPING.format(place=place, value=describe(value)))


def _check_keys(kind: str, document: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in document:
        if key not in known:
            inside = f" A field belongs inside {FIELDS!r}."
            hint = inside if key in DEFAULTS else nearest(key, known)
            raise ValueError(_MSG_KEY.format(kind=kind, key=key, hint=hint, known=", ".join(known)))


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
    write_atomically(path, lambda file: file.write((text + "\n").encode("utf-8")))


def read_file(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds."""
    place = Path(path)
    if not place.exists():
        siblings = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
        hint = nearest(place.name, siblings)
        raise FileNotFoundError(_MSG_NO_FILE.format(path=str(place), hint=hint))
    try:
        text = read_bytes(place).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(_MSG_NO_TEXT.format(path=place, error=error)) from error
    return load_json(text, str(place))
