"""Places of values among the inputs and results of an NNX call.

What a call returns may be an input as it came, something computed, or one of the caller's own
objects; a cached call must know which without running the method again, so places are static.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from fewbit.calls import Call, is_array
from fewbit.engine import is_stored
from fewbit.models.nnx_structure import is_object, value_of

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Node:
    """The place of an NNX object among a call's arguments."""

    index: int


@dataclass(frozen=True)
class In:
    """A value that is traced input `number`."""

    number: int


@dataclass(frozen=True)
class New:
    """A value that is computed: number `number` of an outcome's arrays."""

    number: int


@dataclass(frozen=True)
class Object:
    """A result that is one of the caller's own modules or Variables."""

    path: Path


def refer(result: Any, nodes: tuple[Any, ...]) -> Any:
    """A method's result with the twin's modules and Variables replaced by their paths."""
    found: dict[int, Path] = {}

    def place(value):
        if not isinstance(value, nnx.Pytree | nnx.Variable):
            return value
        if not found:
            found.update((id(node), path) for path, node in nnx.iter_graph(nodes))
        return Object(found[id(value)]) if id(value) in found else value

    return jax.tree.map(place, result, is_leaf=is_object)


# A treedef, and for each leaf its place or, if it is no array, the leaf itself.
Slots = tuple[Any, tuple[Any, ...]]


@jax.tree_util.register_pytree_node_class
@dataclass
class After:
    """A twin after its call: output and state as arrays, everything else static.

    `graphdef` is None when the structure did not change.
    """

    arrays: list[Any]
    out: Call
    state: tuple[tuple[Path, Call], ...]
    graphdef: Any

    def tree_flatten(self):
        return (self.arrays,), (self.out, self.state, self.graphdef)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)


@jax.tree_util.register_pytree_node_class
@dataclass
class Outcome:
    """What leaves the jit: new arrays. The rest is static, so that a cached call knows it too."""

    new: list[Any]
    out: Slots
    writes: tuple[tuple[Path, Slots], ...]
    structure: Any  # (graphdef, every Variable's slots), or None

    def tree_flatten(self):
        return (self.new,), (self.out, self.writes, self.structure)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)


def input_slots(variables: dict[Path, Any]) -> dict[Path, Slots]:
    """Where each Variable's value comes from when a call begins."""
    number, found = 0, {}
    for path, variable in variables.items():
        leaves, treedef = jax.tree.flatten(value_of(variable), is_leaf=is_stored)
        places: list[Any] = []
        for leaf in leaves:
            places.append(In(number) if is_array(leaf) else leaf)
            number += is_array(leaf)
        found[path] = (treedef, tuple(places))
    return found
