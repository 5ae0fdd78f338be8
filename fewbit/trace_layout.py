"""Primitives that move a weight's elements without changing them: what a trace sees through.

Each takes its equation and the sources of its operands, the first of them a parameter's `Origin`,
and says where the axes of each result come from; None if the elements change after all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp

from fewbit.jaxprs import Eqn
from fewbit.provenance import Atom, Origin, Source, reshape_axes

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
