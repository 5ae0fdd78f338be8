"""How the native product is spread over devices: rows of x, or whole panels of columns.

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

Local = Callable[..., jax.Array]  # the product on one device: local(*operands, spec=Product)


def spread(local: Local, operands: tuple[jax.Array, ...], spec: Any) -> jax.Array:
    """`local(*operands, spec=spec)`, which devices share by rows and panels.

    Operands are those of the primitive: x, act_scale, data, scale, zero, tensor_scale, layer.
    """
    ranks = tuple(operand.ndim for operand in operands)
    return _spreading(local, spec, ranks, operands[1].shape[:1] == operands[0].shape[:1])(*operands)


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


def native_lowering(
    spread: Local, local: Local, reference: Local, export: Local | None = None
) -> Any:
    """A primitive's lowering on a CPU.

    `local` on one device, `spread` over known ones, else `reference`, which XLA can always share.
    `export`, if given, is for programs that leave this machine; JAX refuses native calls in them.
    """

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        context = ctx.module_context.axis_context
        function = spread
        if export is not None and ctx.module_context.lowering_parameters.for_export:
            function = export
        elif isinstance(context, mlir.ShardingContext):
            if context.num_devices == 1:
                function = local
            elif context.device_assignment is None:
                function = reference
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, **params)

    return lower


@functools.lru_cache(maxsize=1024)
def _spreading(local: Local, spec: Any, ranks: tuple[int, ...], scale_per_row: bool) -> Any:
    by_panels = spec.n > COLUMNS and spec.n % COLUMNS == 0 and not spec.transposed

    @custom_partitioning
    def run(*operands):
        return local(*operands, spec=spec)

    def axes_of(rows: Any, panels: Any) -> list[PartitionSpec]:
        entries = [
            [rows],
            [rows if scale_per_row else None] if ranks[1] == 2 else [],
            [None, panels],
            [None, panels],
            [None, panels] if ranks[4] > 1 else [],
            [],
            [],
        ]
        return [
            PartitionSpec(*entry, *[None] * (rank - len(entry)))
            for entry, rank in zip(entries, ranks, strict=True)
        ]

    def partition(mesh, operands, result):
        if not isinstance(result.sharding, NamedSharding):  # a mesh without names: whole everywhere
            devices = tuple(sorted(result.sharding.device_set, key=lambda d: d.id))
            whole = type(result.sharding).get_replicated(devices)
            return mesh, functools.partial(local, spec=spec), whole, (whole,) * len(operands)
        rows, columns = (*result.sharding.spec, None, None)[:2]
        if spec.transposed:
            columns = None
        ways = 1
        for name in (columns,) if isinstance(columns, str) else columns or ():
            ways *= mesh.shape[name]
        if not by_panels or (spec.n // COLUMNS) % ways:
            columns, ways = None, 1
        mine = dataclasses.replace(spec, n=spec.n // ways) if ways > 1 else spec
        inputs = tuple(NamedSharding(mesh, place) for place in axes_of(rows, columns))
        output = NamedSharding(mesh, PartitionSpec(rows, columns))
        return mesh, functools.partial(local, spec=mine), output, inputs

    run.def_partition(partition, sharding_rule=_rule(ranks, scale_per_row, by_panels))
    return run


def _rule(ranks: tuple[int, ...], scale_per_row: bool, by_panels: bool) -> str:
    """Which axes of operands and result are one, as an einsum of factors."""
    row = "m" if scale_per_row else "o"
    panel = "p" if by_panels else "q"
    return ", ".join(
        [
            "m i",
            f"{row} s" if ranks[1] == 2 else "s",
            f"e {panel} b w c d",
            f"e {panel} g c",
            f"e {panel} g c" if ranks[4] > 1 else "z",
            "",
            "",
        ]
    ) + (" -> m (p c)" if by_panels else " -> m j")
