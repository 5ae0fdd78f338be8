"""NNX modules and their classes: where a module stands, and scopes around its methods in a trace.

A quantized module and a traced twin are ordinary modules whose class was exchanged for a subclass
of the original, made once per original class.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from fewbit.interpreter import current
from fewbit.models.linen._module import scopes as linen_scopes
from fewbit.tracing import scope_name

_PATH = "_fewbit_path"  # on a twin's modules while it is traced
_PLACE = "_fewbit_place"  # on a quantized model's modules
RNGS = "qwix_rngs"  # the attribute that people set by `model.set_attributes(qwix_rngs=nnx.Rngs(0))`
UPDATE_OFF = "disable_quant_stats_update"  # set by people to evaluate without counting


class Place:
    """A module's path in its model, so that `q.head(x)` follows the rules for 'head'.

    All Places are equal: a path is no part of a module's structure, and blocks must still stack.
    Its clones share it, inside of `nnx.jit` too; `last` is the runner of the last call of any.
    """

    def __init__(self, path: str):
        self.path = path
        self.last: Any = None

    def __deepcopy__(self, memo: Any) -> "Place":
        copy = Place(self.path)
        copy.last = self.last
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.path,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place)

    def __hash__(self) -> int:
        return hash(Place)

    def __repr__(self) -> str:
        return repr(self.path)


def place_of(module: Any) -> str:
    """The path a module was quantized under; '' for a float module or a whole model."""
    place = _place(module)
    return "" if place is None else place.path


def _place(module: Any) -> Place | None:
    # Not by getattr: nnx.Rngs makes a stream of any attribute that it is asked for.
    if not isinstance(module, nnx.Pytree):
        return None
    found: Place | None = vars(module).get(_attribute(module, _PLACE))
    return found


def set_place(module: nnx.Module, path: str) -> None:
    """Remember where a module stands."""
    setattr(module, _attribute(module, _PLACE), Place(path))


def remember_call(module: nnx.Module, runner: Any) -> None:
    """Keep what ran a quantized module last, for its arguments."""
    place = _place(module)
    if place is not None:
        place.last = runner


def last_runner(module: nnx.Module) -> Any:
    """What ran a quantized module last, or showed how it is called; None if nothing did."""
    place = _place(module)
    return None if place is None else place.last


def forget_place(module: nnx.Module) -> None:
    """The inverse of `set_place`."""
    _forget(module, _PLACE)


def _attribute(module: Any, name: str) -> str:
    """What an attribute of ours is called: `ToNNX` takes all others for variables of its module."""
    return f"to_nnx_{name}" if isinstance(module, nnx.bridge.ToNNX) else name


def _forget(module: nnx.Module, name: str) -> None:
    attribute = _attribute(module, name)
    if attribute in vars(module):
        delattr(module, attribute)


def set_class(module: nnx.Module, cls: type) -> None:
    """Exchange a module's class."""
    object.__setattr__(module, "__class__", cls)


def original_class(cls: type) -> type:
    """The user's class behind a quantized one."""
    return getattr(cls, "_unquantized_type", cls)


def modules(node: Any) -> list[tuple[str, nnx.Module]]:
    """Every module below `node`, itself included, by path; a shared one under its first path."""
    if not isinstance(node, nnx.Module):
        return []
    return [("/".join(map(str, path)), module) for path, module in nnx.iter_modules(node)]


def methods_of(cls: type) -> dict[str, Any]:
    """`__call__` and the public methods a module class defines; `nnx.jit`-ed ones count too.

    Those that only move modules about, as a list's do, are no computation. What answers bit by bit
    (a generator, a coroutine) is Python's, and what it calls meanwhile is quantized.
    """
    base = set(dir(nnx.Module))
    found = {}
    for name, value in inspect.getmembers_static(cls):
        public = name == "__call__" or (not name.startswith("_") and name not in base)
        bindable = callable(value) and hasattr(type(value), "__get__")
        if public and bindable and not isinstance(value, type | staticmethod | classmethod):
            if value not in _MOVING and not _is_bit_by_bit(inspect.unwrap(value)):
                found[name] = value
    return found


_MOVING = [
    value for kind in (nnx.List, nnx.Dict) for _, value in inspect.getmembers_static(kind, callable)
]


def _is_bit_by_bit(method: Any) -> bool:
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(method) for is_kind in kinds)


_NO_ENTRIES = {_PATH, _PLACE, RNGS, UPDATE_OFF}


def subclass(original: type, namespace: dict[str, Any]) -> type:
    """A class that passes for `original`: its name, its module, its documentation."""
    namespace |= {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_unquantized_type": original,
    }
    if issubclass(original, nnx.Dict):  # whose entries are its attributes
        namespace["__iter__"] = lambda self: (
            name for name in original.__iter__(self) if name not in _NO_ENTRIES
        )
    return type(original)(original.__name__, (original,), namespace)


def _no_scopes(path: str) -> Any:
    return contextlib.nullcontext()


@functools.lru_cache(maxsize=1024)
def scoped_class(original: type) -> type:
    """The class of a twin's module while tracing: each public method opens fewbit's scope."""

    inside = linen_scopes if issubclass(original, nnx.bridge.ToNNX) else _no_scopes

    def wrap(method: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def scoped(self, *args, **kwargs):
            path = vars(self).get(_attribute(self, _PATH), "")
            with jax.named_scope(scope_name(path, original.__name__)), current.in_module(path):
                with inside(path):
                    return method.__get__(self, type(self))(*args, **kwargs)

        return scoped

    return subclass(original, {name: wrap(m) for name, m in methods_of(original).items()})


@functools.lru_cache(maxsize=1024)
def _unscoped_class(original: type) -> type:
    return subclass(original, {}) if issubclass(original, nnx.Dict) else original


def open_scopes(nodes: Iterable[Any], base: str, annotate: bool) -> list[tuple[nnx.Module, type]]:
    """Give a twin's modules their original classes, with scopes if `annotate`; returns the undo.

    The path is a string in the module's structure, so it travels through nnx.jit, scan and remat.
    """
    changed: list[tuple[nnx.Module, type]] = []
    for number, node in enumerate(nodes):
        top = base if number == 0 else place_of(node)
        for path, module in modules(node):
            if any(module is done for done, _ in changed):
                continue
            changed.append((module, type(module)))
            original = original_class(type(module))
            set_class(module, (scoped_class if annotate else _unscoped_class)(original))
            if annotate:
                whole = "/".join(part for part in (top, path) if part)
                setattr(module, _attribute(module, _PATH), whole)
    return changed


def close_scopes(changed: list[tuple[nnx.Module, type]]) -> None:
    """Back to the classes the modules came with. Modules made in the call keep theirs."""
    for module, cls in changed:
        set_class(module, cls)
        _forget(module, _PATH)
