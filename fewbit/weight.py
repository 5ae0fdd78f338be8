"""A quantized parameter as a value of the interpreter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fewbit.qarray import QArray, dequantize


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Weight:
    """A quantized parameter on its way through the model, with what rides on it."""

    array: QArray
    leaf: str
    rule: Any = None

    def tree_flatten(self):
        return (self.array,), (self.leaf, self.rule)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)

    def moved(self, array: QArray) -> "Weight":
        return Weight(array, self.leaf, self.rule)


def is_weight(value: Any) -> bool:
    """Whether a value of the interpreter is a quantized parameter."""
    return isinstance(value, Weight)


def plain(value: Any) -> Any:
    """The float array that a value stands for."""
    return dequantize(value.array, value.array.dtype) if is_weight(value) else value


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
