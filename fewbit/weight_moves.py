"""Layout primitives: how a quantized weight moves through each; one forgotten here dequantizes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import jaxprs, moves
from fewbit.jaxprs import Eqn
from fewbit.qarray import QArray, unpack
from fewbit.weight import TrainedWeight, is_weight, map_parts, plain

Rule = Callable[[Eqn, list[Any]], Sequence[Any]]


def _through(move: Callable[[QArray, Eqn, list[Any]], QArray]) -> Rule:
    def rule(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
        weight, *rest = ins
        if not is_weight(weight) or any(map(is_weight, rest)):
            raise moves.CannotMove("a weight is used as an index")
        return [weight.moved(move(weight.array, eqn, rest))]

    return rule


def _convert(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
        raise moves.CannotMove(f"cast to {jnp.dtype(dtype)}")
    return q.with_dtype(dtype)


def _transpose(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    return moves.transpose(q, eqn.params["permutation"])


def _reshape(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    if eqn.params.get("dimensions") is not None or rest:
        raise moves.CannotMove("reshape with a permutation or a dynamic shape")
    return moves.reshape(q, eqn.params["new_sizes"])


def _squeeze(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    return moves.squeeze(q, eqn.params["dimensions"])


def _broadcast(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    if rest:
        raise moves.CannotMove("broadcast to a dynamic shape")
    p = eqn.params
    return moves.broadcast_in_dim(q, p["shape"], p["broadcast_dimensions"])


def _slice(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    p = eqn.params
    return moves.slice_(q, p["start_indices"], p["limit_indices"], p["strides"])


def _dynamic_slice(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    return moves.dynamic_slice(q, rest, eqn.params["slice_sizes"])


def _rev(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    return moves.rev(q, eqn.params["dimensions"])


def _gather(q: QArray, eqn: Eqn, rest: list[Any]) -> QArray:
    p = eqn.params
    return moves.gather(
        q,
        rest[0],
        dimension_numbers=p["dimension_numbers"],
        slice_sizes=p["slice_sizes"],
        mode=p["mode"],
        fill_value=p["fill_value"],
    )


def _split(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    (weight,) = ins
    parts = moves.split(weight.array, eqn.params["sizes"], eqn.params["axis"])
    return [weight.moved(part) for part in parts]


def _concatenate(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    if not all(map(is_weight, ins)):
        raise moves.CannotMove("a weight is joined to an array that is not one")
    parts = [w.array for w in ins]
    axis = eqn.params["axis"] if eqn.primitive.name == "stack" else eqn.params["dimension"]
    if eqn.primitive.name == "stack":
        parts = [moves.expand_dims(q, (axis,)) for q in parts]
    return [ins[0].moved(moves.concatenate(parts, axis))]


def _each(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    """Primitives that act alike on every operand: map them over the weights' own parts."""
    outs = []
    for value in ins:
        if is_weight(value):
            parts, tree = jax.tree.flatten(value)
            outs.append(jax.tree.unflatten(tree, [jaxprs.bind(eqn, [p])[0] for p in parts]))
        else:
            outs.extend(jaxprs.bind(eqn, [value]))
    return outs


def _barrier(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    return jax.lax.optimization_barrier(ins)


def _sharded(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    """A constraint on the weight holds for its parts, but not on axes where a part is one wide."""
    (weight,) = ins
    sharding = eqn.params["sharding" if "sharding" in eqn.params else "dst_sharding"]
    place = (
        jax.sharding.reshard
        if eqn.primitive.name == "reshard"
        else jax.lax.with_sharding_constraint
    )

    def apply(part, spec):
        return place(part, jax.sharding.NamedSharding(sharding.mesh, spec))

    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1:
        return [weight]
    weight = weight.moved(unpack(weight.array))
    return [weight.moved(map_parts(apply, weight.array, sharding.spec))]


def _pvary(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    """`pvary` refuses an axis that an array varies over already: give each part what it lacks."""
    axes = eqn.params["axes"]

    def vary(part):
        missing = tuple(a for a in axes if a not in jaxprs.varying_axes(part))
        return jax.lax.pcast(part, missing, to="varying") if missing else part

    return [jax.tree.map(vary, value) for value in ins]


MOVES: dict[str, Rule] = {
    "convert_element_type": _through(_convert),
    "transpose": _through(_transpose),
    "reshape": _through(_reshape),
    "squeeze": _through(_squeeze),
    "broadcast_in_dim": _through(_broadcast),
    "slice": _through(_slice),
    "dynamic_slice": _through(_dynamic_slice),
    "rev": _through(_rev),
    "gather": _through(_gather),
    "split": _split,
    "concatenate": _concatenate,
    "stack": _concatenate,
    "copy": _each,
    "device_put": _each,
    "name": _each,
    "optimization_barrier": _barrier,
    "stop_gradient": lambda eqn, ins: [jax.lax.stop_gradient(w) for w in ins],
    "sharding_constraint": _sharded,
    "reshard": _sharded,
    "pvary": _pvary,
}


def with_twins(eqn: Eqn, ins: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
    """Moved weights of a training run with their float arrays moved alike."""
    if not any(isinstance(v, TrainedWeight) for v in ins):
        return outs
    floats = jaxprs.bind(eqn, [v.twin if isinstance(v, TrainedWeight) else plain(v) for v in ins])
    return [
        out.moved(out.array, twin) if isinstance(out, TrainedWeight) else out
        for out, twin in zip(outs, floats, strict=True)
    ]
