"""How a native product of codes is spread over devices: by batch, by rows, by columns, by k.

Each device multiplies what it has. Where the contracted axes are shared among devices, as in the
gradient of a weight under data parallelism, the int32 sums are added up before they are scaled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fewbit.kernels._partition import described, mesh_axes, ways_of, whole_everywhere


def free_axes(shape: Sequence[Any], *taken: Sequence[int]) -> list[int]:
    """Axes of an operand that are in none of the lists.

    >>> free_axes((2, 3, 4), (1,), ())
    [0, 2]
    """
    return [a for a in range(len(shape)) if not any(a in axes for axes in taken)]


def axes_of_result(numbers: Any, lhs: Sequence[Any], rhs: Sequence[Any]) -> tuple[Any, ...]:
    """What the axes of the result are, given something (a size, a name) per axis of the operands.

    >>> axes_of_result((((1,), (0,)), ((), ())), 'mk', 'kn')
    ('m', 'n')
    """
    (lc, rc), (lb, rb) = numbers
    left = [lhs[a] for a in (*lb, *free_axes(lhs, lc, lb))]
    return (*left, *(rhs[a] for a in free_axes(rhs, rc, rb)))


def spread_codes(
    call: Callable[..., jax.Array],
    scaled: Callable[..., jax.Array],
    operands: tuple[jax.Array, ...],
    spec: Any,
) -> jax.Array:
    """`call(*operands, spec=spec)` (lhs, rhs and their scales), shared by the devices."""
    ranks = tuple(operand.ndim for operand in operands)
    with described(call, spec, ranks):
        return _spreading(call, scaled, spec, ranks)(*operands)


@functools.lru_cache(maxsize=1024)
def _spreading(call: Any, scaled: Any, spec: Any, ranks: tuple[int, ...]) -> Any:
    names = _names(spec.numbers, ranks, spec.out_dtype != "int32")

    @custom_partitioning
    def run(*operands):
        return call(*operands, spec=spec)

    def partition(mesh, operands, result):
        if mesh.empty:
            return whole_everywhere(mesh, functools.partial(call, spec=spec), operands, result)
        place = dict(zip(names[-1], mesh_axes(result, mesh), strict=True))
        used = {name for entry in place.values() for name in entry or ()}
        summed: list[str] = []
        for name in (n for n in names[0] if n.startswith("k")):
            found = [
                mesh_axes(operand, mesh)[mine.index(name)]
                for operand, mine in zip(operands[:2], names[:2], strict=True)
            ]
            entry = found[0] if found[1] is None else found[1]
            axes = entry or ()
            # What fills up the last part of an uneven split is no number, and would be summed.
            even = operands[0].shape[names[0].index(name)] % ways_of(mesh, entry) == 0
            if even and found[0] in (None, entry) and not used & set(axes):
                place[name] = entry
                used |= set(axes)
                summed += axes
        inputs = tuple(
            NamedSharding(mesh, PartitionSpec(*(place.get(n) for n in own))) for own in names[:-1]
        )
        output = NamedSharding(mesh, PartitionSpec(*(place[n] for n in names[-1])))
        if not summed:
            return mesh, functools.partial(call, spec=spec), output, inputs
        return mesh, functools.partial(add_up, tuple(summed)), output, inputs

    def add_up(axes, lhs, rhs, lhs_scale, rhs_scale):
        none = jnp.zeros((0,), jnp.float32)
        total = call(lhs, rhs, none, none, spec=dataclasses.replace(spec, out_dtype="int32"))
        total = jax.lax.psum(total, axes)
        return total if spec.out_dtype == "int32" else scaled(total, lhs_scale, rhs_scale, spec)

    rule = ", ".join(" ".join(own) for own in names[:-1]) + " -> " + " ".join(names[-1])
    run.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return run


def _names(numbers: Any, ranks: tuple[int, ...], scaled: bool) -> list[tuple[str, ...]]:
    """A name for every axis of lhs, rhs, their scales and the result; equal axes, equal names."""
    (lc, rc), (lb, rb) = numbers
    sides = []
    for letter, rank, summed, batch in (("m", ranks[0], lc, lb), ("n", ranks[1], rc, rb)):
        names = [f"{letter}{axis}" for axis in range(rank)]
        for kind, axes in (("k", summed), ("b", batch)):
            for i, axis in enumerate(axes):
                names[axis] = f"{kind}{i}"
        sides.append(tuple(names))
    lhs, rhs = sides
    batch = tuple(lhs[a] for a in lb)
    if scaled:
        scales = [(*batch, *(n for n in own if n[0] in "mn")) for own in sides]
    else:
        scales = [("left",), ("right",)]
    return [lhs, rhs, *scales, axes_of_result(numbers, lhs, rhs)]
