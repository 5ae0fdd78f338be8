"""Axes as lists of atoms: pieces of another array's axes, which layout operations regroup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Atom:
    """A piece of one axis: `size` steps of `stride` elements along `axis`."""

    axis: int | None  # None: made by broadcasting, no part of the array
    size: int
    stride: int = 1


Axes = tuple[tuple[Atom, ...], ...]


def whole_axes(shape: Sequence[int]) -> Axes:
    """An array as itself: one atom per axis.

    >>> whole_axes((2, 3))[1]
    (Atom(axis=1, size=3, stride=1),)
    """
    return tuple((Atom(axis, size),) for axis, size in enumerate(shape))


def reshape_axes(axes: Sequence[tuple[Atom, ...]], new_shape: Sequence[int]) -> Axes | None:
    """Regroup atoms for a new shape, splitting those an axis boundary cuts; None if impossible.

    >>> [[atom.size for atom in group] for group in reshape_axes(whole_axes((4, 6)), (8, 3))]
    [[4, 2], [3]]
    """
    queue = [atom for group in axes for atom in group if atom.size != 1]
    out: list[tuple[Atom, ...]] = []
    for need in new_shape:
        group: list[Atom] = []
        while need > 1:
            if not queue:
                return None
            atom = queue.pop(0)
            if need % atom.size == 0:
                group.append(atom)
                need //= atom.size
            elif atom.size % need == 0:
                minor = atom.size // need
                group.append(Atom(atom.axis, need, atom.stride * minor))
                queue.insert(0, Atom(atom.axis, minor, atom.stride))
                need = 1
            else:
                return None
        out.append(tuple(group))
    return tuple(out) if not queue else None
