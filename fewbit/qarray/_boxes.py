"""Parts of a QArray in partitioning boxes or in Variables of NNX, and the mesh axes that they keep.

Both are known by what they offer: no framework is imported here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fewbit.qarray._type import QArray, WithAux, is_stored, is_variable, parts_of

# --- Partitioning boxes ---------------------------------------------------------------------------


def is_box(value: Any) -> bool:
    """Whether a tree node is a framework's partitioning box around a parameter."""
    return hasattr(value, "unbox") and hasattr(value, "replace_boxed")


def is_leaf(value: Any) -> bool:
    """Whether a tree of parameters ends in this node: one that is quantized, or in a box."""
    return is_stored(value) or is_box(value)


def rebox(q: QArray, boxed: QArray | None, box: Any = None) -> QArray:
    """Put partitioning boxes on the parts: those of the template, or the float parameter's own."""
    if boxed is not None:
        parts = parts_of(q).items()
        new = {name: box_part(getattr(boxed, name), part, q.shape) for name, part in parts}
        return q.replace(**new)
    return q if box is None else box_parts(q, box)


def box_parts(q: QArray, box: Any) -> QArray:
    """Each part in a box like the float parameter's, with the axis names that it keeps."""
    return jax.tree.map(lambda part: box_part(box, part, q.shape), q)


def box_part(box: Any, part: Any, whole: Sequence[int]) -> Any:
    """A part of an array of shape `whole` in a box like that one's.

    It has no axis name where it is one wide, nor on tiles that the mesh in force does not divide.
    """
    names, new = getattr(box, "names", None), box.replace_boxed(part)
    if names is None:
        return new
    return new.replace(names=kept_names(names, part.shape, whole, _devices_along(box)))


def _devices_along(box: Any) -> Callable[[Any], int]:
    """On how many devices a name of the box spreads an axis; 1 if no mesh is known."""
    mesh = getattr(box, "mesh", None)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    linen = sys.modules.get("flax.linen")
    logical = hasattr(box, "rules") and linen is not None

    def count(name: Any) -> int:
        entry = name
        if (
            logical and name is not None and not mesh.empty
        ):  # names of logical axes, which rules translate
            (entry,) = linen.logical_to_mesh_axes((name,), box.rules)  # type: ignore[union-attr]
        return _ways(mesh, entry)

    return count


def _ways(mesh: Any, name: Any) -> int:
    """How many devices of a mesh an axis of this name is spread over; 1 if it has no such axis."""
    axes = name if isinstance(name, tuple | list) else (name,)
    return math.prod(dict(mesh.shape).get(axis, 1) for axis in axes)


def kept_names(
    names: Sequence[Any],
    part: Sequence[int],
    whole: Sequence[int],
    devices: Callable[[Any], int] = lambda name: 1,
) -> tuple[Any, ...]:
    """The mesh axes of a scale, given its weight's: none where it is one wide.

    Names may be fewer than axes: the last axes have none then. `devices` tells on how many a name
    spreads an axis: tiles that these do not divide are on all of them.

    >>> kept_names(('data', 'model'), (1, 8), (64, 8)), kept_names(('data',), (64, 1), (64, 8))
    ((None, 'model'), ('data', None))
    >>> kept_names(('data', 'model'), (3, 8), (96, 8), lambda name: 2)
    (None, 'model')
    """
    full = (*names, *[None] * (len(whole) - len(names)))
    return tuple(
        None if n != m and (n == 1 or n % devices(name)) else name
        for name, n, m in zip(full, part, whole, strict=True)
    )


def unbox_parts(q: QArray) -> QArray:
    """A QArray without boxes on its parts."""
    return jax.tree.map(lambda x: unboxed(x) if is_box(x) else x, q, is_leaf=is_box)


def unboxed(box: Any) -> Any:
    """What is in a box, as it is: under a mesh, `unbox()` would place it too (even a QArray)."""
    try:
        return box.unbox(apply_constraint=False)
    except TypeError:  # a box of another kind, which never places anything
        return box.unbox()


# --- Variables ------------------------------------------------------------------------------------

PART = "stored_part"  # metadata of a part: (where axes are named, its own names, its weight's)
MESH_AXES = ("out_sharding", "sharding_names", "sharding")  # metadata that names mesh axes


def is_part(value: Any) -> bool:
    """Whether this is a Variable that holds a part of a stored parameter."""
    return is_variable(value) and PART in value.get_metadata()


def in_variables(stored: Any, like: Any) -> Any:
    """A stored parameter with each part in a Variable like this one, which may name mesh axes."""
    metadata = like.get_metadata()
    q = stored.array if isinstance(stored, WithAux) else stored
    named, devices = weight_axes(metadata), devices_of(metadata)

    def part(array: Any) -> Any:
        new = like.replace(array)
        own = {axes: _names_of_part(names, array, q, devices) for axes, names in named.items()}
        kept = tuple((axes, own[axes], names) for axes, names in named.items())
        new.set_metadata(**own, **{PART: kept})
        return new

    return jax.tree.map(part, stored)


def weight_axes(metadata: Any) -> dict[str, tuple[Any, ...]]:
    """The mesh axes that metadata names; of a part those that its weight has, packed or not."""
    found = {axes: metadata.get(axes) for axes in MESH_AXES}
    known = {axes: tuple(getattr(x, "spec", x)) for axes, x in found.items() if x}
    for axes, own, whole in metadata.get(PART, ()):
        if known.get(axes) == own:  # and no transform of NNX has added or removed an axis since
            known[axes] = whole
    return known


def devices_of(metadata: Any) -> Callable[[Any], int]:
    """On how many devices a name that metadata has, logical or not, spreads an axis."""
    mesh = metadata.get("mesh") or jax.sharding.get_abstract_mesh()
    spmd, rules = sys.modules.get("flax.core.spmd"), metadata.get("sharding_rules") or ()
    if spmd is not None:
        rules = spmd.composite_rules(spmd.get_logical_axis_rules(), rules)
    known = dict(rules)
    return lambda name: _ways(mesh, known.get(name, name))


def _names_of_part(
    names: tuple[Any, ...], part: Any, q: Any, devices: Callable[[Any], int]
) -> tuple[Any, ...]:
    """The mesh axes of a part: those of the weight's that it has, if the mesh divides it there."""
    if not isinstance(q, QArray) or q.layout == "panels":  # behind the stack axes lie panels
        lead = zip(names, part.shape, getattr(q, "lead", ()), strict=False)
        kept = [name if n == m else None for name, n, m in lead]
        return (*kept, *[None] * (len(part.shape) - len(kept)))
    if len(part.shape) != q.ndim:
        return (None,) * len(part.shape)
    own = kept_names(names, part.shape, q.shape, devices)
    return (*own[:-1], None) if part is q.data and q.layout == "bits" else own
