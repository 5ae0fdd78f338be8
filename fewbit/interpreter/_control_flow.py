"""Primitives with bodies, rebuilt around the interpreter: control flow stays control flow.

Each function takes (interpreter, equation, operands, body nodes) and returns the equation's
results. A weight enters a loop whole, as a constant, with the layer number as a scalar; it is never
put into a carry, which may change it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fewbit.interpreter._taps import Readings, Taps, differs_over
from fewbit.interpreter._weights import is_weight, map_parts, plain
from fewbit.qarray import QArray, unpack
from fewbit.tracing import Eqn, Node, jaxprs

Interpreter = Any

# --- Loops that hand out what a tap reads in them -------------------------------------------------


def tapped_scan(
    taps: Taps, node: Node, step: Callable[..., Any], carry: list[Any], xs: Any, p: Any
) -> tuple[Any, Readings]:
    """A scan and its readings: one for each layer, or one for all steps together."""
    body = taps.collected(step)
    over_time = not node.per_layer and taps.inside(node)
    start: Readings = {}
    if over_time:
        one = lambda x: x[0] if p.length else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)  # noqa: E731
        first = jax.tree.map(one, xs)
        start = taps.empty(body, carry, first)

    def with_readings(carried, x):
        moving, seen = carried
        (moving, ys), new = body(moving, x)
        if over_time:
            return (moving, taps.combine(seen, new)), (ys, {})
        return (moving, seen), (ys, new)

    (moving, total), (ys, stacked) = lax.scan(
        with_readings, (carry, start), xs, length=p.length, reverse=p.reverse, unroll=p.unroll
    )
    return (moving, ys), total if over_time else stacked


def tapped_while(
    taps: Taps, keep_going: Callable[..., Any], step: Callable[..., Any], carry: list[Any]
) -> list[Any]:
    """A while loop that carries its readings; its condition is asked in the body, to be read."""

    @taps.collected
    def advance(moving):
        moving = step(moving)
        return moving, keep_going(moving)

    def body(carried):
        moving, _, seen = carried
        (moving, go), new = advance(moving)
        return moving, go, taps.combine(seen, new)

    go, asked = taps.collected(keep_going)(carry)
    start = taps.empty(advance, carry) | asked
    moving, _, readings = lax.while_loop(lambda carried: carried[1], body, (carry, go, start))
    taps.add(readings)
    return moving


def no_tangent(reading: Any) -> Any:
    """The tangent of a reading: none, whatever the derivative of the model is."""
    floating = jnp.issubdtype(reading.dtype, jnp.inexact)
    return jnp.zeros_like(reading) if floating else np.zeros(reading.shape, jax.dtypes.float0)


# --- The primitives -------------------------------------------------------------------------------


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
    # A stack of weights is no operand of the new scan, which cannot cut panels into layers: the
    # body picks its layer by number. Its float twin is one, so that gradients of layers stack.
    stacks = {k: x for k, x in enumerate(xs) if is_weight(x)}
    twins = {k: w.twin for k, w in stacks.items() if w.twin is not None}
    sliced = [x for x in xs if not is_weight(x)]
    # A stack that the body hands through unchanged comes out as it went in, still stored.
    forwarded = [None if k is None else k - nc - nk for k in jaxprs.forwards(body)[nk:]]
    kept = [j for j, k in enumerate(forwarded) if k not in stacks]

    scaled = nodes[0].per_layer and bool(run.static)

    def body_step(moving, x):
        i, rows, floats = x
        layer = {k: w.at_layer(i, floats.get(k)) for k, w in stacks.items()}
        with run.static.using(run.static.in_trip(i, scaled)):
            carried, slices = _weave(held, moving, nk), _weave(layer, rows, len(xs))
            outs = run.run(nodes[0], consts + carried + slices)
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

    not_taken: Readings = {}

    def branch(node: Node) -> Callable[..., Any]:
        # A branch may return a weight untouched while another returns an array: floats from both.
        @run.taps.collected
        def body(*args):
            return run.floats(run.run(node, args), "cond output")

        # All branches have to return the same: a reading of what this one did not run is empty.
        if run.taps.inside(node):
            not_taken.update(run.taps.empty(body, *operands))

        def with_empty(*args):
            outs, readings = body(*args)
            return outs, not_taken | readings

        return with_empty

    outs, readings = _choose(eqn, index, [branch(node) for node in nodes], operands)
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
    value = jax.custom_jvp(_body(run, nodes[0], "custom_jvp output"))

    @value.defjvp
    def derivative(primals, tangents):
        # Of the equation as it was traced, in which the author's rule is still bound.
        _, tangent = jax.jvp(_float_body(eqn), primals[:1], tangents[:1])
        outs, readings = value(*primals)
        return (outs, readings), (tangent, jax.tree.map(no_tangent, readings))

    outs, readings = value(ins, run.static.state)
    run.taps.add(readings)
    return outs


def _custom_vjp(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    """As `_custom_jvp`; the float results inside `forward` are dead code once compiled."""
    value = jax.custom_vjp(_body(run, nodes[0], "custom_vjp output"))

    def forward(args, static):
        _, pull = jax.vjp(_float_body(eqn), args)
        return value(args, static), pull

    value.defvjp(forward, lambda pull, cotangents: (*pull(cotangents[0]), None))
    outs, readings = value(ins, run.static.state)
    run.taps.add(readings)
    return outs


def _body(run: Interpreter, node: Node, why: str) -> Callable[..., Any]:
    """A body that may close over nothing traced, and what is read in it."""

    @run.taps.collected
    def value(args, static):
        with run.static.using(static):
            return run.floats(run.run(node, args), why)

    return value


def _float_body(eqn: Eqn) -> Callable[..., Any]:
    """The equation as it was traced, of the floats that its operands stand for."""
    return lambda args: jaxprs.bind(eqn, [plain(a) for a in args])


def _shard_map(run: Interpreter, eqn: Eqn, ins: list[Any], nodes: Sequence[Node]) -> list[Any]:
    p = jaxprs.shard_map_params(eqn)
    operands, specs = [], []
    for value, spec in zip(ins, p.in_specs, strict=True):
        if is_weight(value):
            # Panels are cut for one device; one code per element splits over any mesh.
            value = value.moved(unpack(value.array), value.twin)
            if _can_shard(value.array, spec, p.mesh):
                spec = _weight_specs(value, spec)
            else:
                (value,) = run.floats([value], "shard_map")
        operands.append(value)
        specs.append(spec)
    axes = tuple(name for name in p.mesh.axis_names if name in p.axis_names)
    differs: dict[str, tuple[bool, ...]] = {}

    shard = _body(run, nodes[0], "shard_map output")

    def with_readings(static, *args):
        outs, readings = shard(args, static)
        for site, reading in readings.items():  # unchecked, nobody knows which shards are equal
            differs[site] = differs_over(reading, axes) if p.check_vma else (True,) * len(axes)
        return tuple(outs), run.taps.from_shard(readings, axes)

    everywhere = jax.tree.map(lambda _: PartitionSpec(), run.static.state)
    mapped = jax.shard_map(
        with_readings,
        mesh=p.mesh,
        in_specs=(everywhere, *specs),
        out_specs=(tuple(p.out_specs), PartitionSpec(*axes)),
        check_vma=p.check_vma,
        axis_names=p.axis_names,
    )
    outs, readings = mapped(run.static.state, *operands)
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
