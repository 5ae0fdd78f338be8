"""NNX objects as structure: what a call changed besides the values of Variables."""

from typing import Any

import jax
from flax import nnx

from fewbit.calls import is_array
from fewbit.engine import is_stored


def value_of(variable: Any) -> Any:
    """A Variable's value; arrays that are plain attributes stand for themselves."""
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def is_object(value: Any) -> bool:
    """Whether a tree's node is one thing to us: an NNX object or a stored parameter."""
    return isinstance(value, nnx.Pytree | nnx.Variable) or is_stored(value)


def get_at(nodes: Any, path: tuple[Any, ...]) -> Any:
    """The object at a path below `nodes`."""
    node = nodes
    for key in path:
        inside = isinstance(node, tuple | list | dict)
        node = node[key] if inside else getattr(node, str(key))
    return node


def set_at(nodes: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set an array that is a plain attribute, not a Variable."""
    setattr(get_at(nodes, path[:-1]), path[-1], value)


def take_over(mine: Any, new: Any, seen: list[Any]) -> None:
    """The call made Variables or changed plain attributes: take both over from the twin.

    Variables that were there before have their values already.
    """
    if any(mine is done for done in seen) or isinstance(mine, nnx.Variable):
        return
    seen.append(mine)
    for name, value in list(vars(new).items()):
        have = vars(mine).get(name)
        if name.startswith("_pytree__") or _is_kept(have, value):
            continue
        if isinstance(value, nnx.Pytree) and type(value) is type(have):
            take_over(have, value, seen)
        else:
            is_data = vars(new)["_pytree__nodes"].get(name, False)
            setattr(mine, name, nnx.data(value) if is_data else value)
    for name in set(vars(mine)) - set(vars(new)):
        delattr(mine, name)


def _is_kept(have: Any, value: Any) -> bool:
    """Whether an attribute holds the same Variables, or the same plain value, as before."""
    if have is value:
        return True
    if type(have) is not type(value) or isinstance(value, nnx.Pytree):
        return False
    if isinstance(value, nnx.Variable):
        return True
    old: Any
    mine, old = jax.tree.flatten(have, is_leaf=is_object)
    theirs, new = jax.tree.flatten(value, is_leaf=is_object)
    return old == new and all(
        type(a) is type(b) and (isinstance(a, nnx.Variable) or (not is_array(a) and a == b))
        for a, b in zip(mine, theirs, strict=True)
    )
