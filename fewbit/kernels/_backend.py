"""Which backend is asked for: native code where there is some, unless XLA alone is wanted."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

BACKEND_VARIABLE = "FEWBIT_BACKEND"
"""Environment variable: 'xla' leaves the native part alone in the whole process."""

BACKENDS = ("native", "xla")

_MSG_BACKEND = (
    "{what} asks for the backend {name!r}, which is not known{hint}. There are 'native' (the "
    "compiled part where it has a kernel, else XLA; the default) and 'xla' (XLA alone)."
)
_MSG_EXPORT = (
    "A product with a weight packed for this machine's kernels (layout 'panels') cannot be "
    "exported: the kernels are not part of the exported program. Two cures:\n"
    "  1. with fewbit.kernels.backend('xla'): jax.export.export(jax.jit(f))(...)  # unpacked by "
    "XLA in every call\n"
    "  2. export with plain parameters, fewbit.unpack(params), which XLA reads as they are.\n"
    "To run the kernels in a process that has loaded fewbit, export under "
    "fewbit.kernels.backend('native') with disabled_checks=[jax.export.DisabledSafetyCheck."
    "custom_call('fewbit_matmul')]."
)

_asked: ContextVar[str | None] = ContextVar("fewbit_backend", default=None)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """What is traced or exported inside runs on this backend.

    'xla' uses no native code, as on a machine without it: the program can be exported, and run
    where fewbit is not installed. 'native' is the default, also where FEWBIT_BACKEND=xla is set.
    A function that is already compiled is traced again for its new backend.

    >>> import jax, jax.numpy as jnp
    >>> from fewbit import kernels
    >>> with kernels.backend('xla'):
    ...     kernels.native_available()
    False
    """
    check_backend(name, "fewbit.kernels.backend")
    token = _asked.set(name)
    try:
        # Part of the key under which JAX keeps traces, so none is shared between backends.
        with set_xla_metadata(fewbit_backend=name):
            yield
    finally:
        _asked.reset(token)


def asked_backend() -> tuple[str | None, str]:
    """The backend that somebody asked for (None: nobody), and who.

    >>> asked_backend()[0] in (None, *BACKENDS)
    True
    """
    name = _asked.get()
    if name is not None:
        return name, f"fewbit.kernels.backend({name!r})"
    name = os.environ.get(BACKEND_VARIABLE) or None
    if name is not None:
        check_backend(name, BACKEND_VARIABLE)
    return name, f"{BACKEND_VARIABLE}={name}"


def check_backend(name: str, what: str) -> None:
    """Raise unless there is such a backend; `what` asks for it."""
    if name not in BACKENDS:
        close = difflib.get_close_matches(str(name), BACKENDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(_MSG_BACKEND.format(what=what, name=name, hint=hint))


def exported(
    local: Callable[..., jax.Array], reference: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """What a program that leaves this machine runs for a product with packed weights."""

    def run(*operands: Any, spec: Any) -> jax.Array:
        name, _ = asked_backend()
        if name is None and spec.qtype is not None:
            raise ValueError(_MSG_EXPORT)
        return (local if name == "native" else reference)(*operands, spec=spec)

    return run
