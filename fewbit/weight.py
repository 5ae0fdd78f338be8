"""A quantized parameter as a value of the interpreter."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from fewbit.qarray import QArray, dequantize
from fewbit.straight import with_derivative

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

    def part_spec(part):
        return PartitionSpec(
            *(
                None if n == 1 and m != 1 else s
                for s, n, m in zip(full, part.shape, q.shape, strict=True)
            )
        )

    return jax.tree.map(lambda part: fn(part, part_spec(part)), q)
