"""Calls: which parts of a call's arguments JAX traces, and which are plain Python.

Arrays (numpy and PRNG keys too) are traced. Python bools, numbers, strings, None and functions are
kept as they are, as in a plain eager call, so that `train=True` and `scale=2.0` keep working.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from fewbit.call_keys import is_hashable, key_of
from fewbit.engine import is_stored

T = TypeVar("T")


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
        if is_hashable(key):
            return key
        return self.treedef, key_of(self.static), self.names

    def merge(self, dynamic: list[Any]) -> Any:
        rest = iter(dynamic)
        return jax.tree.unflatten(
            self.treedef, [next(rest) if s is TRACED else s for s in self.static]
        )


def is_array(value: Any) -> bool:
    """Whether a leaf is traced: an array, concrete or abstract, or a quantized parameter."""
    return isinstance(
        value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    ) or is_stored(value)


def split_call(
    tree: Any, name: Callable[[tuple[Any, ...]], str | None] | None = None
) -> tuple[list[Any], Call]:
    """Split a tree into its traced leaves and the rest; `name(keypath)` names parameters."""
    if name is None:  # without key paths it is much faster, which an eager call notices
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_stored)
        static = tuple(TRACED if is_array(value) else value for value in leaves)
        return [v for v, s in zip(leaves, static, strict=True) if s is TRACED], Call(
            treedef, static, ()
        )
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
    traced = [(key, value) for key, value in flat if is_array(value)]
    static = tuple(TRACED if is_array(value) else value for _, value in flat)
    return [v for _, v in traced], Call(treedef, static, tuple(name(key) for key, _ in traced))


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
    if not any(isinstance(leaf, Kept) for leaf in jax.tree.leaves(tree, is_leaf=_is_kept)):
        return tree
    return jax.tree.map(lambda v: v.value if _is_kept(v) else v, tree, is_leaf=_is_kept)


def _is_kept(value: Any) -> bool:
    return isinstance(value, Kept)


def key_name(keypath: tuple[Any, ...]) -> str:
    """A pytree key path as a parameter path: `layers/0/kernel`."""
    return "/".join(_part(key) for key in keypath)


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")


class _Hashed:
    """A key that is hashed once: a model's structure is large."""

    __slots__ = ("hash", "key")

    def __init__(self, key: Hashable):
        self.key, self.hash = key, hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.key == other.key


class Cache(Generic[T]):
    """A small least-recently-used map that gives up on keys which cannot be hashed.

    (`call_keys` makes keys of most things that cannot.)
    """

    def __init__(self, size: int = 64):
        self.size, self.entries = size, OrderedDict[_Hashed, T]()

    def get(self, key: Callable[[], Hashable], make: Callable[[], T]) -> T:
        try:
            wanted = _Hashed(key())
        except TypeError:
            return make()
        if wanted not in self.entries:
            self.entries[wanted] = make()
            if len(self.entries) > self.size:
                self.entries.popitem(last=False)
        self.entries.move_to_end(wanted)
        return self.entries[wanted]

    def latest(self, matches: Callable[[Any], bool]) -> T | None:
        """The entry that was used last among those whose key matches."""
        return next((v for k, v in reversed(self.entries.items()) if matches(k.key)), None)
