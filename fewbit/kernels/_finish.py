"""What may follow a product at once: a bias for each column, and an elementwise activation.

The kernels do both where the result still is in the cache. Here is what they stand for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
"""Name -> the function; 'gelu' is the approximation by tanh, as in `jax.nn.gelu`."""

_MSG_ACTIVATION = "activation={name!r} is not known{hint}. Use None or one of {known}."
_MSG_BIAS = "bias must have one number for each of the {n} columns, shape ({n},), got {shape}."


def check_activation(name: str | None) -> None:
    """Raise unless it is None or a known activation.

    >>> check_activation('gelu')
    """
    if name is None or name in ACTIVATIONS:
        return
    close = difflib.get_close_matches(str(name), ACTIVATIONS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    known = ", ".join(map(repr, ACTIVATIONS))
    raise ValueError(_MSG_ACTIVATION.format(name=name, hint=hint, known=known))


def check_bias(bias: Any, n: int) -> None:
    """Raise unless it is None or a vector over `n` columns.

    >>> check_bias(jnp.ones(3), 3)
    """
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(_MSG_BIAS.format(n=n, shape=tuple(bias.shape)))


def finish(out: jax.Array, bias: jax.Array | None, activation: str | None) -> jax.Array:
    """A product, then its bias over the last axes, then its activation: one after the other.

    >>> finish(jnp.ones((1, 2)), jnp.array([-3.0, 1.0]), 'relu')
    Array([[0., 2.]], dtype=float32)
    """
    check_activation(activation)
    if bias is not None:
        wide = jax.lax.expand_dims(bias.astype(out.dtype), range(out.ndim - bias.ndim))
        out = out + jnp.broadcast_to(wide, out.shape)
    return out if activation is None else ACTIVATIONS[activation](out)


def finish_text(bias: Any, activation: str | None) -> str:
    """The plan's words for it.

    >>> finish_text(jnp.ones(3), 'gelu')
    ' + bias + gelu'
    """
    return ("" if bias is None else " + bias") + (f" + {activation}" if activation else "")
