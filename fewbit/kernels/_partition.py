"""How the primitives of native calls run: eagerly, lowered on a CPU, and spread over devices.

XLA cannot look into a native call; unless it is told, it gathers every operand on every device.
Told a rule, each device multiplies its rows (or images) by its panels, and nothing moves.
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
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from fewbit._version import __version__
from fewbit.qarray import COLUMNS, shards_of

Local = Callable[..., Any]  # on one device: local(*operands, spec=spec)


def run_eagerly(primitive: Primitive, bind: Local, count: int | None = None) -> None:
    """Give a primitive its form outside of programs: `bind` of its first `count` operands."""

    @functools.lru_cache(maxsize=1024)
    def compiled(**settings: Any) -> Any:
        return jax.jit(functools.partial(bind, **settings))

    @primitive.def_impl
    def run(*operands: jax.Array, **settings: Any) -> Any:
        with jax.disable_jit(False):  # else this would call itself for ever
            return compiled(**settings)(*operands[:count])


def lower_alone(primitive: Primitive, call: Local, reference: Local) -> None:
    """Lower a primitive of several results: to `call` on one CPU device, else to `reference`."""

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **settings: Any) -> Any:
        context = ctx.module_context.axis_context
        alone = isinstance(context, mlir.ShardingContext) and context.num_devices == 1
        leaves = ctx.module_context.lowering_parameters.for_export
        function = call if alone and not leaves else reference
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, **settings)

    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=True))
    mlir.register_lowering(primitive, lower, platform="cpu")


def lower_spread(
    primitive: Primitive, spread: Local, local: Local, reference: Local, export: Local
) -> None:
    """Lower a primitive of one result: on a CPU to native code, elsewhere to `reference`.

    `local` on one device, `spread` over known ones, else `reference`, which XLA can always share.
    `export` is for programs that leave this machine; JAX refuses native calls in them.
    """

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **settings: Any) -> Any:
        context = ctx.module_context.axis_context
        function = spread
        if ctx.module_context.lowering_parameters.for_export:
            function = export
        elif isinstance(context, mlir.ShardingContext):
            if context.num_devices == 1:
                function = local
            elif context.device_assignment is None:
                function = reference
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, **settings)

    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=False))
    mlir.register_lowering(primitive, lower, platform="cpu")


def push_forward(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """`jax.jvp` where tangents that are zero take no part."""
    moving = [k for k, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_moving(*values: Any) -> Any:
        filled = list(primals)
        for k, value in zip(moving, values, strict=True):
            filled[k] = value
        return function(*filled)

    return jax.jvp(of_moving, [primals[k] for k in moving], [tangents[k] for k in moving])


# --- A call shared by devices ---------------------------------------------------------------------


def spread(local: Local, operands: tuple[jax.Array, ...], spec: Any, rule: str) -> jax.Array:
    """`local(*operands, spec=spec)`, which devices share by rows and panels.

    `rule` names the axes of operands and result as an einsum of factors: 'm' are rows, the first
    axis of the result; 'p' are panels, which its last axis '(p c)' is made of if they can be shared
    (`shares_panels`). `spec` has `n`, the number of columns.
    """
    with described(local, spec, rule):
        return _spreading(local, spec, rule)(*operands)


@functools.lru_cache(maxsize=1024)
def _spreading(local: Local, spec: Any, rule: str) -> Any:
    left, _, right = rule.partition(" -> ")
    factors = [operand.split() for operand in left.split(",")]
    by_panels = right.endswith("(p c)")
    between = [None] * (len(right.replace("(p c)", "p").split()) - 2)

    def divide(mesh, operands, result):
        places = mesh_axes(result, mesh)
        rows, columns = places[0] if right[0] == "m" else None, places[-1]
        ways = shards_of(mesh, columns)
        if not by_panels or (spec.n // COLUMNS) % ways:
            columns, ways = None, 1
        mine = dataclasses.replace(spec, n=spec.n // ways) if ways > 1 else spec
        shared = {"m": rows, "p": columns}
        inputs = [map(shared.get, operand) for operand in factors]
        return functools.partial(local, spec=mine), (rows, *between, columns), inputs

    return partitioned(local, spec, rule, divide)


def partitioned(local: Local, spec: Any, rule: str, divide: Callable[..., Any]) -> Any:
    """`local` as a call that XLA divides by a rule.

    `divide(mesh, operands, result)` tells what each device calls, and which mesh axes share the
    axes of the result and of each operand.
    """

    @custom_partitioning
    def run(*operands):
        return local(*operands, spec=spec)

    def partition(mesh, operands, result):
        if mesh.empty:  # one without names
            devices = tuple(sorted(result.sharding.device_set, key=lambda d: d.id))
            whole = type(result.sharding).get_replicated(devices)
            return mesh, functools.partial(local, spec=spec), whole, (whole,) * len(operands)
        # XLA puts the operands where this says before it calls `mine`: what a rule does not
        # understand comes as None, that is gathered.
        mine, output, inputs = divide(mesh, operands, result)
        placed = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in (output, *inputs)]
        return mesh, mine, placed[0], tuple(placed[1:])

    run.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return run


def described(local: Local, spec: Any, rule: Any) -> Any:
    """A context in which a partitioned call carries in the program what it is.

    The program itself holds nothing of it but the address of a Python object, and addresses come
    again: JAX's compilation cache on disk would take one call's machine code for another's.
    """
    name = f"{local.__module__}.{local.__qualname__}"
    return set_xla_metadata(fewbit_call=f"{__version__} {name} {spec} {rule}")


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


def weight_rule(panel: str, has_zero: bool) -> list[str]:
    """The factors of a packed weight: data, scale, zero, tensor_scale, layer.

    >>> weight_rule('p', False)
    ['e p b u c d', 'e p g c', 'z', '', '']
    """
    part = f"e {panel} g c"
    return [f"e {panel} b u c d", part, part if has_zero else "z", "", ""]
