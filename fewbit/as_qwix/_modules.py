"""`import qwix` without Qwix: modules made from the table, and the finder that gives them out.

A finder in `sys.meta_path` is Python's own way to bring modules from elsewhere; no function of
any library is replaced.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fewbit._util import nearest
from fewbit.as_qwix._table import SHORT, TABLE, Entry, Fixed, Refused

ROOT = "qwix"

_MSG_LOADED = (
    "Qwix itself has been imported already{where}, and its names are in use: two libraries cannot "
    "have one name. Call fewbit.install_as_qwix() before the first `import qwix`, at the top of "
    "the program, or run it as `python -m fewbit.as_qwix SCRIPT.py ARGS`."
)
_MSG_REFUSED = "{name} is not in fewbit: {what}. Instead: {instead}."
_MSG_FIXED = "{name} is {value!r} in fewbit and cannot be {new!r}: {why}."
_MSG_REPLACED = (
    "The program replaces {name}, which nothing of fewbit calls: the replacement changes nothing "
    "but what the program itself calls by that name. ({what})"
)
_MSG_NO_MODULE = "fewbit, which stands for Qwix here, has no module '{name}'.{near}"
_MSG_NO_NAME = "fewbit, which stands for Qwix here, has no '{name}' in {module}.{near}"
_MSG_IS_A_NAME = (
    "'{name}' is a name in {module} and no module: write `from {module} import {name}`."
)
_ELSEWHERE = " It is in {}."


class _Refusing(type):
    """The class of refused classes: an attribute of one is a use of it, too."""

    _refusal: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself and its tools ask for these
            raise AttributeError(name)
        raise NotImplementedError(cls._refusal)


def refusing(name: str, refused: Refused) -> Any:
    """What takes the place of a name that fewbit has nothing for.

    >>> refusing('qwix.f', Refused('it does this', 'that'))(1)
    Traceback (most recent call last):
        ...
    NotImplementedError: qwix.f is not in fewbit: it does this. Instead: that.
    """
    text = _MSG_REFUSED.format(name=name, what=refused.what, instead=refused.instead)
    module, _, short = name.rpartition(".")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(text)

    if refused.kind == "class":
        space = {"__new__": refuse, "__doc__": text, "__module__": module, "_refusal": text}
        return _Refusing(short, (), space)
    refuse.__name__, refuse.__qualname__, refuse.__doc__ = short, short, text
    refuse.__module__ = module
    return refuse


def found_at(place: str) -> Any:
    """The object of this full name: `fewbit.qarray.quantize_with`.

    >>> found_at('fewbit.quantize') is found_at('fewbit.pallas.quantize')
    True
    """
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def meaning_of(name: str, entry: Entry) -> Any:
    """What a name of the table is."""
    if isinstance(entry, Refused):
        return refusing(name, entry)
    return entry.value if isinstance(entry, Fixed) else found_at(entry)


class QwixModule(ModuleType):
    """One of Qwix's modules, whose names are looked up in the table when first used."""

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        if name in TABLE[own]:
            value = meaning_of(f"{own}.{name}", TABLE[own][name])
            self.__dict__[name] = value
            return value
        below = f"{own}.{name}"
        if below in TABLE:
            return importlib.import_module(below)
        if own.startswith((f"{ROOT}._src", f"{ROOT}.contrib", f"{ROOT}.pallas")) and name in SHORT:
            return importlib.import_module(SHORT[name])
        if name.startswith("__"):  # Python itself and its tools ask for these
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        # obj: else Python adds a suggestion of its own behind ours.
        raise AttributeError(no_name(own, name), name=name, obj=None)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__name__
        entry = None if name.startswith("__") else TABLE[own].get(name)
        if isinstance(entry, Fixed) and value != entry.value:
            why = entry.why or "it tells which version of Qwix has these names"
            text = _MSG_FIXED.format(name=f"{own}.{name}", value=entry.value, new=value, why=why)
            raise NotImplementedError(text)
        if entry is not None and not isinstance(entry, Fixed):
            what = f"It stands for {entry}" if isinstance(entry, str) else f"In Qwix {entry.what}"
            text = _MSG_REPLACED.format(name=f"{own}.{name}", what=what)
            warnings.warn(text, stacklevel=2)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        below = [m.rpartition(".")[2] for m in TABLE if _home_of(m) == self.__name__]
        return sorted({*self.__dict__, *TABLE[self.__name__], *below})


def no_name(module: str, name: str) -> str:
    """The sentence about a name that a module does not have.

    >>> no_name('qwix', 'HowToQuantize')
    "fewbit, which stands for Qwix here, has no 'HowToQuantize' in qwix. It is in
    qwix._src.core.qarray."
    """
    if name in TABLE[module]:
        return _MSG_IS_A_NAME.format(name=name, module=module)
    homes = [home for home, names in TABLE.items() if name in names]
    homes += [home for home in map(_home_of, TABLE) if f"{home}.{name}" in TABLE]
    if homes:
        near = _ELSEWHERE.format(min(homes, key=len))
    else:
        below = [m.rpartition(".")[2] for m in TABLE if _home_of(m) == module]
        near = nearest(name, [*TABLE[module], *below], cutoff=0.6)
        near = near or f" dir({module}) lists what there is."
    return _MSG_NO_NAME.format(name=name, module=module, near=near)


def no_module(name: str) -> str:
    """The sentence about a module that is not there, or is no module.

    >>> no_module('qwix._src.corr.qarray')
    "fewbit, which stands for Qwix here, has no module 'qwix._src.corr.qarray'. Did you mean
    'qwix._src.core.qarray'?"
    """
    home, _, last = name.rpartition(".")
    if home in TABLE:
        return no_name(home, last)
    return _MSG_NO_MODULE.format(name=name, near=nearest(name, TABLE, cutoff=0.6))


def _home_of(module: str) -> str:
    return module.rpartition(".")[0]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives out the modules of the table, for every import of `qwix` and what is below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != ROOT and not name.startswith(f"{ROOT}."):
            return None
        if name not in TABLE:
            # Without a name of its own, `from qwix import nonsense` says it too.
            raise ModuleNotFoundError(no_module(name))
        # Each may have modules below it: so Python asks here for every name that it does not find.
        return importlib.machinery.ModuleSpec(name, self, origin="fewbit", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        text = f"fewbit in the place of {spec.name}: docs/as-qwix.md."
        return QwixModule(spec.name, text)

    def exec_module(self, module: ModuleType) -> None:
        names = [name for name in TABLE[module.__name__] if not name.startswith("_")]
        module.__dict__["__all__"] = names


_FINDER = Finder()


def install_as_qwix() -> None:
    """From now on `import qwix` and its submodules give fewbit's names, Qwix installed or not.

    The convention is that of `pymysql.install_as_MySQLdb()`: call it before the program imports
    qwix. Calling it again does nothing. `python -m fewbit.as_qwix SCRIPT.py` does it for a program
    that shall not be edited.

    >>> import fewbit
    >>> fewbit.install_as_qwix()
    >>> import qwix
    >>> qwix.QArray is fewbit.QArray
    True
    """
    if _FINDER in sys.meta_path:
        return
    loaded = [name for name in sys.modules if name.split(".")[0] == ROOT]
    if loaded:
        file = getattr(sys.modules.get(ROOT), "__file__", None)
        raise ImportError(_MSG_LOADED.format(where=f" (from {file})" if file else ""), name=ROOT)
    sys.meta_path.insert(0, _FINDER)


def put_in_place(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Another value for a name of the table, made of the one that it has."""
    home = importlib.import_module(module)
    home.__dict__[name] = make(getattr(home, name))
