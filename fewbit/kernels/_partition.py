"""How native calls are spread over devices: rows (or images) of x, whole panels of columns.

XLA cannot look into a native call; unless it is told, it gathers every operand on every device.
Told the rule below, each device multiplies its rows by its panels, and nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from fewbit.packing_panels import COLUMNS

Local = Callable[..., jax.Array]  # on one device: local(*operands, spec=spec)


def spread(local: Local, operands: tuple[jax.Array, ...], spec: Any, rule: str) -> jax.Array:
    """`local(*operands, spec=spec)`, which devices share by rows and panels.

    `rule` names the axes of operands and result as an einsum of factors: 'm' are rows, the first
    axis of the result; 'p' are panels, which its last axis '(p c)' is made of if they can be shared
    (`shares_panels`). `spec` has `n`, the number of columns.
    """
    return _spreading(local, spec, rule)(*operands)


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
        if not isinstance(result.sharding, NamedSharding):  # a mesh without names: whole everywhere
            devices = tuple(sorted(result.sharding.device_set, key=lambda d: d.id))
            whole = type(result.sharding).get_replicated(devices)
            return mesh, functools.partial(local, spec=spec), whole, (whole,) * len(operands)
        places = (*result.sharding.spec, *[None] * (len(between) + 2))[: len(between) + 2]
        rows, columns = places[0] if right[0] == "m" else None, places[-1]
        ways = 1
        for name in (columns,) if isinstance(columns, str) else columns or ():
            ways *= mesh.shape[name]
        if not by_panels or (spec.n // COLUMNS) % ways:
            columns, ways = None, 1
        mine = dataclasses.replace(spec, n=spec.n // ways) if ways > 1 else spec
        shared = {"m": rows, "p": columns}
        inputs = tuple(
            NamedSharding(mesh, PartitionSpec(*map(shared.get, operand))) for operand in factors
        )
        output = NamedSharding(mesh, PartitionSpec(rows, *between, columns))
        return mesh, functools.partial(local, spec=mine), output, inputs

    run.def_partition(partition, sharding_rule=rule)
    return run


def weight_rule(panel: str, has_zero: bool) -> list[str]:
    """The factors of a packed weight: data, scale, zero, tensor_scale, layer.

    >>> weight_rule('p', False)
    ['e p b w c d', 'e p g c', 'z', '', '']
    """
    part = f"e {panel} g c"
    return [f"e {panel} b w c d", part, part if has_zero else "z", "", ""]
