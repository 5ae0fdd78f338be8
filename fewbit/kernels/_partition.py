"""How native calls are spread over devices: rows (or images) of x, whole panels of columns.

XLA cannot look into a native call; unless it is told, it gathers every operand on every device.
Told the rule below, each device multiplies its rows by its panels, and nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from fewbit._version import __version__
from fewbit.packing_panels import COLUMNS

Local = Callable[..., jax.Array]  # on one device: local(*operands, spec=spec)


def spread(local: Local, operands: tuple[jax.Array, ...], spec: Any, rule: str) -> jax.Array:
    """`local(*operands, spec=spec)`, which devices share by rows and panels.

    `rule` names the axes of operands and result as an einsum of factors: 'm' are rows, the first
    axis of the result; 'p' are panels, which its last axis '(p c)' is made of if they can be shared
    (`shares_panels`). `spec` has `n`, the number of columns.
    """
    with described(local, spec, rule):
        return _spreading(local, spec, rule)(*operands)


def described(local: Local, spec: Any, rule: Any) -> Any:
    """A context in which a partitioned call carries in the program what it is.

    The program itself holds nothing of it but the address of a Python object, and addresses come
    again: JAX's compilation cache on disk would take one call's machine code for another's.
    """
    name = f"{local.__module__}.{local.__qualname__}"
    return set_xla_metadata(fewbit_call=f"{__version__} {name} {spec} {rule}")


def ways_of(mesh: Any, names: tuple[str, ...] | None) -> int:
    """Into how many parts mesh axes split an axis."""
    return math.prod(mesh.shape[name] for name in names or ())


def shares_panels(n: int) -> bool:
    """Whether `n` columns are several whole panels.

    >>> shares_panels(128), shares_panels(100)
    (True, False)
    """
    return n > COLUMNS and n % COLUMNS == 0


@custom_partitioning
def _marked(zero: jax.Array) -> jax.Array:
    return zero


def _keep_whole(mesh: Any, operands: Any, result: Any) -> Any:
    return mesh, lambda zero: zero, result.sharding, (result.sharding,)


_marked.def_partition(_keep_whole, sharding_rule=" -> ")


def zero_with_devices() -> jax.Array:
    """An int32 zero that makes JAX keep the devices at hand while it lowers the program.

    It does so for programs in which it sees a `custom_partitioning`; the one of the product comes
    up only in the lowering of our primitive, which is too late.
    """
    return _marked(jnp.zeros((), jnp.int32))


def whole_everywhere(mesh: Any, call: Local, operands: Any, result: Any) -> Any:
    """What a partition gives where the mesh has no names."""
    devices = tuple(sorted(result.sharding.device_set, key=lambda d: d.id))
    whole = type(result.sharding).get_replicated(devices)
    return mesh, call, whole, (whole,) * len(operands)


def mesh_axes(array: Any, mesh: Any) -> list[tuple[str, ...] | None]:
    """The mesh axes, the slowest first, that share each axis of an array; None: nobody does.

    Axes that are cut by a part of a mesh axis count as whole: a reshape before the call may have
    done so, and no PartitionSpec says it.
    """
    rank = len(array.shape)
    # Of an array as wide as there are devices, which every sharding divides.
    places = array.sharding.devices_indices_map((mesh.devices.size,) * rank)
    found: list[tuple[str, ...] | None] = []
    for axis in range(rank):
        starts = np.array([places[d][axis].start or 0 for d in mesh.devices.flat])
        starts = starts.reshape(mesh.devices.shape)
        steps = {}
        for way, name in enumerate(mesh.axis_names):
            line = np.moveaxis(starts, way, 0).reshape(starts.shape[way], -1)[:, 0]
            if len(line) > 1 and line[1] != line[0]:
                steps[name] = int(line[1] - line[0])
        names = tuple(sorted(steps, key=lambda name: -steps[name]))
        ways = math.prod(mesh.shape[name] for name in names)
        found.append(names if 1 < ways == len(np.unique(starts)) else None)
    return found


def alike(args: tuple[jax.Array, ...], *others: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`, operands that vary over the same mesh axes (and those of `others`)."""

    def varying(a):
        return frozenset(jax.typeof(a).manual_axis_type.varying)

    axes = frozenset().union(*map(varying, (*args, *others)))

    def vary(a):
        missing = tuple(axes - varying(a))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return tuple(map(vary, args)) if axes else args


def native_lowering(spread: Local, local: Local, reference: Local, export: Local) -> Any:
    """A primitive's lowering on a CPU.

    `local` on one device, `spread` over known ones, else `reference`, which XLA can always share.
    `export` is for programs that leave this machine; JAX refuses native calls in them.
    """

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        context = ctx.module_context.axis_context
        function = spread
        if ctx.module_context.lowering_parameters.for_export:
            function = export
        elif isinstance(context, mlir.ShardingContext):
            if context.num_devices == 1:
                function = local
            elif context.device_assignment is None:
                function = reference
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, **params)

    return lower


@functools.lru_cache(maxsize=1024)
def _spreading(local: Local, spec: Any, rule: str) -> Any:
    left, _, right = rule.partition(" -> ")
    factors = [operand.split() for operand in left.split(",")]
    by_panels = right.endswith("(p c)")
    between = [None] * (len(right.replace("(p c)", "p").split()) - 2)

    @custom_partitioning
    def run(*operands):
        return local(*operands, spec=spec)

    def partition(mesh, operands, result):
        if mesh.empty:
            return whole_everywhere(mesh, functools.partial(local, spec=spec), operands, result)
        places = mesh_axes(result, mesh)
        rows, columns = places[0] if right[0] == "m" else None, places[-1]
        ways = ways_of(mesh, columns)
        if not by_panels or (spec.n // COLUMNS) % ways:
            columns, ways = None, 1
        mine = dataclasses.replace(spec, n=spec.n // ways) if ways > 1 else spec
        shared = {"m": rows, "p": columns}
        inputs = tuple(
            NamedSharding(mesh, PartitionSpec(*map(shared.get, operand))) for operand in factors
        )
        output = NamedSharding(mesh, PartitionSpec(rows, *between, columns))
        return mesh, functools.partial(local, spec=mine), output, inputs

    run.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return run


def weight_rule(panel: str, has_zero: bool) -> list[str]:
    """The factors of a packed weight: data, scale, zero, tensor_scale, layer.

    >>> weight_rule('p', False)
    ['e p b u c d', 'e p g c', 'z', '', '']
    """
    part = f"e {panel} g c"
    return [f"e {panel} b u c d", part, part if has_zero else "z", "", ""]
