"""A package of another name that is made of ours: `import other.part` gives our names.

A table says what each name is; nothing of it is loaded before it is asked for. A finder in
`sys.meta_path` is Python's own way to bring modules from elsewhere: no function is replaced.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fewbit._util._names import nearest

_MSG_IMPORTED = (
    "{name} is imported already and in use{where}, so it cannot be made fewbit's any more. Call "
    "this before anything imports {name}, or run the program by python -m {runner}."
)
_MSG_NO_NAME = "fewbit stands in for {name}, and {module} has no {word!r}.{near}"
_MSG_REFUSED = "fewbit stands in for {name}, and has no {inside}: {why}."
_MSG_FIXED = "{name} is {value!r} in fewbit and cannot be {new!r}: {why}."
_MSG_REPLACED = (
    "The program replaces {name}, which nothing of fewbit calls: the replacement changes nothing "
    "but what the program itself calls by that name.{what}"
)
_MSG_NO_MODULE = (
    "'{word}' is a name in {module} and no module: write `from {module} import {word}`."
)
_ELSEWHERE = " It is in {}."
_HAS, _DIR, _FEW = " It has {}.", " dir({}) lists what there is.", 12


class AlreadyImported(ImportError, RuntimeError):
    """A package that cannot be stood in for, as it is in use itself."""


@dataclass(frozen=True)
class Fixed:
    """A setting that has one value here, and why."""

    value: Any
    why: str


@dataclass(frozen=True)
class Said:
    """What is said of one package, where it is not what is said of all."""

    module: str = "fewbit's names in place of those of {module}."
    imported: str = _MSG_IMPORTED
    no_name: str = _MSG_NO_NAME


@dataclass(eq=False, repr=False)
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of one package, and what each of them has.

    `modules` has the names of each module, by its path below the package ('' for the package
    itself): the full name of what stands for it, a `Fixed` value, or what it is. Names in `refused`
    can be imported; using one is an error that says why. A module whose `refused` has '' is refused
    as a whole, with all below it. A module below the package imports `loads` when it is imported.
    `short` has modules that all those below the package have, too, by their names there.
    """

    name: str
    modules: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    loads: str | None = None
    short: Mapping[str, str] = field(default_factory=dict)
    said: Said = Said()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top, _, below = fullname.partition(".")
        if top != self.name:
            return None
        if below not in self.modules and self._whole(below) is None:
            # `from a.b import c` comes here too, if a.b has no c. Its name is left out: Python
            # would drop this message for its own.
            parent, _, word = below.rpartition(".")
            raise ModuleNotFoundError(self._unknown(parent, word))
        # Each may have modules below it: so Python asks here for every name that it does not find.
        return importlib.machinery.ModuleSpec(fullname, self, origin="fewbit", is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name, self.said.module.format(module=spec.name))

    def exec_module(self, module: ModuleType) -> None:
        below = module.__name__.partition(".")[2]
        names = self.modules.get(below, {})
        vars(module)["__all__"] = [name for name in names if not name.startswith("_")]
        if below and names and self.loads is not None:
            importlib.import_module(self.loads)

    def look_up(self, below: str, word: str) -> Any:
        """What a module has under a name."""
        names, inside = self.modules.get(below, {}), f"{below}.{word}".lstrip(".")
        if word in names:
            entry = names[word]
            if isinstance(entry, Fixed):
                return entry.value
            return found_at(entry) if isinstance(entry, str) else entry
        if word.startswith("__"):  # Python itself and its tools ask for these
            raise AttributeError(f"module {self._full(below)!r} has no attribute {word!r}")
        if inside in self.modules or inside in self.refused:
            return importlib.import_module(self._full(inside))
        if below and word in self.short:
            return importlib.import_module(self._full(self.short[word]))
        why = self.refused.get(below, {}).get(word, self._whole(below))
        if why is None:
            # obj: else Python adds a suggestion of its own behind ours.
            raise AttributeError(self._unknown(below, word), name=word, obj=None)
        text = _MSG_REFUSED.format(name=self.name, inside=inside, why=why)
        return refusal(self._full(inside), text)

    def names(self, below: str) -> set[str]:
        """All that a module has: names, refused ones, and modules."""
        inside = f"{below}." if below else ""
        modules = [m for m in (*self.modules, *self.refused) if m.startswith(inside)]
        found = {module.removeprefix(inside).partition(".")[0] for module in modules}
        return {*found, *self.modules.get(below, ()), *self.refused.get(below, ())} - {""}

    def _full(self, below: str) -> str:
        return f"{self.name}.{below}".rstrip(".")

    def _whole(self, below: str) -> str | None:
        """Why a module, or one above it, is refused as a whole."""
        parts = below.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return next((self.refused[m][""] for m in around if "" in self.refused.get(m, {})), None)

    def _unknown(self, below: str, word: str) -> str:
        module, names = self._full(below), self.names(below)
        if word in names:
            return _MSG_NO_MODULE.format(word=word, module=module)
        homes = [self._full(other) for other in self.modules if word in self.names(other)]
        near = _ELSEWHERE.format(min(homes, key=len)) if homes else nearest(word, names, cutoff=0.6)
        listed = _HAS.format(", ".join(sorted(names))) if len(names) <= _FEW else ""
        near = near or listed + _DIR.format(module)
        return self.said.no_name.format(name=self.name, module=module, word=word, near=near)


class _StandIn(ModuleType):
    """A module whose names are found when they are asked for."""

    def __getattr__(self, word: str) -> Any:
        value = self._finder().look_up(self._below(), word)
        vars(self)[word] = value
        return value

    def __setattr__(self, word: str, value: Any) -> None:
        finder, below = self._finder(), self._below()
        entry = None if word.startswith("__") else finder.modules.get(below, {}).get(word)
        full = f"{self.__name__}.{word}"
        if isinstance(entry, Fixed):
            if value != entry.value:
                said = dict(name=full, value=entry.value, new=value, why=entry.why)
                raise NotImplementedError(_MSG_FIXED.format(**said))
        elif entry is not None and value is not finder.look_up(below, word):
            what = f" It stands for {entry}." if isinstance(entry, str) else ""
            warnings.warn(_MSG_REPLACED.format(name=full, what=what), stacklevel=2)
        super().__setattr__(word, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._finder().names(self._below())})

    def _finder(self) -> Any:
        return self.__loader__

    def _below(self) -> str:
        return self.__name__.partition(".")[2]


class _RefusedClass(type):
    """The class of refused classes: an attribute of one is a use of it, too."""

    _text: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself and its tools ask for these
            raise AttributeError(name)
        raise NotImplementedError(cls._text)


class _Refused:
    """Neither a function nor a class: what only a class can be asked is a use of it, too."""

    def __init__(self, module: str, name: str, text: str):
        self.__module__, self.__name__, self.__qualname__ = module, name, name
        self.__doc__ = text

    def _use(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(self.__doc__)

    __call__ = __instancecheck__ = __subclasscheck__ = __mro_entries__ = _use


def refusal(full: str, text: str, *, is_class: bool = False) -> Any:
    """What takes the place of a name that is not there: using it is an error that says `text`.

    A class can still be derived from and asked for by `isinstance`.

    >>> refusal('other.f', 'There is no other.f.')(1)
    Traceback (most recent call last):
        ...
    NotImplementedError: There is no other.f.
    """
    module, _, name = full.rpartition(".")
    if not is_class:
        return _Refused(module, name, text)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(text)

    space = {"__new__": refuse, "__doc__": text, "__module__": module, "_text": text}
    return _RefusedClass(name, (), space)


def found_at(place: str) -> Any:
    """The object of this full name.

    >>> found_at('math.pi')
    3.141592653589793
    """
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def stand_in_for(name: str, *table: Any, runner: str, **more: Any) -> None:
    """Let `import <name>` give our names from now on, as a `Finder` has them.

    Calling it again does nothing. `runner` is the program of ours that does so for programs that
    shall not be edited.
    """
    if any(isinstance(finder, Finder) and finder.name == name for finder in sys.meta_path):
        return
    finder = Finder(name, *table, **more)
    if any(module.partition(".")[0] == name for module in sys.modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        said = dict(name=name, where=f" (from {file})" if file else "", runner=runner)
        raise AlreadyImported(finder.said.imported.format(**said))
    sys.meta_path.insert(0, finder)
