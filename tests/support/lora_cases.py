"""What the LoRA tests share: ops of every layout with their update written out by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit

RANK, ALPHA = 3, 6.0
SCALE = ALPHA / RANK


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@dataclass(frozen=True)
class Case:
    """An op on a weight, the factors' shapes, and A B in the weight's shape."""

    op: Callable[[Any, Any], Any]
    w: tuple[int, ...]
    x: tuple[int, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    update: Callable[[Any, Any], Any]


def conv(w_spec, x_spec, **kwargs):
    def op(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (1,) * (w.ndim - 2), "SAME", dimension_numbers=(x_spec, w_spec, x_spec), **kwargs
        )

    return op


def ragged(w, x):
    return jax.lax.ragged_dot(x, w, jnp.array([3, 0, 5], jnp.int32))


R = RANK
CASES = {
    "dot": Case(lambda w, x: x @ w, (6, 8), (4, 6), (6, R), (R, 8), lambda a, b: a @ b),
    "dot of a batch": Case(
        lambda w, x: jnp.dot(x, w), (6, 8), (2, 4, 6), (6, R), (R, 8), lambda a, b: a @ b
    ),
    "weight on the left": Case(
        lambda w, x: w @ x, (6, 8), (8, 4), (8, R), (R, 6), lambda a, b: (a @ b).T
    ),
    "transposed weight": Case(
        lambda w, x: x @ w.T, (6, 8), (4, 8), (8, R), (R, 6), lambda a, b: (a @ b).T
    ),
    "reshaped weight": Case(
        lambda w, x: x @ w.reshape(6, 8),
        (6, 2, 4),
        (3, 6),
        (6, R),
        (R, 8),
        lambda a, b: (a @ b).reshape(6, 2, 4),
    ),
    "two contracted axes": Case(
        lambda w, x: jnp.tensordot(x, w, 2),
        (2, 3, 8),
        (5, 2, 3),
        (6, R),
        (R, 8),
        lambda a, b: (a @ b).reshape(2, 3, 8),
    ),
    "batched dot": Case(
        lambda w, x: jax.lax.batch_matmul(x, w),
        (2, 6, 8),
        (2, 4, 6),
        (2, 6, R),
        (2, R, 8),
        lambda a, b: np.einsum("gkr,grn->gkn", a, b),
    ),
    "einsum to heads": Case(
        lambda w, x: jnp.einsum("btd,dhk->bthk", x, w),
        (6, 2, 4),
        (2, 3, 6),
        (6, R),
        (R, 2, 4),
        lambda a, b: np.einsum("dr,rhk->dhk", a, b),
    ),
    "einsum from heads": Case(
        lambda w, x: jnp.einsum("bthk,hkd->btd", x, w),
        (2, 4, 6),
        (2, 3, 2, 4),
        (2, 4, R),
        (R, 6),
        lambda a, b: np.einsum("hkr,rd->hkd", a, b),
    ),
    "einsum, weight first": Case(
        lambda w, x: jnp.einsum("hdk,btd->bhtk", w, x),
        (2, 6, 4),
        (2, 3, 6),
        (6, R),
        (R, 2, 4),
        lambda a, b: np.einsum("dr,rhk->hdk", a, b),
    ),
    "einsum with a batch axis": Case(
        lambda w, x: jnp.einsum("bhd,hdk->bhk", x, w),
        (2, 6, 4),
        (3, 2, 6),
        (2, 6, R),
        (R, 4),
        lambda a, b: np.einsum("hdr,rk->hdk", a, b),
    ),
    "conv HWIO": Case(
        conv("HWIO", "NHWC"),
        (3, 3, 4, 5),
        (2, 6, 6, 4),
        (3, 3, 4, R),
        (R, 5),
        lambda a, b: np.einsum("hwir,ro->hwio", a, b),
    ),
    "conv OIHW": Case(
        conv("OIHW", "NCHW"),
        (5, 4, 3, 3),
        (2, 4, 6, 6),
        (3, 3, 4, R),
        (R, 5),
        lambda a, b: np.einsum("hwir,ro->oihw", a, b),
    ),
    "conv in groups": Case(
        conv("HWIO", "NHWC", feature_group_count=2),
        (3, 3, 2, 6),
        (2, 5, 5, 4),
        (3, 3, 2, R),
        (R, 6),
        lambda a, b: np.einsum("hwir,ro->hwio", a, b),
    ),
    "conv 1d": Case(
        conv("WIO", "NWC"),
        (3, 4, 5),
        (2, 8, 4),
        (3, 4, R),
        (R, 5),
        lambda a, b: np.einsum("wir,ro->wio", a, b),
    ),
    "ragged dot": Case(
        ragged,
        (3, 6, 8),
        (8, 6),
        (3, 6, R),
        (3, R, 8),
        lambda a, b: np.einsum("gkr,grn->gkn", a, b),
    ),
}


# The others stand for the same code in `make test-all`.
_QUICK = ("dot", "batched dot", "einsum with a batch axis", "conv HWIO", "ragged dot")
SOME = [name if name in _QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]


def lora(function, params, *args, seed=0, **rule):
    """(run, params with adapters that are not zero, plan) of a plain function."""
    rule = {"rank": RANK, "alpha": ALPHA, "lora_b_initializer": "normal", **rule}
    provider = fewbit.LoraProvider(**rule)
    plan = fewbit.plan(function, provider, params, *args)
    params = fewbit.quantize_params(params, plan)
    params = fewbit.lora.init(plan, params, jax.random.key(seed))
    return fewbit.apply_lora_to_model(function, provider), params, plan


def float_base(value, dtype=np.float64):
    """A weight as the numbers it stands for."""
    if isinstance(value, fewbit.WithAux):
        value = fewbit.dequantize(value.array, jnp.float32)
    return np.asarray(value, dtype)


def close(got, wanted, tolerance):
    """Against the largest number of the result."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert np.abs(got - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1e-6)
