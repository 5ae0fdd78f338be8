"""A Comparison as JSON and back. Numbers that JSON has no word for are written as strings."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from fewbit._errors import describe
from fewbit.debug._channels import Outlier
from fewbit.debug._comparison import Comparison, LayerError, OutputError, SiteError
from fewbit.debug._distributions import Distribution
from fewbit.debug._metrics import Difference

FORMAT = "fewbit comparison"
VERSION = 1

_MSG_NOT_JSON = "This is no JSON document: {error}. Comparison.from_json reads what to_json wrote."
_MSG_FOREIGN = (
    "This JSON document is no comparison of fewbit: {found}. Comparison.from_json reads what "
    "comparison.to_json() wrote."
)
_MSG_NEWER = (
    "This comparison was written in version {found} of its format; this fewbit reads up to "
    "{known}. Read it with the fewbit that wrote it, or a newer one."
)
_MSG_FIELD = "The comparison is damaged: {error}. Write it again with comparison.to_json()."

_NOT_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def to_json(comparison: Comparison) -> str:
    """The document; strictly JSON, so that a browser reads it too."""
    body = _encode(dataclasses.asdict(comparison))
    return json.dumps({"format": FORMAT, "version": VERSION, **body}, indent=1, allow_nan=False)


def from_json(text: str) -> Comparison:
    """The comparison that was written."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_MSG_NOT_JSON.format(error=error)) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(_MSG_FOREIGN.format(found=describe(body)))
    version = body.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(_MSG_NEWER.format(found=version, known=VERSION))
    try:
        found = _comparison({k: v for k, v in body.items() if k not in ("format", "version")})
        _check_types(found)
        return found
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(_MSG_FIELD.format(error=error)) from error


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_NUMBERS[value]
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{value!r} stands where a number is expected")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


def _comparison(body: Mapping[str, Any]) -> Comparison:
    return Comparison(
        **{
            **body,
            "sites": tuple(_site(row) for row in body["sites"]),
            "output": OutputError(**{k: _number(v) for k, v in body["output"].items()}),
            "notes": _texts(body["notes"]),
            "channels": tuple(
                Outlier(**{**entry, "layer": tuple(entry["layer"])}) for entry in body["channels"]
            ),
            "distributions": tuple(
                Distribution(**{k: _tuples(v) for k, v in entry.items()})
                for entry in body["distributions"]
            ),
        }
    )


def _check_types(value: Any) -> None:
    """Raise if a field of a row holds something else than its class says."""
    for field, kind in typing.get_type_hints(type(value), {**globals()}).items():
        inner = getattr(value, field)
        if not _fits(inner, kind):
            raise TypeError(f"{field} is {describe(inner)}")
        for item in inner if isinstance(inner, tuple) else (inner,):
            if dataclasses.is_dataclass(item):
                _check_types(item)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return type(value) is int
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(v, typing.get_args(kind)[0]) for v in value)
    if isinstance(kind, type):
        return isinstance(value, kind)
    return any(_fits(value, one) for one in typing.get_args(kind))


def _site(row: Mapping[str, Any]) -> SiteError:
    return SiteError(
        **{
            **row,
            **{key: _difference(row[key]) for key in ("local", "accumulated", "weight")},
            **{key: _number(row[key]) for key in ("only", "restored", "clipped")},
            "layers": tuple(_layer(entry) for entry in row["layers"]),
        }
    )


def _layer(entry: Mapping[str, Any]) -> LayerError:
    differences = {key: _difference(entry[key]) for key in ("local", "accumulated", "weight")}
    return LayerError(layer=tuple(entry["layer"]), clipped=_number(entry["clipped"]), **differences)


def _difference(entry: Mapping[str, Any] | None) -> Difference | None:
    return None if entry is None else Difference(**{k: _number(v) for k, v in entry.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
