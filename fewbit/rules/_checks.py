"""Checks of single rule fields. Each takes (where, field, value) and returns the stored form.

A rule is wrong when it is written, not at the first forward pass: these raise at construction, in
sentences that name the rule, the field, the nearest valid value and the line to write instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from fewbit._util import PatternError, compile_pattern, nearest
from fewbit.numerics import canonical_qtype, format_of, qtype_name
from fewbit.qarray import check_method, parse_method

SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SCALE_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
}

_MSG_DELAYED = (
    "{where}: {field}={value!r} takes the range from the steps before, which only training under a "
    "QtProvider remembers. Write QtRule(..., {field}={value!r}) to train, and fewbit.to_ptq(...) "
    "to serve what was trained; otherwise use 'absmax'."
)

T = TypeVar("T")
Tile = int | float | None


class FrozenMapping(Mapping[Any, Any]):
    """An immutable, hashable mapping that tells `1` from `1.0`, as tile sizes must.

    >>> tiles = FrozenMapping({0: 128, 1: 0.5})
    >>> tiles[0], dict(tiles) == tiles, FrozenMapping({0: 1}) == FrozenMapping({0: 1.0})
    (128, True, False)
    """

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = {key: freeze(value) for key, value in items.items()}

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or self._items.keys() != other.keys():
            return False
        return all(same_value(value, other[key]) for key, value in self._items.items())

    def __hash__(self) -> int:
        # Keys only: a value may be unhashable (a user's own object) and equality still decides.
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(self._items)


def freeze(value: Any) -> Any:
    """Lists as tuples and mappings as `FrozenMapping`, recursively.

    >>> freeze({"a": [1, 2]})
    {'a': (1, 2)}
    """
    if isinstance(value, Mapping):
        return value if isinstance(value, FrozenMapping) else FrozenMapping(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def same_value(a: Any, b: Any) -> bool:
    """Equality under which the integer 1 and the float 1.0 differ.

    >>> same_value(1, 1), same_value(1, 1.0)
    (True, False)
    """
    if isinstance(a, int | float) and isinstance(b, int | float):
        return type(a) is type(b) and a == b
    return bool(a == b)


def check_regex(where: str, field: str, value: object) -> str:
    """A pattern that compiles; the error keeps the words of `re`."""
    if isinstance(value, re.Pattern):
        raise TypeError(
            f"{where}: {field} is a compiled pattern; give its text: {value.pattern!r}."
        )
    if not isinstance(value, str):
        raise TypeError(
            f"{where}: {field} must be a string with a regular expression, got {value!r}. "
            f"Write {field}='.*' for every module."
        )
    try:
        compile_pattern(value)
    except PatternError as error:
        raise ValueError(f"{where}: {field}: {error}.") from None
    except re.error as error:
        starred = re.sub(r"(?<![\w\])}.])\*", ".*", value)
        fix = f"Write {starred!r}" if _compiles(starred) else f"Write {re.escape(value)!r}"
        marker = f"\n    {value}\n    {' ' * (error.pos or 0)}^\n" if "\n" not in value else " "
        raise ValueError(
            f"{where}: {field}={value!r} is not a regular expression: {error}.{marker}"
            f"It is matched against the whole '/'-joined module path with re.fullmatch, "
            f"where '.*' stands for anything. {fix}?"
        ) from error
    return value


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def check_names(where: str, field: str, value: object) -> tuple[str, ...]:
    """Names of ops; one bare string is the popular mistake."""
    if isinstance(value, str):
        raise TypeError(
            f"{where}: {field}={value!r} is one string where a collection of op names is expected. "
            f"Write {field}=({value!r},)."
        )
    if not isinstance(value, Collection):
        raise TypeError(f"{where}: {field} must be a collection of op names, got {value!r}.")
    # A set has no order of its own; a rule must print and save the same way every time.
    names = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
    for name in names:
        if not isinstance(name, str) or not name:
            known = getattr(name, "__name__", None)
            fix = f" Write {known!r}." if known else " Names look like 'dot_general' or 'einsum'."
            raise TypeError(f"{where}: {field} has {name!r}, which is not an op's name.{fix}")
    return tuple(dict.fromkeys(names))


def check_axes(where: str, field: str, value: object) -> tuple[int, ...]:
    """A collection of integer axes."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise TypeError(
            f"{where}: {field}={value} is one integer where a collection of axes is expected. "
            f"Write {field}=({value},)."
        )
    axes = tuple(value) if isinstance(value, Collection) and not isinstance(value, str) else None
    if axes is None or not all(_is_int(axis) for axis in axes):
        raise TypeError(f"{where}: {field} must be a collection of integer axes, got {value!r}.")
    return tuple(int(axis) for axis in axes)


def check_bool(where: str, field: str, value: object, optional: bool = False) -> bool | None:
    """A truth value, or None where that means 'undecided'."""
    if isinstance(value, bool) or (optional and value is None):
        return value
    kinds = "True, False or None" if optional else "True or False"
    raise TypeError(f"{where}: {field} must be {kinds}, got {value!r}.")


def check_number(
    where: str, field: str, value: object, rule: str, valid: Callable[[float], bool]
) -> float:
    """A finite number for which `valid` holds; `rule` says that in words."""
    number = value.item() if isinstance(value, np.number) else value
    if (
        not isinstance(number, int | float)
        or isinstance(number, bool)
        or not math.isfinite(number)
        or not valid(number)
    ):
        raise ValueError(f"{where}: {field} must be {rule}, got {value!r}.")
    return number


def check_choice(where: str, field: str, value: object, choices: Collection[str]) -> str | None:
    """One of the choices, or None."""
    if value is None or value in choices:
        return value  # type: ignore[return-value]
    listed = ", ".join(repr(choice) for choice in choices)
    raise ValueError(
        f"{where}: {field}={value!r} is unknown.{nearest(value, choices)} "
        f"It is one of {listed}, or None."
    )


def check_qtype(where: str, field: str, value: Any) -> Any:
    """A quantized type in its canonical form, or None."""
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in ("none", "null", ""):
        raise ValueError(
            f"{where}: {field}={value!r} is a string. Write {field}=None (null in YAML and JSON) "
            "to leave the numbers as they are."
        )
    return _placed(f"{where}: {field}", canonical_qtype, value)


_MSG_LEARNED = (
    "{where}: {field}={value!r}, but a learned scale is a parameter beside a weight, which "
    "training fits. Write QtRule(weight_calibration_method={value!r}, ...) for a QtProvider; here "
    "write {instead!r}."
)


def check_calibration(
    where: str,
    field: str,
    value: Any,
    qtype: Any,
    learned: bool = False,
    remembers: bool = False,
) -> str | None:
    """A calibration method that the type, where there is one, can express.

    `learned` tells whether the field is one whose scale can be a parameter; 'delayed' is for what
    `remembers` the steps before.
    """
    if value is None:
        if qtype is not None:
            default = f"{where}: {field} is the default 'absmax' with {qtype_name(qtype)}"
            _placed(default, check_method, "absmax", qtype)
        return None
    if not isinstance(value, str):
        raise TypeError(
            f"{where}: {field} must be a string such as 'absmax' or 'minmax', got {value!r}."
        )
    method = _placed(f"{where}: {field}={value!r}", parse_method, value)
    if method.learned and not learned:
        instead = "mse" if method.start in ("", "lsq") else method.start
        text = dict(where=where, field=field, value=value, instead=instead)
        raise ValueError(_MSG_LEARNED.format(**text))
    if method.name == "delayed" and not remembers:
        raise ValueError(_MSG_DELAYED.format(where=where, field=field, value=value))
    if qtype is not None:
        _placed(f"{where}: {field}={value!r} with {qtype_name(qtype)}", check_method, value, qtype)
    return value


def _placed(place: str, function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, its complaints prefixed with the place in the rule."""
    try:
        return function(*args)
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def check_scale_dtype(where: str, field: str, value: Any, qtype: Any) -> str | None:
    """The name of a float type for scales; some formats have their own and leave no choice."""
    if value is None:
        return None
    name = _SCALE_ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value
    if not isinstance(name, str):
        try:
            name = jnp.dtype(value).name
        except TypeError:
            name = repr(value)
    own = format_of(qtype).scale_dtype if qtype is not None else None
    if own is not None:
        if name == own:
            return own
        raise ValueError(
            f"{where}: {field}={name!r}, but {qtype_name(qtype)} stores its scales as {own}. "
            f"Leave {field} out."
        )
    if name not in SCALE_DTYPES:
        raise ValueError(
            f"{where}: {field}={name!r} cannot hold a scale.{nearest(name, SCALE_DTYPES)} "
            f"It is one of {', '.join(SCALE_DTYPES)}, or None for the weight's own dtype."
        )
    return name


def check_tile(where: str, field: str, value: Any, qtypes: Collection[Any]) -> Any:
    """A tile size; formats that come with a tile (mx, nv) fill it in or insist on it."""
    required = {
        qtype_name(qtype): format_of(qtype).tile
        for qtype in qtypes
        if qtype is not None and format_of(qtype).tile is not None
    }
    if len(set(required.values())) > 1:
        tiles = " and ".join(f"{name} needs tiles of {tile}" for name, tile in required.items())
        raise ValueError(f"{where}: {tiles}; one rule has one {field}. Choose formats that agree.")
    checked = _tile_value(where, field, value)
    for name, tile in required.items():
        if checked is None:
            return tile
        sizes = checked.values() if isinstance(checked, Mapping) else (checked,)
        for size in sizes:
            if not same_value(size, tile):
                raise ValueError(
                    f"{where}: Format {name} requires a tile size of {tile}, but {field} is "
                    f"{value!r}. Leave {field} out or write {field}={tile}."
                )
    return checked


def _tile_value(where: str, field: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not value or not all(_is_int(axis) for axis in value):
            raise TypeError(
                f"{where}: {field} as a mapping goes from axis to size, such as {{0: 128}}, "
                f"got {dict(value)!r}."
            )
        return FrozenMapping(
            {int(axis): _tile_value(where, field, size) for axis, size in value.items()}
        )
    if _is_int(value) and value > 0:
        return int(value)
    if isinstance(value, float | np.floating) and 0 < value <= 1:
        return float(value)
    fix = ""
    if isinstance(value, float) and value > 1 and value.is_integer():
        fix = f" Write {field}={int(value)} for tiles of {int(value)} elements."
    raise ValueError(
        f"{where}: {field} must be a positive integer (elements per tile), a float in (0, 1] "
        f"(the share of the axis per tile), or None, got {value!r}.{fix}"
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
