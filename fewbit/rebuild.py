"""Primitives with bodies, rebuilt around the interpreter: control flow stays control flow.

Each function takes (interpreter, equation, operands, body nodes) and returns the equation's
results. A weight enters a loop whole, as a constant, with the layer number as a scalar; it is never
put into a carry, which may change it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fewbit import jaxprs
from fewbit.jaxprs import Eqn
from fewbit.qarray import QArray, unpack
from fewbit.tapped_loops import no_tangent, tapped_scan, tapped_while
from fewbit.taps import differs_over
from fewbit.trace import Node
from fewbit.weight import is_weight, map_parts, plain

Interpreter = Any


def _jit(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    """Inlined; only an output sharding that the inner function demanded is kept."""
    with eqn.ctx.manager:
        outs = run.run(nodes[0], ins)
    for k, sharding in enumerate(jaxprs.jit_out_shardings(eqn)):
        if isinstance(sharding, NamedSharding):
            explicit = outs[k] is not None and sharding.mesh.are_all_axes_explicit
            place = jax.sharding.reshard if explicit else lax.with_sharding_constraint
            outs[k] = place(plain(outs[k]), sharding)
    return outs


def _scan(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    p = jaxprs.scan_params(eqn)
    nc, nk = p.num_consts, p.num_carry
    body = nodes[0].jaxpr
    consts, carry, xs = ins[:nc], ins[nc : nc + nk], ins[nc + nk :]
    held, carry = _hold_fixed_weights(run, body, nc, carry, "scan carry")
    stacks = {k: x for k, x in enumerate(xs) if is_weight(x)}
    twins = {k: w.twin for k, w in stacks.items() if w.twin is not None}
    sliced = [x for x in xs if not is_weight(x)]
    forwarded = [None if k is None else k - nc - nk for k in jaxprs.forwards(body)[nk:]]
    kept = [j for j, k in enumerate(forwarded) if k not in stacks]

    scaled = nodes[0].per_layer and bool(run.static)

    def body_step(moving, x):
        i, rows, floats = x
        layer = {k: w.at_layer(i, floats.get(k)) for k, w in stacks.items()}
        with run.static.using(run.static.in_trip(i, scaled)):
            outs = run.run(
                nodes[0], consts + _weave(held, moving, nk) + _weave(layer, rows, len(xs))
            )
        out_carry = [o for k, o in enumerate(outs[:nk]) if k not in held]
        ys = [outs[nk + j] for j in kept]
        return run.floats(out_carry, "scan carry"), run.floats(ys, "scan output")

    counted = stacks or scaled or run.static.noise is not None
    index = jnp.arange(p.length, dtype=jnp.int32) if counted else None
    steps = (index, sliced, twins)
    (moving, ys), readings = tapped_scan(run.taps, nodes[0], body_step, carry, steps, p)
    run.taps.add(readings)
    through = {j: stacks[k] for j, k in enumerate(forwarded) if k is not None and j not in kept}
    return _weave(held, moving, nk) + _weave(through, ys, len(forwarded))


def _while(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    p = jaxprs.while_params(eqn)
    nc, nb = p.num_cond_consts, p.num_body_consts
    cond_consts, body_consts, carry = ins[:nc], ins[nc : nc + nb], ins[nc + nb :]
    n = len(carry)
    held, carry = _hold_fixed_weights(run, nodes[1].jaxpr, nb, carry, "while carry")

    def keep_going(moving):
        (go,) = run.run(nodes[0], cond_consts + _weave(held, moving, n))
        return go

    def step(moving):
        outs = run.run(nodes[1], body_consts + _weave(held, moving, n))
        return run.floats([o for k, o in enumerate(outs) if k not in held], "while carry")

    tapped = any(map(run.taps.inside, nodes))
    loop = functools.partial(tapped_while, run.taps) if tapped else lax.while_loop
    return _weave(held, loop(keep_going, step, carry), n)


def _cond(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    index, *operands = ins

    def branch(node: Node) -> Callable[..., Any]:
        # A branch may return a weight untouched while another returns an array: floats from both.
        return run.taps.collected(lambda *args: run.floats(run.run(node, args), "cond output"))

    branches = [branch(node) for node in nodes]
    empty = [
        run.taps.empty(b, *operands) if run.taps.inside(node) else {}
        for b, node in zip(branches, nodes, strict=True)
    ]
    not_taken = functools.reduce(operator.or_, empty)

    def whole(branch: Callable[..., Any]) -> Callable[..., Any]:
        def with_empty(*args):
            outs, readings = branch(*args)
            return outs, not_taken | readings

        return with_empty

    outs, readings = _choose(eqn, index, [whole(b) for b in branches], operands)
    run.taps.add(readings)
    through = jaxprs.common_forwards(*(node.jaxpr for node in nodes))
    return [
        o if k is None or not is_weight(operands[k]) else operands[k]
        for o, k in zip(outs, through, strict=True)
    ]


def _choose(eqn: Eqn, index: Any, branches: list[Any], operands: list[Any]) -> Any:
    """One branch by its number, or by the platform: the others then need not compile here."""
    platforms = jaxprs.branch_platforms(eqn)
    if platforms is None:
        return lax.switch(index, branches, *operands)
    pairs = zip(platforms, branches, strict=True)
    named = {name: branch for names, branch in pairs for name in names or ("default",)}
    return lax.platform_dependent(*operands, **named)


def _remat(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    p = jaxprs.remat_params(eqn)

    @run.taps.collected
    def again(args):
        return run.run(nodes[0], args)

    outs, readings = jax.checkpoint(again, policy=p.policy, prevent_cse=p.prevent_cse)(ins)
    run.taps.add(readings)
    return outs


def _custom_jvp(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    """Value from the quantized body, derivative from the author's own rule."""

    @jax.custom_jvp
    @run.taps.collected
    def value(args, static):
        with run.static.using(static):
            return run.floats(run.run(nodes[0], args), "custom_jvp output")

    @value.defjvp
    def derivative(primals, tangents):
        _, tangent = jax.jvp(
            lambda args: jaxprs.bind(eqn, [plain(a) for a in args]), primals[:1], tangents[:1]
        )
        outs, readings = value(*primals)
        return (outs, readings), (tangent, jax.tree.map(no_tangent, readings))

    outs, readings = value(ins, run.static.state)
    run.taps.add(readings)
    return outs


def _custom_vjp(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    """As `_custom_jvp`; the float results inside `forward` are dead code once compiled."""

    @jax.custom_vjp
    @run.taps.collected
    def value(args, static):
        with run.static.using(static):
            return run.floats(run.run(nodes[0], args), "custom_vjp output")

    def forward(args, static):
        _, pull = jax.vjp(lambda args: jaxprs.bind(eqn, [plain(a) for a in args]), args)
        return value(args, static), pull

    value.defvjp(forward, lambda pull, cotangents: (*pull(cotangents[0]), None))
    outs, readings = value(ins, run.static.state)
    run.taps.add(readings)
    return outs


def _shard_map(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    p = jaxprs.shard_map_params(eqn)
    # Panels are cut for one device; one code per element splits over any mesh.
    ins = [v.moved(unpack(v.array), v.twin) if is_weight(v) else v for v in ins]
    ins = [
        v if not is_weight(v) or _can_shard(v.array, s, p.mesh) else run.floats([v], "shard_map")[0]
        for v, s in zip(ins, p.in_specs, strict=True)
    ]
    specs = tuple(
        _weight_specs(v, s) if is_weight(v) else s for v, s in zip(ins, p.in_specs, strict=True)
    )

    axes = tuple(name for name in p.mesh.axis_names if name in p.axis_names)
    differs: dict[str, tuple[bool, ...]] = {}

    @run.taps.collected
    def shard(static, *args):
        with run.static.using(static):
            return tuple(run.floats(run.run(nodes[0], args), "shard_map output"))

    def with_readings(static, *args):
        outs, readings = shard(static, *args)
        for site, reading in readings.items():  # unchecked, nobody knows which shards are equal
            differs[site] = differs_over(reading, axes) if p.check_vma else (True,) * len(axes)
        return outs, run.taps.from_shard(readings, axes)

    everywhere = jax.tree.map(lambda _: PartitionSpec(), run.static.state)
    mapped = jax.shard_map(
        with_readings,
        mesh=p.mesh,
        in_specs=(everywhere, *specs),
        out_specs=(tuple(p.out_specs), PartitionSpec(*axes)),
        check_vma=p.check_vma,
        axis_names=p.axis_names,
    )
    outs, readings = mapped(run.static.state, *ins)
    run.taps.add(run.taps.from_shards(readings, differs))
    return list(outs)


def _weight_specs(weight: Any, spec: PartitionSpec) -> Any:
    """What `shard_map` is told of a weight: a spec for each of its parts."""
    parts = map_parts(lambda part, spec: spec, weight.array, spec)
    return weight.moved(parts, None if weight.twin is None else spec)


def _can_shard(q: QArray, spec: PartitionSpec, mesh: Any) -> bool:
    """Whether every part splits into whole tiles over the mesh axes of `spec`."""
    for axis, names in enumerate(spec):
        if names is None:
            continue
        ways = 1
        for name in (names,) if isinstance(names, str) else names:
            ways *= mesh.shape[name]
        wide = q.scale.shape[axis]
        if wide != 1 and (wide % ways or q.shape[axis] % wide):
            return False
        if q.layout != "plain" and axis == q.ndim - 1:
            return False
    return True


REBUILD: dict[str, Callable[..., list[Any]]] = {
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
}


# --- small things the loops share -----------------------------------------------------------------


def _weave(fixed: dict[int, Any], moving: Sequence[Any], n: int) -> list[Any]:
    """n values: those of `fixed` at their places, the others in order."""
    rest = iter(moving)
    return [fixed[k] if k in fixed else next(rest) for k in range(n)]


def _hold_fixed_weights(
    run: Interpreter, body: Any, first: int, carry: list[Any], why: str
) -> tuple[dict[int, Any], list[Any]]:
    """Split a carry: weights that the body returns untouched are held, everything else moves."""
    through = jaxprs.forwards(body)
    fixed = {k: v for k, v in enumerate(carry) if is_weight(v) and through[k] == first + k}
    return fixed, run.floats([v for k, v in enumerate(carry) if k not in fixed], why)
