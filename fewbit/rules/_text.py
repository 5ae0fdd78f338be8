"""Rules as text: JSON and YAML, there and back without loss.

A document is a list of rules, or a mapping with that list under `rules`. A rule is a mapping of the
fields that differ from their defaults, plus `kind` for the class (`quantization` when left out):

    rules:
      - module_path: head
      - kind: qt
        weight_qtype: int8
        act_qtype: int8
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from fewbit._util import dump_yaml, load_json, load_yaml, nearest, read_file
from fewbit.numerics import qtype_name
from fewbit.rules._rules import INITIALIZERS, QuantizationRule, changed_fields


def rules_to_json(rules: Iterable[QuantizationRule]) -> str:
    """The rules as a JSON document that `rules_from_json` reads back to equal rules.

    >>> print(rules_to_json([QuantizationRule(weight_qtype="int8")]))
    {
      "rules": [
        {
          "kind": "quantization",
          "weight_qtype": "int8"
        }
      ]
    }
    """
    return json.dumps({"rules": rules_to_list(rules)}, indent=2, allow_nan=False)


def rules_from_json(text_or_path: str | os.PathLike[str]) -> tuple[QuantizationRule, ...]:
    """Rules from JSON text, or from the file of that name.

    >>> rules_from_json('[{"module_path": "mlp/.*", "weight_qtype": "int4"}]')
    (QuantizationRule(module_path='mlp/.*', weight_qtype='int4'),)
    """
    text, where = _read(text_or_path)
    return rules_from_list(load_json(text, where), where)


def rules_to_yaml(rules: Iterable[QuantizationRule]) -> str:
    """The rules as a YAML document that `rules_from_yaml` reads back to equal rules.

    >>> print(rules_to_yaml([QuantizationRule(weight_qtype="int8", tile_size=0.25)]), end="")
    rules:
    - kind: quantization
      weight_qtype: int8
      tile_size: 0.25
    """
    return dump_yaml({"rules": rules_to_list(rules)})


def rules_from_yaml(text_or_path: str | os.PathLike[str]) -> tuple[QuantizationRule, ...]:
    """Rules from YAML text, or from the file of that name.

    >>> rules_from_yaml("- {kind: qt, weight_qtype: int8}")
    (QtRule(weight_qtype='int8'),)
    """
    text, where = _read(text_or_path)
    return rules_from_list(load_yaml(text, where), where)


def rules_to_list(rules: Iterable[QuantizationRule]) -> list[dict[str, Any]]:
    """Rules as mappings of plain values.

    >>> rules_to_list([QuantizationRule(op_names=["einsum"])])
    [{'kind': 'quantization', 'op_names': ['einsum']}]
    """
    if isinstance(rules, QuantizationRule):
        raise TypeError(f"One rule where a list of rules is expected. Write [{rules!r}].")
    return [rule_to_dict(rule) for rule in rules]


def rule_to_dict(rule: QuantizationRule) -> dict[str, Any]:
    """One rule as a mapping of plain values: its kind and the fields that are not the default.

    >>> rule_to_dict(QuantizationRule(weight_qtype="nf4", tile_size=64))
    {'kind': 'quantization', 'weight_qtype': 'nf4', 'tile_size': 64}
    """
    if "kind" not in vars(type(rule)):
        raise TypeError(
            f"{type(rule).__name__} has no name to be saved under. Give the class its own "
            f"`kind: ClassVar[str] = '{type(rule).__name__.lower()}'`."
        )
    fields = {name: _encode(rule, name, value) for name, value in changed_fields(rule).items()}
    return {"kind": rule.kind, **fields}


def rules_from_list(document: Any, where: str = "rules") -> tuple[QuantizationRule, ...]:
    """Rules from a parsed document: a list of mappings, or a mapping with the list under `rules`.

    >>> rules_from_list({"rules": [{"weight_qtype": "int8"}]})
    (QuantizationRule(weight_qtype='int8'),)
    """
    if isinstance(document, Mapping):
        extra = [key for key in document if key != "rules"]
        if extra:
            raise ValueError(
                f"{where}: unknown key {extra[0]!r} beside the rules."
                f"{nearest(extra[0], ('rules',))} "
                "The document is a list of rules, or a mapping with one key, 'rules'."
            )
        document = document["rules"] if document else None
    if not isinstance(document, list | tuple):
        raise ValueError(
            f"{where}: expected a list of rules, got {_brief(document)}. Start with "
            "`rules:` and one `- weight_qtype: int8` per rule."
        )
    return tuple(rule_from_dict(item, f"{where}: rule {i}") for i, item in enumerate(document))


def rule_from_dict(fields: Any, where: str = "rule") -> QuantizationRule:
    """One rule from a mapping of its fields, the class chosen by `kind`.

    >>> rule_from_dict({"kind": "lora", "rank": 4, "alpha": 8.0})
    LoraRule(rank=4, alpha=8.0)
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}: expected a mapping of fields, got {_brief(fields)}.")
    classes = rule_classes()
    kind = fields.get("kind", "quantization")
    if kind not in classes:
        raise ValueError(
            f"{where}: unknown kind {kind!r}.{nearest(kind, classes)} "
            f"Kinds are {', '.join(sorted(classes))}."
        )
    cls = classes[kind]
    known = {field.name: field for field in dataclasses.fields(cls)}
    values = {name: _decode(name, value) for name, value in fields.items() if name != "kind"}
    for name in values:
        if name not in known:
            raise ValueError(f"{where}: {_unknown_field(str(name), cls, classes)}")
    missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise ValueError(f"{where}: a {cls.__name__} needs {' and '.join(missing)}.")
    try:
        return cls(**values)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def rule_classes() -> dict[str, type[QuantizationRule]]:
    """Every rule class that has a `kind` of its own, by that name.

    >>> sorted(rule_classes())[:1]
    ['lora']
    """
    found: dict[str, type[QuantizationRule]] = {}
    queue: list[type[QuantizationRule]] = [QuantizationRule]
    while queue:
        cls = queue.pop(0)
        if "kind" in vars(cls):
            found.setdefault(cls.kind, cls)
        queue.extend(cls.__subclasses__())
    return found


def _read(text_or_path: str | os.PathLike[str]) -> tuple[str, str]:
    """The document's text and a name for it in messages."""
    if isinstance(text_or_path, str):
        one_line = "\n" not in text_or_path and len(text_or_path) < 1024
        if not one_line or not text_or_path.endswith((".yaml", ".yml", ".json")):
            return text_or_path, "rules"
    path = pathlib.Path(text_or_path)
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(f"No rules file {str(path)!r}.{nearest(path.name, siblings)}")
    try:
        return read_file(path).decode("utf-8"), str(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}).") from error


def _encode(rule: QuantizationRule, name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jnp.dtype):
        return qtype_name(value)
    if isinstance(value, list | tuple):
        return [_encode(rule, name, item) for item in value]
    if isinstance(value, Mapping):
        if not _is_tile(name) and not all(isinstance(key, str) for key in value):
            raise TypeError(f"{rule!r} cannot be saved: {name} has keys that are not strings.")
        # JSON has string keys only; YAML follows so that one reader serves both.
        return {str(key): _encode(rule, _inside(name, key), item) for key, item in value.items()}
    for known, function in INITIALIZERS.items():
        if value is function:
            return known
    raise TypeError(
        f"{rule!r} cannot be saved: {name} is {value!r}, an object of this process. "
        "Numbers, strings, types, lists, mappings"
        + (f", and the initializers {', '.join(INITIALIZERS)}," if "initializer" in name else "")
        + " can be saved."
    )


def _decode(name: str, value: Any) -> Any:
    if _is_tile(name) and isinstance(value, Mapping):
        return {_axis(key): size for key, size in value.items()}
    if name == "additional_qt_config" and isinstance(value, Mapping):
        return {key: _decode(str(key), item) for key, item in value.items()}
    return value


def _is_tile(name: str) -> bool:
    """Whether a field, or one of `additional_qt_config`, may go from axes to lengths."""
    return name.removesuffix("']").endswith("tile_size")


def _inside(name: str, key: Any) -> str:
    return f"{name}[{key!r}]"


def _axis(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.lstrip("-").isdecimal() else key


def _unknown_field(
    name: str, cls: type[QuantizationRule], classes: Mapping[str, type[QuantizationRule]]
) -> str:
    for kind, other in classes.items():
        if name in {field.name for field in dataclasses.fields(other)}:
            return (
                f"{name!r} is a field of {other.__name__}, not of {cls.__name__}. "
                f"Add `kind: {kind}` to this rule."
            )
    known = [field.name for field in dataclasses.fields(cls)]
    return (
        f"unknown field {name!r} in a {cls.__name__}.{nearest(name, known)} "
        f"Fields are {', '.join(known)}."
    )


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:39] + '…'}"
