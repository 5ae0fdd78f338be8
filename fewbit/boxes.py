"""Partitioning boxes around parameters, by their documented interface: no framework is imported."""

from collections.abc import Sequence
from typing import Any

import jax

from fewbit.qarray import QArray


def is_box(value: Any) -> bool:
    """Whether a tree node is a framework's partitioning box around a parameter."""
    return hasattr(value, "unbox") and hasattr(value, "replace_boxed")


def rebox(q: QArray, boxed: QArray | None, box: Any = None) -> QArray:
    """Put partitioning boxes on the parts: those of the template, or the float parameter's own."""
    if boxed is not None:
        parts = {"qvalue": q.qvalue, "scale": q.scale, "zero_point": q.zero_point}
        new = {
            name: getattr(boxed, name).replace_boxed(part) if part is not None else None
            for name, part in parts.items()
        }
        return q.replace(**new)
    if box is None:
        return q
    return box_parts(q, box)


def box_parts(q: QArray, box: Any) -> QArray:
    """Each part in a box like the float parameter's, without axis names where it is one wide."""

    def boxed(part):
        names = getattr(box, "names", None)
        new = box.replace_boxed(part)
        if names is None:
            return new
        return new.replace(names=kept_names(names, part.shape, q.shape))

    return jax.tree.map(boxed, q)


def kept_names(names: Sequence[Any], part: Sequence[int], whole: Sequence[int]) -> tuple[Any, ...]:
    """The mesh axes of a scale, given its weight's: none where it is one wide.

    Names may be fewer than axes: the last axes have none then.

    >>> kept_names(('data', 'model'), (1, 8), (64, 8)), kept_names(('data',), (64, 1), (64, 8))
    ((None, 'model'), ('data', None))
    """
    full = (*names, *[None] * (len(whole) - len(names)))
    return tuple(
        None if n == 1 and m != 1 else name for name, n, m in zip(full, part, whole, strict=True)
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
