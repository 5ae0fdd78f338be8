"""A stored weight in an NNX model: `WithAux` of a QArray whose parts are Params of their own.

So each part has its dtype, its sharding and its entry in the state, as float weights have. What
traces and runs a model wants one Variable for each of the author's: `join_parts`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fewbit.numerics import format_of
from fewbit.qarray import (
    PART,
    PanelArray,
    QArray,
    WithAux,
    in_variables,
    is_stored,
    is_variable,
    part_values,
    parts_of,
    weight_axes,
)

# Below a Variable or a stored weight the walk ends; an NNX object is changed where it is.
_ENDS = nnx.Pytree | nnx.Variable | WithAux


def _ends(value: Any) -> bool:
    return isinstance(value, _ENDS)


def is_parted(value: Any) -> bool:
    """Whether this is a stored weight with Variables as its parts."""
    return isinstance(value, WithAux) and any(map(is_variable, _parts(value)))


def _parts(weight: WithAux) -> list[Any]:
    return jax.tree.leaves(weight, is_leaf=is_variable)


def whole_variable(weight: Any) -> nnx.Variable:
    """A stored weight in one Variable, of the type of its parts; a Variable as it is."""
    if not is_parted(weight):
        return weight
    part = _parts(weight)[0]
    variable, metadata = part.replace(part_values(weight)), part.get_metadata()
    kept = {name: value for name, value in metadata.items() if name != PART}
    variable.set_metadata(kept | weight_axes(metadata))
    return variable


def put(module: nnx.Module, name: str, value: Any) -> None:
    """Give a parameter another value, stored or not."""
    variable = whole_variable(getattr(module, name)).replace(value)
    setattr(module, name, in_variables(value, variable) if is_stored(value) else variable)


_MSG_LAYOUT = (
    "The weight '{name}' is {own}, and the parts it was given are not so (codes {codes}). Update a "
    "model of their own layout: model = fewbit.{fix}, then nnx.update(model, state)."
)
# What a weight of each layout is called, and what makes a model of it.
_LAYOUTS = {
    "plain": ("not packed at all", "unpack(model)"),
    "panels": ("packed for kernels", "pack(model)"),
    "bits": ("packed in bytes", "pack(model, layout='bits')"),
}


def check_layout(name: str | None, value: Any) -> None:
    """Raise if a weight was given the parts of one that lies otherwise."""
    q = value.array if isinstance(value, WithAux) else value
    if not isinstance(q, QArray):
        return
    codes, scale = q.data, parts_of(q)["scale"]
    in_bytes = codes.dtype == jnp.uint8 and format_of(q.qtype).bits < 8
    given = "panels" if codes.ndim > scale.ndim else "bits" if in_bytes else "plain"
    if given != q.layout:
        own, fix = _LAYOUTS[q.layout][0], _LAYOUTS[given][1]
        text = dict(name=name, own=own, fix=fix, codes=tuple(codes.shape))
        raise ValueError(_MSG_LAYOUT.format(**text))


# --- All weights of a model -----------------------------------------------------------------------


def split_parts(node: Any) -> Any:
    """Every stored weight of a model in parts, in place."""

    def change(value: Any) -> Any:
        stored = isinstance(value, nnx.Variable) and is_stored(value.get_value())
        return in_variables(value.get_value(), value) if stored else value

    return _exchanged(node, change, {})


def join_parts(node: Any) -> Any:
    """Every stored weight of a model in one Variable, in place."""
    return _exchanged(node, lambda value: whole_variable(value) if is_parted(value) else value, {})


def joined(model: Any) -> Any:
    """A twin of a model, or a tuple of them, whose stored weights are one Variable each."""
    graphdef, state = nnx.split(model)
    return join_parts(nnx.merge(graphdef, state))


def whole_values(model: nnx.Module) -> Any:
    """The state as nested dicts, in which a stored weight is a `WithAux` of arrays."""
    return nnx.to_pure_dict(nnx.state(joined(model)))


def _exchanged(value: Any, change: Callable[[Any], Any], done: dict[Any, Any]) -> Any:
    """The value with its weights changed; NNX objects in place, and what is shared stays shared."""
    if isinstance(value, nnx.Pytree):
        if id(value) in done:
            return value
        done[id(value)] = value
        for name, held in list(vars(value).items()):
            if not name.startswith("_pytree__"):
                _exchange(value, name, held, change, done)
        return value
    if isinstance(value, nnx.Variable | WithAux):
        key = id(_parts(value)[0] if isinstance(value, WithAux) else value)
        if key not in done:
            done[key] = change(value), value  # which is kept, so that its id is not given again
        return done[key][0]
    try:
        leaves, treedef = jax.tree.flatten(value, is_leaf=_ends)
    except (TypeError, ValueError):  # a dict that JAX does not take, which holds no parameters
        return value
    new = [_exchanged(leaf, change, done) if _ends(leaf) else leaf for leaf in leaves]
    same = all(a is b for a, b in zip(leaves, new, strict=True))
    return value if same else jax.tree.unflatten(treedef, new)


def _exchange(
    module: nnx.Pytree, name: str, held: Any, change: Callable[[Any], Any], done: dict[Any, Any]
) -> None:
    if not _ends(held) and not isinstance(held, dict | list | tuple):
        return
    new = _exchanged(held, change, done)
    if new is not held:
        setattr(module, name, nnx.data(new))


# --- Stored weights as nodes of NNX graphs --------------------------------------------------------


def _flatten(stored: Any) -> tuple[Any, Any]:
    static = stored.how if isinstance(stored, WithAux) else stored._static
    parts = parts_of(stored)
    return sorted(parts.items()), (type(stored), static, tuple(parts))


def _unflatten(parts: Any, kept: Any) -> Any:
    kind, static, names = kept
    parts = dict(parts)
    if kind is WithAux:
        return WithAux(parts["array"], static)
    return kind.of_parts(static, {name: parts[name] for name in names})


def register_parts() -> None:
    """Let NNX walk through stored weights as fast as through its own containers."""
    for kind in (WithAux, QArray, PanelArray):
        nnx.register_data_type(kind)
        nnx.graphlib.register_pytree_node_type(kind, _flatten, _unflatten)
