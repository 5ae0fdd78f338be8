"""The steps by which XLA computes silu and sigmoid here, so that kernels can take the same ones.

One bit would do to move a code of the next product, and that to choose another token: what is fused
with a product must equal what is not. Releases of XLA differ in these steps, and so do its settings
(without optimizations a product and a sum are rounded twice). So XLA is asked: once in a process,
when the first such function could be fused, its results are held against those of the kernels.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import threading

import jax
import numpy as np

from fewbit.kernels._native import ACTIVATION_FUNCTION, native_part

BY_STEPS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
"""Functions that exist in several forms; of all others the kernels have one."""

# Endings of the kernels' names (fewbit/native/finish.cc): how ln 2 is split, and how often a
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
