"""What may follow a product at once: a bias for each column, and an elementwise activation.

The kernels do both where the result still is in the cache. Here is what they stand for.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import nearest
from fewbit.kernels._library import ACTIVATION_FUNCTION, native_part

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
    if name is not None and name not in ACTIVATIONS:
        hint = nearest(name, ACTIVATIONS, "; did you mean {}?", cutoff=0.6)
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


# --- The steps by which XLA computes silu and sigmoid here, so that kernels take the same ---------

BY_STEPS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
"""Functions that exist in several forms; of all others the kernels have one."""

# Endings of the kernels' names (fewbit/native/common/finish.cc): how ln 2 is split, and how often a
# product and its sum are rounded. 'once' means 'twice' on CPUs that cannot, so it comes later.
STEPS = ("cephes/twice", "fdlibm/twice", "cephes/once", "fdlibm/once")

# Two ways to split ln 2 give the same sigmoid for all but one number in a thousand.
_NUMBERS = np.linspace(-87, 20, 2**16, dtype=np.float32)
_asking = threading.Lock()


def fused_activation(name: str | None) -> str | None:
    """The kernels' word for an activation, 'none' for None; None if XLA alone has its bits.

    >>> fused_activation('gelu'), fused_activation(None)
    ('gelu', 'none')
    """
    if name not in BY_STEPS:
        return name or "none"
    steps = xla_steps()
    return None if steps is None else f"{name}/{steps}"


def xla_steps() -> str | None:
    """Which of `STEPS` XLA takes on this CPU; None if none of them, or without the native part.

    >>> xla_steps() in (None, *STEPS)
    True
    """
    if native_part().missing is not None:
        return None
    with _asking:
        return _found()


@functools.cache
def _found() -> str | None:
    # A thread of its own has none of the caller's contexts: no trace under way, no mesh, no guard
    # against transfers, no jit turned off.
    with concurrent.futures.ThreadPoolExecutor(1, "fewbit-steps") as other:
        return other.submit(_compare).result()


def _compare() -> str | None:
    x = jax.device_put(_NUMBERS, jax.local_devices(backend="cpu")[0])
    every = jax.jit(lambda x: {name: function(x) for name, function in BY_STEPS.items()})
    wanted = {name: np.asarray(result) for name, result in every(x).items()}
    for steps in STEPS:
        if all(np.array_equal(_native(f"{name}/{steps}"), wanted[name]) for name in BY_STEPS):
            return steps
    return None


def _native(name: str) -> np.ndarray:
    out = np.empty_like(_NUMBERS)
    function = getattr(ctypes.CDLL(str(native_part().path)), ACTIVATION_FUNCTION)
    function.restype = ctypes.c_bool
    x, y = (part.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for part in (_NUMBERS, out))
    if not function(name.encode(), x, ctypes.c_int64(out.size), y):
        raise ValueError(f"{name!r} is not an activation of the native part.")
    return out
