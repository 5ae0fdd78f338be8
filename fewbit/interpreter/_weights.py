"""A quantized parameter as a value of the interpreter, and how layout primitives move it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from fewbit.ops import with_derivative
from fewbit.qarray import QArray, dequantize, moves, unpack
from fewbit.tracing import Eqn, jaxprs

_MSG_GRADIENT = (
    "Parameter '{leaf}' is quantized ({qtype}) and has no gradient: its codes are fixed. Take the "
    "gradient over the float leaves alone: floats, rest = fewbit.split_trainable(params), then "
    "jax.grad of a loss(floats, rest, ...) that starts with fewbit.merge_trainable(floats, rest); "
    "for NNX nnx.grad(loss, argnums=nnx.DiffState(0, fewbit.float_params())). "
    "fewbit.trainable(params) is the mask for optax.masked."
)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Weight:
    """A quantized parameter on its way through the model, with what rides on it.

    `twin` is the float array it was made of, in runs that hold the two against each other.
    """

    array: QArray
    leaf: str
    rule: Any = None
    twin: Any = None

    def tree_flatten(self):
        return (self.array, self.twin), (self.leaf, self.rule)

    @classmethod
    def tree_unflatten(cls, static, children):
        (array, twin), (leaf, rule) = children, static
        return cls(array, leaf, rule, twin)

    def moved(self, array: QArray, twin: Any = None) -> "Weight":
        return type(self)(array, self.leaf, self.rule, twin)

    def at_layer(self, i: Any, twin: Any = None) -> "Weight":
        """One layer of a stacked weight. A scan hands out the twin's, so that gradients stack."""
        return self.moved(self.array.at_layer(i), twin)

    def as_float(self) -> Any:
        """The float array that it stands for."""
        return dequantize(self.array, self.array.dtype)


@jax.custom_jvp
def straight_through(value: jax.Array, source: jax.Array) -> jax.Array:
    """`value`, with the derivative of `source`, which it was made of by rounding."""
    return with_derivative(value, straight_through, value, source)


@straight_through.defjvp
def _of_source(primals: Any, tangents: Any) -> Any:
    return straight_through(*primals), tangents[1].astype(primals[0].dtype)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class TrainedWeight(Weight):
    """A float parameter (`twin`, which gets the gradients) that training sees quantized."""

    def as_float(self) -> Any:
        return straight_through(super().as_float(), self.twin)


def is_weight(value: Any) -> bool:
    """Whether a value of the interpreter is a quantized parameter."""
    return isinstance(value, Weight)


def without_gradient(q: QArray, leaf: str) -> QArray:
    """`q`, whose codes are an error to differentiate.

    JAX refuses integer leaves by itself; codes that are floats (fp8) it would take for parameters.
    """
    if q.layout != "plain":  # its bytes are integers, whatever they stand for
        return q
    codes = q.data
    if isinstance(codes, jax.ShapeDtypeStruct) or not jnp.issubdtype(codes.dtype, jnp.inexact):
        return q
    return q.replace(qvalue=_fixed(codes, (leaf, str(q.qtype))))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _fixed(codes: jax.Array, what: tuple[str, str]) -> jax.Array:
    return codes


def _refuse_tangents(what: tuple[str, str], primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        leaf, qtype = what
        raise TypeError(_MSG_GRADIENT.format(leaf=leaf, qtype=qtype))
    return primals[0], tangents[0]


_fixed.defjvp(_refuse_tangents, symbolic_zeros=True)


def plain(value: Any) -> Any:
    """The float array that a value stands for."""
    return value.as_float() if is_weight(value) else value


def map_parts(fn: Callable[[Any, PartitionSpec], Any], q: QArray, spec: PartitionSpec) -> QArray:
    """`fn(part, spec)` for each part of a QArray; a part one wide on an axis is not split there."""
    full = tuple(spec) + (None,) * (q.ndim - len(spec))

    def with_spec(part):
        sizes = zip(full, part.shape, q.shape, strict=True)
        return fn(part, PartitionSpec(*(None if n == 1 and m != 1 else s for s, n, m in sizes)))

    return jax.tree.map(with_spec, q)


# --- Layout primitives: how a weight moves through each; one that is forgotten here dequantizes ---

Rule = Callable[[Eqn, list[Any]], Sequence[Any]]


def _through(move: Callable[[QArray, dict[str, Any], list[Any]], QArray]) -> Rule:
    """The rule of a primitive that moves its first operand, as its parameters and the rest say."""

    def rule(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
        weight, *rest = ins
        if not is_weight(weight) or any(map(is_weight, rest)):
            raise moves.CannotMove("a weight is used as an index")
        return [weight.moved(move(weight.array, eqn.params, rest))]

    return rule


def _convert(q: QArray, p: dict[str, Any], rest: list[Any]) -> QArray:
    dtype = p["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
        raise moves.CannotMove(f"cast to {jnp.dtype(dtype)}")
    return q.with_dtype(dtype)


def _reshape(q: QArray, p: dict[str, Any], rest: list[Any]) -> QArray:
    if p.get("dimensions") is not None or rest:
        raise moves.CannotMove("reshape with a permutation or a dynamic shape")
    return moves.reshape(q, p["new_sizes"])


def _broadcast(q: QArray, p: dict[str, Any], rest: list[Any]) -> QArray:
    if rest:
        raise moves.CannotMove("broadcast to a dynamic shape")
    return moves.broadcast_in_dim(q, p["shape"], p["broadcast_dimensions"])


def _slice(q: QArray, p: dict[str, Any], rest: list[Any]) -> QArray:
    return moves.slice_(q, p["start_indices"], p["limit_indices"], p["strides"])


def _gather(q: QArray, p: dict[str, Any], rest: list[Any]) -> QArray:
    names = ("dimension_numbers", "slice_sizes", "mode", "fill_value")
    return moves.gather(q, rest[0], **{name: p[name] for name in names})


def _split(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    (weight,) = ins
    parts = moves.split(weight.array, eqn.params["sizes"], eqn.params["axis"])
    return [weight.moved(part) for part in parts]


def _concatenate(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    if not all(map(is_weight, ins)):
        raise moves.CannotMove("a weight is joined to an array that is not one")
    parts = [w.array for w in ins]
    if eqn.primitive.name == "stack":
        axis = eqn.params["axis"]
        parts = [moves.expand_dims(q, (axis,)) for q in parts]
    else:
        axis = eqn.params["dimension"]
    return [ins[0].moved(moves.concatenate(parts, axis))]


def _each(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    """Primitives that act alike on every operand: map them over the weights' own parts."""
    return jax.tree.map(lambda part: jaxprs.bind(eqn, [part])[0], ins)


def _sharded(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    """A constraint on the weight holds for its parts, but not on axes where a part is one wide."""
    (weight,) = ins
    sharding = eqn.params["sharding" if "sharding" in eqn.params else "dst_sharding"]
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return [weight]
    is_reshard = eqn.primitive.name == "reshard"
    place = jax.sharding.reshard if is_reshard else jax.lax.with_sharding_constraint

    def apply(part, spec):
        return place(part, NamedSharding(sharding.mesh, spec))

    return [weight.moved(map_parts(apply, unpack(weight.array), sharding.spec))]


def _pvary(eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
    """`pvary` refuses an axis that an array varies over already: give each part what it lacks."""
    axes = eqn.params["axes"]

    def vary(part):
        missing = tuple(a for a in axes if a not in jaxprs.varying_axes(part))
        return jax.lax.pcast(part, missing, to="varying") if missing else part

    return jax.tree.map(vary, ins)


MOVES: dict[str, Rule] = {
    "convert_element_type": _through(_convert),
    "transpose": _through(lambda q, p, rest: moves.transpose(q, p["permutation"])),
    "reshape": _through(_reshape),
    "squeeze": _through(lambda q, p, rest: moves.squeeze(q, p["dimensions"])),
    "broadcast_in_dim": _through(_broadcast),
    "slice": _through(_slice),
    "dynamic_slice": _through(lambda q, p, rest: moves.dynamic_slice(q, rest, p["slice_sizes"])),
    "rev": _through(lambda q, p, rest: moves.rev(q, p["dimensions"])),
    "gather": _through(_gather),
    "split": _split,
    "concatenate": _concatenate,
    "stack": _concatenate,
    "copy": _each,
    "device_put": _each,
    "name": _each,
    "optimization_barrier": lambda eqn, ins: jax.lax.optimization_barrier(ins),
    "stop_gradient": lambda eqn, ins: jax.lax.stop_gradient(ins),
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
