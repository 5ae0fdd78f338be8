"""A package of another name that is made of ours: `import other.part` gives our names.

A table says which name is found where; nothing of it is loaded before it is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fewbit._util._names import nearest

_MSG_IMPORTED = (
    "{name} is imported already ({place}), so it cannot be made fewbit's any more. Call this "
    "before anything imports {name}, or run the program by python -m {runner}."
)
_MSG_NO_MODULE = "fewbit stands in for {name}, and has no {module}.{near}"
_MSG_NO_NAME = "fewbit stands in for {name}, and {module} has no {word!r}.{near}"
_MSG_REFUSED = "fewbit stands in for {name}, and has no {word}: {why}."

Refused = Mapping[str, str]  # names that can be imported, and what is said when one is used


def stand_in_for(
    name: str,
    modules: Mapping[str, Mapping[str, Any]],
    refused: Mapping[str, Refused],
    *,
    runner: str,
    loads: str,
) -> None:
    """Let `import <name>` give our names from now on; again, nothing happens.

    `modules` has the names of each module, by its path below `name` ('' for `name` itself): where
    each is found ('package' or 'package:its name there'), or what it is if it is no text. Names in
    `refused` can be imported; using one is an error that says why. A module of which no name is
    known, and whose `refused` has '', is refused as a whole. A module below others imports
    `loads` when it is imported.
    """
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    if name in sys.modules:
        place = getattr(sys.modules[name], "__file__", None) or "from several places"
        raise RuntimeError(_MSG_IMPORTED.format(name=name, place=place, runner=runner))
    sys.meta_path.insert(0, _Finder(name, modules, refused, loads))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of one package."""

    def __init__(self, name: str, modules: Any, refused: Mapping[str, Refused], loads: str):
        self.name, self.modules, self.refused, self.loads = name, modules, refused, loads

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top, _, below = fullname.partition(".")
        if top != self.name:
            return None
        if below not in self.modules and self._whole(below) is None:
            # `from a.b import c` comes here too, if a.b has no c. Its name is left out: Python
            # would drop this message for its own.
            raise ModuleNotFoundError(self._unknown(below))
        return importlib.machinery.ModuleSpec(fullname, self, origin="fewbit", is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name, f"fewbit's names in place of those of {spec.name}.")

    def exec_module(self, module: Any) -> None:
        below = module.__name__.partition(".")[2]
        names = self.modules.get(below, {})
        module._look_up = lambda word: self._look_up(below, word)
        module._names = module.__all__ = sorted(names)
        if below and names:
            importlib.import_module(self.loads)

    def _look_up(self, below: str, word: str) -> Any:
        """What the module `below` has under a name."""
        names, inside = self.modules.get(below, {}), f"{below}.{word}".lstrip(".")
        if word in names:
            home = names[word]
            if not isinstance(home, str):
                return home
            module, _, there = home.partition(":")
            return getattr(importlib.import_module(module), there or word)
        if inside in self.modules or self.refused.get(inside):
            return importlib.import_module(f"{self.name}.{inside}")
        whole = self._whole(below)
        why = self.refused.get(below, {}).get(word, whole and self.refused[whole][""])
        if why is None:
            # obj: else Python adds a suggestion of its own behind ours.
            raise AttributeError(self._unknown(inside), name=word, obj=None)
        return _refusal(_MSG_REFUSED.format(name=self.name, word=inside, why=why), word)

    def _whole(self, below: str) -> str | None:
        """The module at or above one that is refused as a whole."""
        parts = below.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return next((each for each in around if "" in self.refused.get(each, {})), None)

    def _unknown(self, below: str) -> str:
        parent, _, word = below.rpartition(".")
        names = {*self.modules.get(parent, {}), *self.refused.get(parent, {})}
        inside = f"{parent}." if parent else ""
        names |= {m.removeprefix(inside) for m in self.modules if m.startswith(inside)}
        names = {each for each in names if each and "." not in each}
        if parent in self.modules:
            where = f"{self.name}.{parent}".rstrip(".")
            near = nearest(word, names) or f" It has {', '.join(sorted(names))}."
            return _MSG_NO_NAME.format(name=self.name, module=where, word=word, near=near)
        known = [f"{self.name}.{module}" for module in self.modules if module]
        near = nearest(f"{self.name}.{below}", known, " The nearest are {}.", 3, 0.5, show=str)
        return _MSG_NO_MODULE.format(name=self.name, module=f"{self.name}.{below}", near=near)


def _refusal(message: str, word: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(message)

    refuse.__name__ = refuse.__qualname__ = word
    refuse.__doc__ = message
    return refuse


class _StandIn(ModuleType):
    """A module whose names are found when they are asked for."""

    _look_up: Callable[[str], Any]
    _names: list[str]

    def __getattr__(self, word: str) -> Any:
        if "_look_up" not in vars(self) or word.startswith("__") and word not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {word!r}")
        value = self._look_up(word)
        setattr(self, word, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})
