"""einsum on arrays and QArrays: opt_einsum finds the order, dot_general does the pairs.

A pair step becomes one dot_general once three things are out of the way: a letter repeated inside
an operand, a letter summed from one operand only, and a 1-wide axis facing a wide one. The first
two need sums or diagonals of values, so that operand is dequantized; the third only drops an axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum  # type: ignore[import-untyped]

from fewbit import moves
from fewbit.kernels import finish
from fewbit.ops.deferred import Deferred
from fewbit.ops.dot_general import dot_general
from fewbit.ops.scaling import as_float, held, make_spec, operand, promote, result_dtype, spec_of
from fewbit.qarray import QArray


def einsum(
    *args: Any,
    preferred_element_type: Any = None,
    precision: Any = None,
    out_sharding: Any = None,
    optimize: Any = "auto",
    bias: Any = None,
    activation: str | None = None,
    **kwargs: Any,
) -> jax.Array:
    """`jnp.einsum` where every operand may be an array or a QArray.

    `bias` and `activation` follow the product, as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize
    >>> w = quantize(jnp.ones((8, 2, 4)), 'int8', channelwise_axes=(1, 2))
    >>> einsum('...d,dnh->...nh', jnp.ones((3, 5, 8)), w).shape
    (3, 5, 2, 4)
    """
    if kwargs:
        raise TypeError(
            f"einsum got unknown arguments {sorted(kwargs)}. It takes optimize, precision, "
            "preferred_element_type, out_sharding, bias and activation."
        )
    labels, output, operands = _parse(args)
    if not any(isinstance(value, QArray | Deferred) for value in operands):
        subscripts = ",".join(labels) + "->" + output
        whole = jnp.einsum(
            subscripts,
            *operands,
            optimize=optimize,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        return finish(whole, bias, activation)
    dtype = result_dtype(operands, preferred_element_type)
    compute = promote(*(value.dtype for value in operands))
    operands = [v if isinstance(v, QArray | Deferred) else v.astype(compute) for v in operands]
    settings = dict(precision=precision, preferred_element_type=preferred_element_type)
    operands, labels = list(operands), list(labels)
    steps = _path(labels, output, operands, optimize)
    for number, chosen in enumerate(steps):
        final = number == len(steps) - 1
        taken = [(operands.pop(i), labels.pop(i)) for i in sorted(chosen, reverse=True)][::-1]
        out = output if final else _kept(taken, labels, output)
        placing = out_sharding if final else None
        after = dict(bias=bias, activation=activation) if final else {}
        operands.append(_contract(taken, out, settings, placing, after))
        labels.append(out)
    return operands[0].astype(dtype)


def _parse(args: tuple[Any, ...]) -> tuple[list[str], str, list[Any]]:
    """Letters of each operand, of the output, and the operands, from either spelling of einsum."""
    if args and isinstance(args[0], str):
        subscripts, operands = args[0], [held(value) for value in args[1:]]
        spelled: tuple[Any, ...] = (subscripts, *[value.shape for value in operands])
    else:
        pairs, tail = args[: len(args) // 2 * 2], args[len(args) // 2 * 2 :]
        operands = [held(value) for value in pairs[::2]]
        shapes = [value.shape for value in operands]
        spelled = tuple(x for pair in zip(shapes, pairs[1::2], strict=True) for x in pair) + tail
    if not operands:
        raise ValueError(
            f"Unsupported einsum format: {len(args)} arguments without an operand. "
            "Write einsum('ab,bc->ac', x, w)."
        )
    inputs, output, _ = opt_einsum.parser.parse_einsum_input(spelled, shapes=True)
    return inputs.split(","), output, operands


def _path(
    labels: Sequence[str], output: str, operands: Sequence[Any], optimize: Any
) -> list[tuple[int, ...]]:
    if len(operands) <= 2:
        return [tuple(range(len(operands)))]
    if isinstance(optimize, bool):
        optimize = "auto" if optimize else [(0, 1)] * (len(operands) - 1)
    shapes = [value.shape for value in operands]
    subscripts = ",".join(labels) + "->" + output
    path, _ = opt_einsum.contract_path(subscripts, *shapes, shapes=True, optimize=optimize)
    return [tuple(step) for step in path]


def _kept(taken: Sequence[tuple[Any, str]], waiting: Sequence[str], output: str) -> str:
    """Letters of an intermediate result: those that a later step or the output still needs."""
    needed = set(output).union(*waiting)
    return "".join(c for c in dict.fromkeys("".join(part for _, part in taken)) if c in needed)


def _contract(
    taken: Sequence[tuple[Any, str]],
    out: str,
    settings: dict[str, Any],
    placing: Any,
    after: dict[str, Any],
) -> jax.Array:
    while len(taken) > 2:
        middle = _kept(taken[:2], [part for _, part in taken[2:]], out)
        value = _pair(taken[0], taken[1], middle, settings, None, {})
        taken = [(value, middle), *taken[2:]]
    if len(taken) == 1:
        return _finished(_unary(*taken[0], out, placing), after)
    return _pair(taken[0], taken[1], out, settings, placing, after)


def _finished(value: jax.Array, after: dict[str, Any]) -> jax.Array:
    return finish(value, **after) if after else value


def _unary(value: Any, labels: str, out: str, placing: Any = None) -> jax.Array:
    if labels == out and placing is None:
        return as_float(value)
    return jnp.einsum(f"{labels}->{out}", as_float(value), out_sharding=placing)


def _pair(
    left: tuple[Any, str],
    right: tuple[Any, str],
    out: str,
    settings: dict[str, Any],
    placing: Any,
    after: dict[str, Any],
) -> jax.Array:
    left, right = _without_repeats(*left), _without_repeats(*right)
    left, right = _without_narrow(*left, *right), _without_narrow(*right, *left)
    lhs, l_labels = _without_lonely(*left, right[1], out)
    rhs, r_labels = _without_lonely(*right, left[1], out)
    batch = [c for c in l_labels if c in r_labels and c in out]
    summed = [c for c in l_labels if c in r_labels and c not in out]
    produced = batch + [c for c in l_labels + r_labels if c not in batch and c not in summed]
    numbers = (
        (tuple(map(l_labels.index, summed)), tuple(map(r_labels.index, summed))),
        (tuple(map(l_labels.index, batch)), tuple(map(r_labels.index, batch))),
    )
    if placing is not None:
        mesh, entries = spec_of(placing, len(out))
        placing = make_spec(mesh, [entries[out.index(c)] for c in produced])
    if produced == list(out):
        return dot_general(lhs, rhs, numbers, **settings, out_sharding=placing, **after)
    result = dot_general(lhs, rhs, numbers, **settings, out_sharding=placing)
    return _finished(jnp.transpose(result, [produced.index(c) for c in out]), after)


def _without_repeats(value: Any, labels: str) -> tuple[Any, str]:
    once = "".join(dict.fromkeys(labels))
    return (value, labels) if once == labels else (_unary(value, labels, once), once)


def _without_narrow(value: Any, labels: str, other: Any, other_labels: str) -> tuple[Any, str]:
    """Drop 1-wide axes that face a wide axis of the other operand."""
    sizes = dict(zip(other_labels, other.shape, strict=True))
    narrow = [a for a, c in enumerate(labels) if value.shape[a] == 1 and sizes.get(c, 1) != 1]
    if not narrow:
        return value, labels
    kept = "".join(c for a, c in enumerate(labels) if a not in narrow)
    value = operand(value) if isinstance(value, Deferred) else value
    if isinstance(value, QArray):
        return moves.squeeze(value, tuple(narrow)), kept
    return jnp.squeeze(value, tuple(narrow)), kept


def _without_lonely(value: Any, labels: str, other_labels: str, out: str) -> tuple[Any, str]:
    """Sum away letters that only this operand has; a sum of values, so a QArray is dequantized."""
    kept = "".join(c for c in labels if c in out or c in other_labels)
    return (value, labels) if kept == labels else (_unary(value, labels, kept), kept)
