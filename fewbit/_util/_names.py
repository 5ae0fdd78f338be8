"""Names: the nearest to a wrong one, and those of a face that are loaded when first used.

Such a face has its list in `__init__.pyi`, for people, tools and us. Importing fewbit stays quick,
a framework comes with the first model of its kind, and packages may be entered anywhere.
"""

import ast
import difflib
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any


def nearest(
    word: object,
    choices: Iterable[str],
    sentence: str = " Did you mean {}?",
    n: int = 1,
    cutoff: float = 0.5,
    *,
    show: Callable[[str], str] = repr,
    between: str = ", ",
    or_first: bool = False,
) -> str:
    """The tail of an error: a sentence with the closest choices, if any are close.

    `or_first`: where none is close, the first `n` serve as examples.

    >>> nearest("weight_qtyp", ["weight_qtype", "act_qtype"])
    " Did you mean 'weight_qtype'?"
    >>> nearest("b/kernel", ["a/kernel", "c/kernel"], " The nearest are {}.", n=3, show=str)
    ' The nearest are c/kernel, a/kernel.'
    """
    listed = list(choices)
    close = difflib.get_close_matches(str(word), listed, n, cutoff)
    shown = dict.fromkeys(map(show, close or listed[: n * or_first]))  # two may be shown as one
    return sentence.format(between.join(shown)) if shown else ""


def homes(package: str) -> dict[str, tuple[str, str]]:
    """{name: (module, name there)} of a package's list.

    >>> import fewbit.io
    >>> homes('fewbit.io')['save']
    ('fewbit.io.checkpoint._save', 'save')
    """
    # Not beside its `__path__`, which begins with the compiled part's in an editable installation.
    text = pathlib.Path(str(sys.modules[package].__file__)).with_suffix(".pyi").read_text("utf-8")
    return {
        str(alias.asname): (str(line.module), alias.name)
        for line in ast.parse(text).body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }


def face(
    package: str, otherwise: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`; `otherwise` gets the names that are not listed."""
    names, module = homes(package), sys.modules[package]

    def load(name: str) -> Any:
        if name in names:
            home, there = names[name]
            if home != package:
                value = getattr(importlib.import_module(home), there)
            else:  # a package below this one
                value = importlib.import_module(f"{home}.{there}")
            setattr(module, name, value)
            return value
        if otherwise is None or name.startswith("__"):  # Python's own questions are not about us
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return otherwise(name)

    return load, lambda: sorted({*vars(module), *names})
