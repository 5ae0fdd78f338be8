"""Flax's own containers of parameters, for files: FrozenDict, partitioning boxes, NNX states."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.core
import flax.linen as nn
import numpy as np
from flax import nnx

from fewbit.kernels import unpack as unpacked
from fewbit.models._flax_parts import joined, split_parts
from fewbit.qarray import (
    HowToQuantize,
    PanelArray,
    QArray,
    WithAux,
    apart,
    is_stored,
    pack,
    repack,
    unpack,
)

_BOXES = {"Partitioned": nn.Partitioned, "LogicallyPartitioned": nn.LogicallyPartitioned}


def is_frozen_dict(value: Any) -> bool:
    """Whether a tree node is Flax's immutable dict."""
    return isinstance(value, flax.core.FrozenDict)


def frozen_dict(items: dict[str, Any]) -> Any:
    """Flax's immutable dict of these items."""
    return flax.core.FrozenDict(items)


def box_names(box: Any) -> tuple[str, list[Any]] | None:
    """Class and axis names of a partitioning box; None for a box of another kind.

    >>> box_names(nn.Partitioned(None, names=('model', None)))
    ('Partitioned', ['model', None])
    """
    for name, kind in _BOXES.items():
        if type(box) is kind:
            return name, [list(n) if isinstance(n, tuple) else n for n in box.names]
    return None


def make_box(kind: str, names: list[Any], value: Any) -> Any:
    """The box again. Meshes and rules are a machine's own and not part of it."""
    own: Any = tuple(tuple(n) if isinstance(n, list) else n for n in names)
    return _BOXES[kind](value, names=own)


def pure(value: Any) -> Any:
    """An NNX model or state as nested dicts of its values; anything else as it is.

    >>> sorted(pure(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    ['bias', 'kernel']
    """
    return nnx.to_pure_dict(nnx.state(with_wholes(value))) if is_nnx(value) else value


def with_wholes(value: Any) -> Any:
    """An NNX model with each stored weight in one Variable; a state as it is."""
    return joined(value) if isinstance(value, nnx.Module) else value


def is_nnx(value: Any) -> bool:
    """Whether this is an NNX model or state."""
    return isinstance(value, nnx.Module | nnx.State)


def filled(template: Any, fill: Callable[[Any], Any]) -> Any:
    """A model or state like the template with the values that `fill` makes of its pure dict."""
    is_state = isinstance(template, nnx.State)
    graph, state = (None, template) if is_state else nnx.split(joined(template))
    values = nnx.to_pure_dict(state)
    values = apart(unpacked(fill(with_whole_weights(values)))) if is_state else fill(values)
    new = nnx.from_flat_state(
        (path, _with_value(old, functools.reduce(operator.getitem, path, values)))
        for path, old in nnx.to_flat_state(state)
    )
    return new if graph is None else split_parts(nnx.merge(graph, new))


def with_whole_weights(tree: Any) -> Any:
    """A pure dict of a state in which the parts of a stored weight are one leaf.

    Its type is that of its codes, and `how` tells nothing.
    """
    if not isinstance(tree, dict):
        return tree
    parts = tree.get("array")
    is_weight = isinstance(parts, dict) and {"qvalue", "scale"} <= set(parts)
    if set(tree) == {"array"} and (is_weight or not isinstance(parts, dict)):
        array = QArray(**parts) if isinstance(parts, dict) else parts
        return WithAux(array, HowToQuantize(qtype="int8"))
    return {key: with_whole_weights(value) for key, value in tree.items()}


def _with_value(old: Any, value: Any) -> Any:
    """A Variable, or an array that is a plain attribute, with another value."""
    if isinstance(old, nnx.Variable):
        held = old.get_value()
        if isinstance(held, WithAux) and isinstance(value, WithAux) and is_stored(held.array):
            like = held.array
            q = unpack(value.array)
            if isinstance(like, PanelArray):
                q = repack(q, like)
            value = value.replace(array=pack(q) if like.layout == "bits" else q)
        return old.replace(value)
    return np.asarray(value) if isinstance(old, np.ndarray) else value
