"""Plans as JSON. The document carries a format version; reading checks every field it needs.

{"format": "fewbit-plan", "version": 1, "kind": "linen", "methods": [...], "rules": [...],
 "sites": [...], "leaves": [...], "notes": [...], "unmatched_rules": [...], "scales": [...],
 "adapters": [...]}

"scales" (static activation scales) and "adapters" may be missing: plans written before there were
any lack them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

import jax.numpy as jnp

from fewbit._util import load_json, nearest
from fewbit.numerics import qtype_name
from fewbit.planning._rows import AdapterPlan, Groups, LeafPlan, ScalePlan, SitePlan
from fewbit.qarray import HowToQuantize
from fewbit.rules import QuantizationRule, rule_from_dict, rule_to_dict, rules_to_list
from fewbit.tracing import ArrayInfo, Site

if TYPE_CHECKING:
    from fewbit.planning._plan import Plan

FORMAT = "fewbit-plan"
VERSION = 1

Reader = Callable[[Any, str], Any]


def plan_to_json(plan: Plan) -> str:
    """The Plan as text. Equal Plans give equal text.

    >>> from fewbit import Plan
    >>> plan_to_json(Plan(rules=(), sites=(), leaves=())).splitlines()[1:3]
    [' "format": "fewbit-plan",', ' "version": 1,']
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "kind": plan.kind,
        "methods": list(plan.methods),
        "rules": rules_to_list(plan.rules),
        "sites": [dataclasses.asdict(site) for site in plan.sites],
        "leaves": [_row_to_dict(leaf, plan.rules) for leaf in plan.leaves],
        "notes": list(plan.notes),
        "unmatched_rules": list(plan.unmatched_rules),
        "scales": [_row_to_dict(scale, plan.rules) for scale in plan.scales],
        "adapters": [_row_to_dict(adapter, plan.rules) for adapter in plan.adapters],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def plan_from_json(kind: type[Plan], text: str) -> Plan:
    """The Plan in the text; a newer version or a malformed document is an error that says where.

    >>> from fewbit import Plan
    >>> plan_from_json(Plan, '{"format": "fewbit-plan", "version": 99}')
    Traceback (most recent call last):
    ...
    ValueError: The plan has format version 99, but this fewbit reads up to 1. Upgrade fewbit, ...
    """
    if not isinstance(text, str | bytes):
        raise TypeError(
            f"Plan.from_json reads the text that plan.to_json() wrote, not a {type(text).__name__}."
        )
    document = load_json(text, "The plan")
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise ValueError(
            f'This JSON is not a plan: it has no "format": "{FORMAT}". '
            "Plan.from_json reads what plan.to_json() wrote; for rules use rules_from_json."
        )
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"The plan has no usable format version: {version!r}. It must be 1 or more."
        )
    if version > VERSION:
        raise ValueError(
            f"The plan has format version {version}, but this fewbit reads up to {VERSION}. "
            "Upgrade fewbit, or make the plan again with this one."
        )
    fields = {key: value for key, value in document.items() if key not in ("format", "version")}
    rules = _list_of(rule_from_dict)(fields.get("rules", []), "rules")
    readers = {**_PLAN, "rules": lambda _, __: rules}
    for name, row in (("leaves", LeafPlan), ("scales", ScalePlan), ("adapters", AdapterPlan)):
        readers[name] = _list_of(_row(row, rule=_rule_reader(rules)))
    return _dataclass(kind, readers)({"scales": [], "adapters": [], **fields}, "plan")


def _row_to_dict(
    row: LeafPlan | ScalePlan | AdapterPlan, rules: tuple[QuantizationRule, ...]
) -> dict[str, Any]:
    fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    if row.rule is not None:
        # Thousands of leaves may share a rule: its number in the list is enough.
        shared = row.rule in rules
        fields["rule"] = rules.index(row.rule) if shared else rule_to_dict(row.rule)
    if fields.get("how") is not None:
        fields["how"] = how_to_dict(fields["how"])
    return fields


def how_to_dict(how: HowToQuantize) -> dict[str, Any]:
    """`HowToQuantize` as plain values.

    >>> how_to_dict(HowToQuantize(qtype="int4", tiled_axes={0: 32}))["tiled_axes"]
    [[0, 32]]
    """
    if how.noise_fn is not None:
        raise ValueError(
            f"{how!r} cannot be saved: its noise function is an object of this process. Noise "
            "belongs to gradients; a stored parameter is rounded without it."
        )
    return {
        "qtype": qtype_name(how.qtype),
        "channelwise_axes": [int(axis) for axis in how.channelwise_axes],
        "tiled_axes": [[int(axis), size] for axis, size in how.tiled_axes.items()],
        "calibration_method": how.calibration_method,
        "scale_dtype": None if how.scale_dtype is None else jnp.dtype(how.scale_dtype).name,
        "roles": how.roles,
    }


def how_from_dict(fields: Any, where: str = "how") -> HowToQuantize:
    """The `HowToQuantize` that `how_to_dict` wrote.

    >>> how = HowToQuantize(qtype="nf4", channelwise_axes=(1,), tiled_axes={0: 64})
    >>> how_from_dict(how_to_dict(how)) == how
    True
    """
    if isinstance(fields, Mapping):  # plans written before there were kernels
        fields = {"roles": None, **fields}
    return _dataclass(HowToQuantize, _HOW)(fields, where)


def _is(*kinds: type) -> Reader:
    """A reader for values of these JSON types, which are returned as they are."""

    def read(value: Any, where: str) -> Any:
        # True is an int to Python, and never one in a plan.
        if isinstance(value, kinds) and not isinstance(value, bool):
            return value
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{where} should be {names}, but is {value!r}.")

    return read


def _list_of(read_item: Reader) -> Reader:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"{where} should be a list, but is {value!r}.")
        return tuple(read_item(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read


def _optional(read_some: Reader) -> Reader:
    return lambda value, where: None if value is None else read_some(value, where)


def _dataclass(cls: type, readers: Mapping[str, Reader]) -> Reader:
    """A reader for the mapping of a dataclass: every field present, none unknown, each read."""

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} should be a mapping, but is {value!r}.")
        for name in value:
            if name not in readers:
                raise ValueError(f"{where} has an unknown field {name!r}.{nearest(name, readers)}")
        missing = [name for name in readers if name not in value]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}.")
        return cls(**{name: read(value[name], f"{where}.{name}") for name, read in readers.items()})

    return read


def _row(cls: type, **others: Reader) -> Reader:
    """A reader for a dataclass by the types of its fields, and `others` by name."""
    types = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return _dataclass(cls, {name: others.get(name) or _BY_TYPE[types[name]] for name in names})


def _rule_reader(rules: tuple[QuantizationRule, ...]) -> Reader:
    def read(value: Any, where: str) -> QuantizationRule | None:
        if value is None or isinstance(value, Mapping):
            return None if value is None else rule_from_dict(value, where)
        index = _INT(value, where)
        if not 0 <= index < len(rules):
            raise ValueError(f"{where} is rule {index}, but the plan has {len(rules)} rules.")
        return rules[index]

    return read


def _tile(value: Any, where: str) -> tuple[int, int | float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where} should be [axis, size], but is {value!r}.")
    return _INT(value[0], where), _is(int, float)(value[1], where)


_INT = _is(int)
_STR = _is(str)
_STR_OR_NONE = _is(str, type(None))
_STRINGS = _list_of(_STR)
_SHAPE = _list_of(_INT)

_HOW: dict[str, Reader] = {
    "qtype": _STR,
    "channelwise_axes": _SHAPE,
    "tiled_axes": lambda value, where: dict(_list_of(_tile)(value, where)),
    "calibration_method": _STR,
    "scale_dtype": _STR_OR_NONE,
    "roles": _STR_OR_NONE,
}
# What stands for a field of each type in the rows of a Plan, whose fields are those of the file.
_BY_TYPE: dict[Any, Reader] = {
    int: _INT,
    int | None: _optional(_INT),
    str: _STR,
    str | None: _STR_OR_NONE,
    tuple[int, ...]: _SHAPE,
    tuple[str, ...]: _STRINGS,
    Groups: _list_of(_SHAPE),
    HowToQuantize: how_from_dict,
    HowToQuantize | None: _optional(how_from_dict),
}
_BY_TYPE[ArrayInfo] = _row(ArrayInfo)
_BY_TYPE[Site] = _row(Site)
_SITE_PLAN = _row(SitePlan)


def _site_plan(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):  # plans of models that do not train, and older ones
        value = {"dlhs": None, "drhs": None, **value}
    return _SITE_PLAN(value, where)


_PLAN: dict[str, Reader] = {
    "kind": _STR,
    "methods": _STRINGS,
    "sites": _list_of(_site_plan),
    "notes": _STRINGS,
    "unmatched_rules": _SHAPE,
}
