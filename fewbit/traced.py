"""What a trace of a model is made of: the leaves of a tree as values, and their float views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit.decisions import Leaf
from fewbit.qarray import QArray, WithAux
from fewbit.trace import Program
from fewbit.weight import Weight, without_gradient

LeafPath = Callable[[tuple[Any, ...]], str | None]

_MSG_UNTRACEABLE = """{where} cannot be traced: its Python code asks for the value of an array.
  {error}
fewbit reads a model the way jax.jit does. Two cures:
  1. Pass what the code branches on as a plain Python value (a bool, int or string is never traced).
  2. Quantize the submodules that can be traced on their own, and leave this one in float."""


class UntraceableModelError(TypeError):
    """A model whose Python code depends on array values."""


def untraceable(what: str, failed: Sequence[str], error: Exception) -> UntraceableModelError:
    """The error for `what`, of which the module at path `failed[0]` asked for a value."""
    where = f"Module '{failed[0]}' of {what}" if failed and failed[0] else what
    first_line = str(error).strip().split("\n")[0]
    return UntraceableModelError(_MSG_UNTRACEABLE.format(where=where, error=first_line))


def is_stored(value: Any) -> bool:
    """Whether a tree node is a quantized parameter."""
    return isinstance(value, WithAux | QArray)


def float_view(value: Any) -> Any:
    """The abstract float array that a leaf, quantized or not, stands for."""
    if not is_stored(value):
        return jax.typeof(value) if not isinstance(value, jax.ShapeDtypeStruct) else value
    q = value.array if isinstance(value, WithAux) else value
    if not isinstance(q, QArray):
        return float_view(q)
    # Packed codes are unpacked to be looked at: here only on paper.
    codes = q.qvalue if q.layout == "plain" else jax.eval_shape(lambda q: q.qvalue, q)
    if isinstance(codes, jax.ShapeDtypeStruct):
        return codes.update(dtype=q.dtype)
    return jax.typeof(codes).update(dtype=q.dtype)


def as_value(value: Any, leaf: str | None) -> Any:
    """A tree leaf as a value of the interpreter."""
    if isinstance(value, WithAux):
        if not isinstance(value.array, QArray):
            return value.array
        return Weight(without_gradient(value.array, leaf or ""), leaf or "", value.how.rule)
    if isinstance(value, QArray):
        return Weight(without_gradient(value, leaf or ""), leaf or "")
    return value


@dataclass
class Traced:
    """One trace of a runner's function on one set of inputs."""

    program: Program
    values: list[Any]
    out_tree: Any
    forwarded: Sequence[int | None]  # output k is input forwarded[k], untouched
    leaves: list[Leaf | None]  # aligned with values; None for an input that is no parameter
    scales: dict[str, Any] = field(default_factory=dict)  # static scales among the inputs
    learned: dict[str, Any] = field(default_factory=dict)  # scales that training fits
