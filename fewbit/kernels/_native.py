"""Opens the compiled library once, on first use, and registers its functions with JAX."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import threading
import warnings

import jax

from fewbit.kernels._backend import asked_backend

LIBRARY_VARIABLE = "FEWBIT_NATIVE_LIBRARY"
"""Environment variable: a library to open instead of the installed one; empty turns it off."""

ISA_VARIABLE = "FEWBIT_ISA"
"""Environment variable: the instruction set to use, one that the CPU has; the best one if unset."""

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
    here = _ffi_here()
    if here is not None and (major != here[0] or minor > here[1]):
        reason = _MSG_OTHER_FFI.format(
            here=_jaxlib_version(), path=path, built=built, major=major, minor=minor,
            ffi="{}.{}".format(*here),
        )  # fmt: skip
        return dataclasses.replace(part, missing=reason)
    try:
        for name, symbol in symbols.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform="cpu")
    except Exception as error:  # the type is not public; a mismatch must not be fatal
        reason = _MSG_NOT_REGISTERED.format(
            here=_jaxlib_version(), path=path, built=built, major=major, minor=minor, error=error
        )
        return dataclasses.replace(part, missing=reason)
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
    if named is not None:
        if not named:
            return None, _MSG_OFF
        if not os.path.isfile(named):
            return pathlib.Path(named), _MSG_NOT_THERE.format(path=named)
        return pathlib.Path(named), None
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


def _jaxlib_version() -> str:
    import jaxlib

    return jaxlib.__version__
