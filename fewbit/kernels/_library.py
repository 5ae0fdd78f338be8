"""Which backend runs an operation here: XLA, or the compiled library.

The library is opened once, on first use, and its functions are registered with JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jaxlib
from jax.experimental.xla_metadata import set_xla_metadata
from jax.export import is_symbolic_dim

from fewbit._util import nearest

# --- Which backend is asked for: native code where there is some, unless XLA alone is wanted ------

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
        hint = nearest(name, BACKENDS, "; did you mean {}?", cutoff=0.6)
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


# --- The compiled library: found, opened once, and its functions registered with JAX --------------

LIBRARY_VARIABLE = "FEWBIT_NATIVE_LIBRARY"
"""Environment variable: a library to open instead of the installed one; empty turns it off."""

FUNCTIONS = (
    "fewbit_absmax_rows",
    "fewbit_cached_attention",
    "fewbit_channel_conv",
    "fewbit_codes_dot",
    "fewbit_conv",
    "fewbit_matmul",
    "fewbit_quantize_int8",
    "fewbit_quantize_shifted_int8",
)
"""Symbols of the library, which are also the names of the FFI targets."""

ACTIVATION_FUNCTION = "fewbit_activation"
"""Symbol of the library: what an activation makes of numbers, called without XLA."""

_LIBRARY_NAME = "libfewbit_native.so"

_MSG_OFF = f"turned off: {LIBRARY_VARIABLE} is set and empty; unset it to use the native part"
_MSG_NOT_BUILT = (
    "not built: no {name} in {places}. Install the package with a C++17 compiler present "
    "(`pip install .`, or `make .venv` in a checkout)"
)
_MSG_NOT_THERE = f"{LIBRARY_VARIABLE} names {{path}}, which is not a file; correct or unset it"
_MSG_NOT_LOADED = (
    "{path} does not load: {error}. Rebuild it for this machine: "
    "`pip install --force-reinstall --no-deps .`"
)
_MSG_OTHER_FFI = (
    "{path} was built against jaxlib {built} (FFI {major}.{minor}), and jaxlib {here} (FFI {ffi}), "
    "which takes that of its own age and older ones, would not start with it. "
    "Rebuild it: `pip install --force-reinstall --no-deps .`"
)
_MSG_NOT_REGISTERED = (
    "jaxlib {here} refuses the functions of {path}, built against jaxlib {built} "
    "(FFI {major}.{minor}): {error}. Rebuild it: `pip install --force-reinstall --no-deps .`"
)
_MSG_UNUSED = "The native kernels are not used, XLA runs everything: {missing}."

_registration = threading.Lock()


@dataclasses.dataclass(frozen=True)
class NativePart:
    """The compiled library, open and registered, or the reason why it is not.

    Attributes:
      path: the file that was found or named, or None.
      missing: why the native part cannot be used; None if it can.
      refused: a setting that cannot be followed, which is then `missing` too.
      isa: the kernels it uses (`avx512_vnni`, `avx2`, `portable`).
      jaxlib: the jaxlib version whose FFI headers it was compiled with.
      ffi: the FFI version of those headers.
    """

    path: str | None = None
    missing: str | None = None
    refused: str | None = None
    isa: str | None = None
    jaxlib: str | None = None
    ffi: str | None = None


def native_available() -> bool:
    """Whether the compiled part is used in this process and place. The first call opens it.

    Not under `backend('xla')`, nor with FEWBIT_BACKEND=xla. A FEWBIT_ISA that this CPU does not
    have is an error; a library that is there and cannot be used is told once.

    >>> import fewbit.kernels
    >>> fewbit.kernels.native_available() == (fewbit.kernels.info().backend == 'native')
    True
    """
    if asked_backend()[0] == "xla":
        return False
    part = native_part()
    if part.refused is not None:
        raise ValueError(part.refused)
    if part.missing is not None and part.path is not None:
        _say_once(part.missing)
    return part.missing is None


def native_part() -> NativePart:
    """The compiled library, opened and registered at the first call.

    >>> native_part() is native_part()
    True
    """
    # functools.cache alone would let two threads register side by side.
    with _registration:
        return _open_and_register()


@functools.cache
def _say_once(missing: str) -> None:
    warnings.warn(_MSG_UNUSED.format(missing=missing), RuntimeWarning, stacklevel=3)


@functools.cache
def _open_and_register() -> NativePart:
    path, missing = _find()
    if path is None or missing is not None:
        return NativePart(path=None if path is None else str(path), missing=missing)
    try:
        library = ctypes.CDLL(str(path))
        symbols = {name: getattr(library, name) for name in FUNCTIONS}
        getattr(library, ACTIVATION_FUNCTION)  # not an old build of the library
        isa = _text(library, "fewbit_isa")
        isa_problem = _text(library, "fewbit_isa_problem")
        built = _text(library, "fewbit_jaxlib_version")
        major = library.fewbit_ffi_api_major()
        minor = library.fewbit_ffi_api_minor()
    except (OSError, AttributeError) as error:  # AttributeError: a symbol of another version
        return NativePart(path=str(path), missing=_MSG_NOT_LOADED.format(path=path, error=error))
    part = NativePart(path=str(path), isa=isa, jaxlib=built, ffi=f"{major}.{minor}")
    if isa_problem:
        return dataclasses.replace(part, missing=isa_problem, refused=isa_problem)
    facts = dict(path=path, here=jaxlib.__version__, built=built, major=major, minor=minor)
    here = _ffi_here()
    if here is not None and (major != here[0] or minor > here[1]):
        reason = _MSG_OTHER_FFI.format(**facts, ffi="{}.{}".format(*here))
        return dataclasses.replace(part, missing=reason)
    try:
        for name, symbol in symbols.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform="cpu")
    except Exception as error:  # the type is not public; a mismatch must not be fatal
        return dataclasses.replace(part, missing=_MSG_NOT_REGISTERED.format(**facts, error=error))
    return part


def _ffi_here() -> tuple[int, int] | None:
    """The FFI version of the jaxlib that runs, as its own headers have it; None without headers.

    Asked before anything is registered: what JAX refuses is an error when its CPU backend starts,
    which may be long after, and then of every program.
    """
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", text, re.MULTILINE))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


def _find() -> tuple[pathlib.Path | None, str | None]:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named == "":
        return None, _MSG_OFF
    if named is not None:
        there = os.path.isfile(named)
        return pathlib.Path(named), None if there else _MSG_NOT_THERE.format(path=named)
    # An editable install has two places: the sources and what the build installed.
    spec = importlib.util.find_spec("fewbit")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    places = [pathlib.Path(root) / "native" for root in roots]
    for place in places:
        if (place / _LIBRARY_NAME).is_file():
            return place / _LIBRARY_NAME, None
    shown = " or ".join(str(place) for place in places)
    return None, _MSG_NOT_BUILT.format(name=_LIBRARY_NAME, places=shown)


def _text(library: ctypes.CDLL, name: str) -> str:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return function().decode()


# --- Whether an operation, as it runs here, is slower than the float32 one it replaces ------------

# XLA's integer product needs a few rows to pay for quantizing them (bench/products.py); its integer
# convolution is as fast as float32 at best, and far slower at worst (bench/convolutions.py).
_ROWS_FOR_INT8 = 8


def runs_on(what: str, rows: int) -> str:
    """The plan's word for what runs a Site, with `slow` where float32 would be faster.

    Only this machine's own backend is judged, from measurements on CPUs; others get no verdict.

    >>> import jax
    >>> runs_on('dequantize + float dot', 1) if jax.default_backend() == 'cpu' else 'slow'
    'xla dequantize + float dot, slow'
    """
    if what.startswith("native"):
        return what
    fast = jax.default_backend() != "cpu"
    if what.startswith("int8") and not what.endswith("conv"):
        fast = (
            fast or is_symbolic_dim(rows) or rows >= _ROWS_FOR_INT8
        )  # a symbolic batch may be many
    return f"xla {what}" if fast else f"xla {what}, slow"
