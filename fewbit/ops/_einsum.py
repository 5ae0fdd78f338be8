"""einsum on arrays and QArrays: opt_einsum finds the order, dot_general does the pairs.

A pair step becomes one dot_general once three things are out of the way: a letter repeated inside
an operand, a letter summed from one operand only, and a 1-wide axis facing a wide one. The first
two need sums or diagonals of values, so that operand is dequantized; the third only drops an axis.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum

from fewbit.kernels import finish
from fewbit.numerics import should_quantize
from fewbit.ops import _granularity as granularity
from fewbit.ops._derivatives import run
from fewbit.ops._dot import DotProduct, dot_general
from fewbit.ops._operand import (
    Deferred,
    Paired,
    as_float,
    held,
    make_spec,
    operand,
    pair,
    plain_product,
    promote,
    result_dtype,
    spec_of,
)
from fewbit.qarray import HowToQuantize, QArray, moves
from fewbit.rules import DotGeneralQtConfig, check_config


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
        product = functools.partial(jnp.einsum, subscripts, optimize=optimize, precision=precision)
        settings = dict(out_sharding=out_sharding)
        whole = plain_product(product, operands, preferred_element_type, **settings)
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


# --- einsum of two operands for training: one `dot_general_qt` product and a transposition --------


def einsum_qt(
    einsum_str: str,
    lhs: Any,
    rhs: Any,
    config: DotGeneralQtConfig,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.einsum` of two operands for training; see `dot_general_qt`.

    Tiles are on the last summed axis of each operand in its own order, as in serving.

    >>> import jax.numpy as jnp
    >>> config = DotGeneralQtConfig(lhs_qtype='int8', rhs_qtype='int8')
    >>> einsum_qt('btd,dnh->btnh', jnp.ones((2, 3, 8)), jnp.ones((8, 2, 4)), config).shape
    (2, 3, 2, 4)
    """
    check_config("einsum_qt", DotGeneralQtConfig, config)
    ndims = (lhs.ndim, rhs.ndim)
    hows = tuple(_how(einsum_str, ndims, side, config) for side in (0, 1))
    labels, out = granularity.split_subscripts(einsum_str, ndims)
    operands = [lhs, rhs]
    sizes = [dict(zip(labels[s], operands[s].shape, strict=True)) for s in (0, 1)]
    # A 1-wide axis that faces a wide one is dropped; what then stands in one operand only, and not
    # in the result, is summed.
    wide = [
        [c for c, n in sizes[s].items() if n != 1 or sizes[1 - s].get(c, 1) == 1] for s in (0, 1)
    ]
    for side in (0, 1):
        kept = "".join(c for c in wide[side] if c in out or c in wide[1 - side])
        if kept != labels[side]:
            whole = _as_pair(operands[side], hows[side], config, side)
            narrow = [c for c in sizes[side] if c not in wide[side]]
            operands[side] = _reduced(whole, labels[side], narrow, kept)
        labels[side] = kept
    config = _renumbered(config, granularity.split_subscripts(einsum_str, ndims)[0], labels)
    left, right = labels
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in left if c in right and c not in out]
    produced = batch + [c for c in left + right if c not in batch and c not in summed]
    if out_sharding is not None:
        mesh, entries = spec_of(out_sharding, len(out))
        out_sharding = make_spec(mesh, [entries[out.index(c)] for c in produced])
    product = DotProduct.make(
        tuple(
            (tuple(map(left.index, letters)), tuple(map(right.index, letters)))
            for letters in (summed, batch)
        ),
        (len(left), len(right)),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        name="einsum_qt",
    )
    result = run(product, (operands[0], operands[1]), (hows[0], hows[1]), config)
    order = [produced.index(c) for c in out]
    return result if order == sorted(order) else jnp.transpose(result, order)


def _how(
    einsum_str: str, ndims: tuple[int, int], side: int, config: DotGeneralQtConfig
) -> HowToQuantize | None:
    fields = config.operand(side)
    if fields["qtype"] is None:
        return None
    summed = granularity.summed_axes(einsum_str, ndims)
    fields = granularity.config_fields(config, side, ndims, summed)
    return granularity.einsum_how(einsum_str=einsum_str, ndims=ndims, for_lhs=side == 0, **fields)


def _renumbered(
    config: DotGeneralQtConfig, given: Sequence[str], labels: Sequence[str]
) -> DotGeneralQtConfig:
    """The config with tiles of gradients on the axes that the operands still have."""
    changes = {}
    for side, name in enumerate(("dlhs_tile_size", "drhs_tile_size")):
        tiles, before, now = getattr(config, name), given[1 - side], labels[1 - side]
        if isinstance(tiles, Mapping) and before != now:
            if any(not -len(before) <= axis < len(before) for axis in tiles):
                continue  # told where the gradient is made
            kept = {before[axis]: tile for axis, tile in tiles.items() if before[axis] in now}
            changes[name] = {now.index(c): tile for c, tile in kept.items()} or None
    return config.replace(**changes) if changes else config


def _as_pair(x: Any, how: HowToQuantize | None, config: DotGeneralQtConfig, side: int) -> Paired:
    if isinstance(x, Paired):
        return x
    x = jnp.asarray(x)
    if how is None or not should_quantize(x.dtype):
        return Paired(x)
    return pair(x, how, clip=not config.disable_gradient_clipping, collect=config.collect(side))


def _reduced(x: Paired, labels: str, narrow: list[str], kept: str) -> Paired:
    """The operand, quantized as it was given, with the axes `kept`: codes if none is summed."""
    if len(narrow) + len(kept) != len(labels):  # a letter is summed away, or a diagonal taken
        summed = functools.partial(jnp.einsum, f"{labels}->{kept}")
        if x.quantized is None:
            return Paired(summed(x.array))
        numbers = as_float(operand(x.quantized), x.array.dtype)
        return Paired(summed(x.array), jax.lax.stop_gradient(summed(numbers)))
    axes = tuple(map(labels.index, narrow))
    q = None if x.quantized is None else moves.squeeze(operand(x.quantized), axes)
    return Paired(jnp.squeeze(x.array, axes), q)
