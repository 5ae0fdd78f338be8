"""einsum of two operands for training: one `dot_general_qt` product and a transposition."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import moves
from fewbit.numerics import should_quantize
from fewbit.ops import granularity
from fewbit.ops.scaling import as_float, make_spec, operand, spec_of
from fewbit.qarray import HowToQuantize
from fewbit.training._run import run
from fewbit.training.configs import DotGeneralQtConfig, check_config
from fewbit.training.dot_products import DotProduct
from fewbit.training.paired import Paired, pair


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
    return granularity.einsum_how(einsum_str=einsum_str, ndims=ndims, for_lhs=side == 0, **fields)


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
