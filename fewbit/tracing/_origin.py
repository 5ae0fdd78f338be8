"""Where an array comes from: a parameter leaf, seen through layout operations only.

A weight is whatever an input leaf reaches through casts, transposes, reshapes and slices. Each axis
of the array a product sees is written as a list of *atoms*, pieces of the leaf's own axes, so that
the granularity an op wants for its operand can be said in terms of the stored leaf, whatever
reshaping stands between them. A leaf axis that is absent from the operand (the layer axis of a
scan-stacked weight) simply has no atom there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp

from fewbit.qarray import Atom, reshape_axes, whole_axes
from fewbit.tracing._jaxprs import Eqn


@dataclass(frozen=True)
class Origin:
    """An array that is a parameter leaf up to layout; `axes[i]` are the atoms of its axis i.

    `picked` are the layer scans that took one entry of the leaf each, outermost first: the depth of
    the scan, and the atoms it went over. `parted` names the primitive that left out or turned round
    a part of the leaf.
    """

    leaf: str
    leaf_shape: tuple[int, ...]
    axes: tuple[tuple[Atom, ...], ...]
    picked: tuple[tuple[int, tuple[Atom, ...]], ...] = ()
    parted: str | None = None

    @staticmethod
    def of_leaf(leaf: str, shape: Sequence[int]) -> "Origin":
        return Origin(leaf, tuple(shape), whole_axes(shape))

    def with_axes(self, axes: Sequence[tuple[Atom, ...]]) -> "Origin":
        return replace(self, axes=tuple(axes))


@dataclass(frozen=True)
class Changed:
    """An array computed from a parameter leaf by something that is not layout (`0.5 * w`)."""

    leaf: str
    primitive: str


@dataclass(frozen=True)
class Constant:
    """An array closed over by the function: not a parameter, so it cannot be replaced."""


@dataclass(frozen=True)
class Written:
    """Numbers that the program itself writes down (a literal, an iota): no data of anybody's."""


Source = Origin | Changed | Constant | Written | None


class TileDoesNotFit(ValueError):
    """A tile asked for on an operand's axis has no counterpart on the stored leaf."""


def leaf_granularity(
    origin: Origin, channelwise: Collection[int], tiled: Mapping[int, int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Say an operand's granularity in the leaf's own axes: (channelwise_axes, tiled_axes).

    An axis of the leaf that the operand does not show is channelwise: another layer of the stack.
    """
    # For each leaf axis, (stride, size, what) of the atoms the operand shows; what is 'C' for a
    # scale per index, 'S' for one shared scale, an int for that many indices per scale.
    seen: dict[int, list[tuple[int, int, str | int]]] = {
        i: [] for i in range(len(origin.leaf_shape))
    }
    for local, atoms in enumerate(origin.axes):
        left = tiled.get(local)
        for atom in reversed(atoms):
            what: str | int = "C" if local in channelwise else "S"
            if left is not None:
                if left > atom.size and left % atom.size == 0:
                    left //= atom.size
                    what = "S"
                elif left <= atom.size and (atom.size % left == 0 or len(atoms) == 1):
                    what, left = (left if left > 1 else "C"), 1
                else:
                    raise TileDoesNotFit(
                        f"a tile of {tiled[local]} on an axis made of "
                        f"{'x'.join(str(a.size) for a in atoms)} does not fall on whole rows of "
                        f"parameter '{origin.leaf}' {origin.leaf_shape}"
                    )
            if atom.axis is not None:
                seen[atom.axis].append((atom.stride, atom.size, what))
    axes_channelwise, axes_tiled = [], {}
    for axis, pieces in seen.items():
        kind = _axis_granularity(
            sorted(pieces, key=lambda piece: piece[:1]), origin.leaf_shape[axis]
        )
        if kind == "C":
            axes_channelwise.append(axis)
        elif isinstance(kind, int):
            axes_tiled[axis] = kind
    return tuple(axes_channelwise), axes_tiled


def _axis_granularity(pieces: list[tuple[int, int, str | int]], size: int) -> str | int:
    """One leaf axis, pieces from minor to major: 'C', 'S' or a tile size."""
    whats = [what for _, _, what in pieces]
    if not pieces or all(what == "C" for what in whats):
        return "C"
    if all(what == "S" for what in whats):
        return "S"
    tile, rest = 1, list(pieces)
    while rest and rest[0][2] == "S":
        tile *= rest.pop(0)[1]
    cut = rest[0][2] if rest and isinstance(rest[0][2], int) else None
    if isinstance(cut, int):
        tile *= cut
        rest.pop(0)
    if all(what == "C" for _, _, what in rest) and tile > 1:
        # A tile as long as its axis is said all the same: some formats are nothing without tiles.
        return tile if tile < size or cut is not None else "S"
    return "C"  # scales vary inside the contraction: stored exactly, the product dequantizes


def leaf_roles(
    origin: Origin,
    summed: Collection[int],
    innermost: Collection[int] = (),
    stacked: Collection[int] = (),
) -> str | None:
    """What a product does with each axis of the leaf: 'l' a stack, 'k' summed over, 'n' a column.

    Axes in `innermost` are summed over too and get 'c': the input channels of a convolution. Axes
    in `stacked` are the groups of a ragged product, or the batch axes of a product.

    None where the product sees only a part of the leaf, or splits an axis between the two: such a
    leaf is no stack of matrices for it.

    >>> leaf_roles(Origin.of_leaf('w', (64, 32)), {0})
    'kn'
    >>> leaf_roles(Origin.of_leaf('kernel', (3, 3, 64, 128)), {0, 1}, {2})
    'kkcn'
    """
    roles = [""] * len(origin.leaf_shape)
    seen = [1] * len(roles)
    for local, atoms in enumerate(origin.axes):
        for atom in atoms:
            if atom.axis is None:
                if atom.size != 1:
                    return None
                continue
            named = (("k", summed), ("c", innermost), ("l", stacked))
            roles[atom.axis] += next((role for role, axes in named if local in axes), "n")
            seen[atom.axis] *= atom.size
    for axis, size in enumerate(origin.leaf_shape):
        if roles[axis] and (seen[axis] != size or len(set(roles[axis])) != 1):
            return None
    text = "".join(role[:1] or "l" for role in roles)
    stack = text.count("l")
    return text if text[:stack] == "l" * stack and {"k", "n"} <= set(text) else None


# --- Primitives that move a weight's elements without changing them: what a trace sees through ----

Moved = Sequence[Source] | None  # None: not layout after all


def _same(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    return [s if isinstance(s, Origin) else None for s in ins[: len(eqn.outvars)]]


def _cast(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    floating = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    return [ins[0]] if floating else None


def _transpose(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    return [ins[0].with_axes([ins[0].axes[a] for a in eqn.params["permutation"]])]


def _reshape(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    axes = reshape_axes(ins[0].axes, eqn.outvars[0].aval.shape)
    return None if axes is None else [ins[0].with_axes(axes)]


def _squeeze(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    drop = eqn.params["dimensions"]
    return [ins[0].with_axes([g for a, g in enumerate(ins[0].axes) if a not in drop])]


def _broadcast(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    old = eqn.invars[0].aval.shape
    at = {out: src for src, out in enumerate(eqn.params["broadcast_dimensions"])}
    axes = []
    for axis, size in enumerate(eqn.outvars[0].aval.shape):
        kept = axis in at and old[at[axis]] == size
        axes.append(ins[0].axes[at[axis]] if kept else (Atom(None, size),))
    return [ins[0].with_axes(axes)]


def _slice(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    return [sliced(ins[0], v.aval.shape, eqn.primitive.name) for v in eqn.outvars]


def _reversed(eqn: Eqn, ins: Sequence[Any]) -> Moved:
    return [replace(ins[0], parted=ins[0].parted or "rev")]


def sliced(source: Origin, shape: Sequence[int], by: str) -> Origin:
    """Part of an axis: its atoms keep their axis; a merged axis that is cut keeps only its size."""
    axes = []
    for group, size in zip(source.axes, shape, strict=True):
        whole = prod(atom.size for atom in group) == size
        first = group[0] if group else Atom(None, 1)
        axes.append(
            group if whole else (Atom(first.axis, size, first.stride),) if len(group) == 1 else ()
        )
    parted = source.parted
    if any(prod(a.size for a in group) != n for group, n in zip(source.axes, shape, strict=True)):
        parted = parted or by
    return replace(source, axes=tuple(axes), parted=parted)


LAYOUT: Mapping[str, Any] = {
    "convert_element_type": _cast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "rev": _reversed,
    "slice": _slice,
    "dynamic_slice": _slice,
    "split": _slice,
    "copy": _same,
    "device_put": _same,
    "sharding_constraint": _same,
    "reshard": _same,
    "pvary": _same,
    "optimization_barrier": _same,
    "stop_gradient": _same,
    "name": _same,
}
