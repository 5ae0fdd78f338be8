"""Keys of caches for what Python cannot hash: configs, lists and dicts that models hold.

A program is traced from such values as they were, and they may change. So a key holds what they
held when it was made, and two keys are equal only while both values still hold it.
"""

import dataclasses
from collections import deque
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

Memo = dict[
    int, "Content"
]  # of one key alone, while its values are alive: many modules, one config


class Content:
    """A mutable value as part of a key.

    >>> sizes = [1, 2]
    >>> before = Content(sizes)
    >>> before == Content([1, 2]), before == Content([True, 2])
    (True, False)
    >>> sizes.append(3)
    >>> before == Content([1, 2]), before == Content(sizes), Content(sizes) == Content([1, 2, 3])
    (False, False, True)
    """

    __slots__ = ("content", "value")

    def __init__(self, value: Any):
        self.value, self.content = value, _content(value, {})

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content) or self.content != other.content:
            return False
        # A program that is traced again reads the value that its own key was made from.
        return self.value is other.value or (self.holds() and other.holds())

    def holds(self) -> bool:
        """Whether the value still is as it was."""
        return _content(self.value, {}) == self.content


class _Same:
    """An immutable value that is only equal to itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def key_of(value: Any, memo: Memo | None = None) -> Hashable:
    """A value as a key, in which 1, 1.0 and True differ; TypeError if its content cannot be told.

    >>> key_of((1, [2])) == key_of((1, [2])), key_of((1, [2])) == key_of((True, [2]))
    (True, False)
    """
    memo = {} if memo is None else memo
    if isinstance(value, tuple):
        return type(value), tuple(key_of(part, memo) for part in value)
    if is_hashable(value):
        return type(value), value
    if _is_frozen(value):
        parts = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return type(value), tuple((name, key_of(part, memo)) for name, part in parts)
    if id(value) not in memo:
        memo[id(value)] = Content(value)
    return memo[id(value)]


def is_hashable(value: Any) -> bool:
    """Whether a value itself can be a key."""
    try:
        hash(value)
    except (TypeError, ValueError):  # the latter of a memoryview that can be written to
        return False
    return True


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _content(value: Any, seen: dict[int, int]) -> Hashable:
    """What a value holds, at any depth; `seen` are objects on the way, which may be a circle."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind, tuple(_content(part, seen) for part in value)
    if is_hashable(value):
        return kind, value
    if isinstance(value, jax.Array):
        return _Same(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if id(value) in seen:
        return kind, seen[id(value)]
    seen[id(value)] = len(seen)
    attributes = tuple((name, _content(part, seen)) for name, part in _attributes(value))
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, _content(value.tolist(), seen)
    if isinstance(value, list | deque):
        return kind, tuple(_content(part, seen) for part in value), attributes
    if isinstance(value, set):
        return kind, frozenset(value), attributes
    if isinstance(value, dict):
        items = tuple((_content(k, seen), _content(v, seen)) for k, v in value.items())
        return kind, items, attributes
    if not hasattr(value, "__dict__") and not attributes:
        raise TypeError(f"what a {kind.__name__} holds cannot be told")
    return kind, attributes


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object of somebody's class holds, in slots too."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return list(found.items())
