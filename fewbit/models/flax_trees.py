"""Flax's own containers of parameters, for files: FrozenDict, partitioning boxes, NNX states."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.core
import flax.linen as nn
import numpy as np
from flax import nnx

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
    if isinstance(value, nnx.Module):
        value = nnx.state(value)
    return nnx.to_pure_dict(value) if isinstance(value, nnx.State) else value


def is_nnx(value: Any) -> bool:
    """Whether this is an NNX model or state."""
    return isinstance(value, nnx.Module | nnx.State)


def filled(template: Any, fill: Callable[[Any], Any]) -> Any:
    """A model or state like the template with the values that `fill` makes of its pure dict."""
    graph, state = (None, template) if isinstance(template, nnx.State) else nnx.split(template)
    values = fill(nnx.to_pure_dict(state))
    new = nnx.from_flat_state(
        (path, _with_value(old, functools.reduce(operator.getitem, path, values)))
        for path, old in nnx.to_flat_state(state)
    )
    return new if graph is None else nnx.merge(graph, new)


def _with_value(old: Any, value: Any) -> Any:
    """A Variable, or an array that is a plain attribute, with another value."""
    if isinstance(old, nnx.Variable):
        return old.replace(value)
    return np.asarray(value) if isinstance(old, np.ndarray) else value
