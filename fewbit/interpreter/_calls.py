"""Calls: which parts of a call's arguments JAX traces, and which are plain Python.

Arrays (numpy and PRNG keys too) are traced. Python bools, numbers, strings, None and functions are
kept as they are, as in a plain eager call, so that `train=True` and `scale=2.0` keep working.
"""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from fewbit.qarray import is_stored

# --- Keys of caches for what Python cannot hash: configs, lists and dicts that models hold --------

# Of one key alone, while its values are alive: many modules, one config.
Memo = dict[int, "Content"]


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
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
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


# --- The two sides of a call ----------------------------------------------------------------------

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class Traced:
    """Marks the place of a traced leaf among the static ones."""


TRACED = Traced()


@dataclass(frozen=True)
class Call:
    """The static side of a tree: its structure, the leaves that are no arrays, each leaf's name."""

    treedef: Any
    static: tuple[Any, ...]
    names: tuple[str | None, ...]  # one per traced leaf

    @property
    def key(self) -> Hashable:
        """What a cache may key on: True, 1 and 1.0 differ; TypeError if there is no such key."""
        key = (self.treedef, tuple((type(s), s) for s in self.static), self.names)
        return key if is_hashable(key) else (self.treedef, key_of(self.static), self.names)

    def merge(self, dynamic: list[Any]) -> Any:
        rest = iter(dynamic)
        leaves = [next(rest) if s is TRACED else s for s in self.static]
        return jax.tree.unflatten(self.treedef, leaves)


def is_array(value: Any) -> bool:
    """Whether a leaf is traced: an array, concrete or abstract, or a quantized parameter."""
    return isinstance(value, _ARRAYS) or is_stored(value)


def split_call(
    tree: Any, name: Callable[[tuple[Any, ...]], str | None] | None = None
) -> tuple[list[Any], Call]:
    """Split a tree into its traced leaves and the rest; `name(keypath)` names parameters."""
    names: tuple[str | None, ...] = ()
    if name is None:  # without key paths it is much faster, which an eager call notices
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_stored)
    else:
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
        leaves = [value for _, value in flat]
        names = tuple(name(key) for key, value in flat if is_array(value))
    static = tuple(TRACED if is_array(value) else value for value in leaves)
    traced = [v for v, s in zip(leaves, static, strict=True) if s is TRACED]
    return traced, Call(treedef, static, names)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Kept:
    """A result that is no array, where JAX wants arrays only: part of the result's structure.

    >>> given_back(jax.jit(lambda x: kept({'name': 'up', 'x': x}))(1.5))
    {'name': 'up', 'x': Array(1.5, dtype=float32, weak_type=True)}
    """

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, _: Any) -> "Kept":
        return cls(value)


def kept(tree: Any) -> Any:
    """A result of which JAX traces the arrays."""
    return jax.tree.map(lambda v: v if is_array(v) else Kept(v), tree, is_leaf=is_stored)


def given_back(tree: Any) -> Any:
    """The inverse of `kept`."""
    if not any(map(_is_kept, jax.tree.leaves(tree, is_leaf=_is_kept))):
        return tree
    return jax.tree.map(lambda v: v.value if _is_kept(v) else v, tree, is_leaf=_is_kept)


def _is_kept(value: Any) -> bool:
    return isinstance(value, Kept)


class Hashed:
    """A key that is hashed once: a model's structure is large."""

    __slots__ = ("hash", "key")

    def __init__(self, key: Hashable):
        self.key, self.hash = key, hash(key)  # or a TypeError

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self.key == other.key


class Cache(Generic[T]):
    """A small least-recently-used map that gives up on keys which cannot be hashed.

    (`key_of` makes keys of most things that cannot.)
    """

    def __init__(self, size: int = 64):
        self.size, self.entries = size, OrderedDict[Hashed, tuple[Hashed, T]]()

    def get(self, key: Callable[[], Hashable], make: Callable[[], T]) -> T:
        try:
            wanted = Hashed(key())
        except TypeError:
            return make()
        found = self.entries.get(wanted)
        if found is None:
            found = self.entries[wanted] = (wanted, make())
            if len(self.entries) > self.size:
                self.entries.popitem(last=False)
        own, value = found
        self.entries.move_to_end(own)  # the key that is there: comparing takes longer than moving
        return value

    def latest(self, matches: Callable[[Any], bool]) -> T | None:
        """The entry that was used last among those whose key matches."""
        return next((v for k, v in reversed(self.entries.values()) if matches(k.key)), None)
