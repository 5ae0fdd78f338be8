"""`module:function` on the command line: the model and inputs that a command is about."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from fewbit._documents import load_yaml
from fewbit._files import read_file
from fewbit.rules import QuantizationRule
from fewbit.rules_io import rules_from_json, rules_from_yaml

_MSG_FORM = (
    "{text!r} does not name a model. Write module:function or path/to/file.py:function; the "
    "function takes no arguments and returns (model, *inputs), as fewbit.plan takes them after "
    "the rules; abstract parameters and inputs will do."
)
_MSG_NO_MODULE = "{module!r} cannot be imported: {error}. The current folder is searched first."
_MSG_NO_FILE = "there is no file {path!r}.{near}"
_MSG_NO_FUNCTION = "{module} has no function {name!r}.{near}"
_MSG_RETURNED = (
    "{text} returned {found}, not (model, *inputs). Return a tuple: the model, then what it is "
    "called with (for a plain function the parameters first)."
)
_MSG_RAISED = "{text} raised an error{place}: {what}. --traceback shows all of it."
_MSG_RULES = (
    "{path} is not a file of rules: its name ends in {suffix!r}, not in .yaml, .yml or .json."
)
_MSG_NAMES = (
    "{path} is not a list of names. Write one list a line: - [pattern, replacement] or "
    "- [pattern, replacement, T]."
)
_MSG_FIELD = "--rule {text!r} is not field=value[,field=value]: {part!r} has no '='."


class Misuse(ValueError):
    """The command line asks for something that cannot be; exit code 2."""


def load_function(text: str) -> Any:
    """What `module:function` or `file.py:function` names.

    >>> load_function('math:sqrt')(9.0)
    3.0
    >>> load_function('math:squirt')
    Traceback (most recent call last):
        ...
    fewbit._cli_model.Misuse: math has no function 'squirt'. Did you mean 'sqrt'?
    """
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise Misuse(_MSG_FORM.format(text=text))
    module = _from_file(module_name) if module_name.endswith(".py") else _import(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, [w for w in dir(found) if w[0] != "_"], 1)
            near = f" Did you mean {close[0]!r}?" if close else ""
            raise Misuse(_MSG_NO_FUNCTION.format(module=module_name, name=part, near=near))
        found = getattr(found, part)
    return found


def load_model(text: str) -> tuple[Any, tuple[Any, ...]]:
    """The model that a function named on the command line makes, and its inputs."""
    function = load_function(text)
    if not callable(function):
        raise Misuse(_MSG_FORM.format(text=text))
    made = _carefully(text, function)
    if not isinstance(made, tuple) or not made:
        raise Misuse(_MSG_RETURNED.format(text=text, found=f"a {type(made).__name__}"))
    return made[0], made[1:]


def load_rules(file: str | None, inline: Iterable[str]) -> tuple[QuantizationRule, ...]:
    """Rules given on the command line, then those of a file: the first that matches counts.

    >>> load_rules(None, ['module_path=layers.*,weight_qtype=int4,tile_size=32'])
    (QuantizationRule(module_path='layers.*', weight_qtype='int4', tile_size=32),)
    """
    try:
        rules = tuple(_inline(text) for text in inline) + _from_rules_file(file)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, Misuse) else Misuse(str(error)) from error
    if not rules:
        raise Misuse("no rules: give --rules FILE or --rule weight_qtype=int8,act_qtype=int8.")
    return rules


def _from_rules_file(file: str | None) -> tuple[QuantizationRule, ...]:
    if file is None:
        return ()
    path = pathlib.Path(file)
    if not path.exists():
        raise Misuse(_MSG_NO_FILE.format(path=file, near=_near_file(file)))
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise Misuse(_MSG_RULES.format(path=file, suffix=path.suffix))
    return (rules_from_json if path.suffix.lower() == ".json" else rules_from_yaml)(path)


def load_names(file: str | None) -> list[tuple[Any, ...]] | None:
    """How tensors of a source are called in the model: a YAML list of lists."""
    if file is None:
        return None
    if not pathlib.Path(file).exists():
        raise Misuse(_MSG_NO_FILE.format(path=file, near=_near_file(file)))
    try:
        entries = load_yaml(read_file(file).decode("utf-8"), file)
    except UnicodeDecodeError as error:
        raise Misuse(f"{file} is not YAML: {error}") from error
    except ValueError as error:
        raise Misuse(str(error)) from error
    if not isinstance(entries, list) or not all(isinstance(entry, list) for entry in entries):
        raise Misuse(_MSG_NAMES.format(path=file))
    return [tuple(tuple(x) if isinstance(x, list) else x for x in entry) for entry in entries]


def _inline(text: str) -> QuantizationRule:
    """One rule from field=value pairs; values are YAML, so numbers and lists are what they look."""
    lines = []
    for part in _split(text):
        field, equals, value = part.partition("=")
        if not equals:
            raise Misuse(_MSG_FIELD.format(text=text, part=part))
        plain = field.strip() in ("module_path",)  # a regex is text, whatever it looks like
        lines.append(f"{field.strip()}: {repr(value) if plain else value}")
    (rule,) = rules_from_yaml("- " + "\n  ".join(lines))
    return rule


def _split(text: str) -> list[str]:
    """At commas that begin a new field: `tile_size=32,op_names=[einsum,take]` has two."""
    parts: list[str] = []
    for piece in text.split(","):
        name = piece.partition("=")[0]
        if parts and not ("=" in piece and name.strip().isidentifier()):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _carefully(name, lambda: importlib.import_module(name))
    except ImportError as error:
        raise Misuse(_MSG_NO_MODULE.format(module=name, error=error)) from error


def _carefully(text: str, run: Callable[[], Any]) -> Any:
    """What the user's code returns; its errors say whose they are and where they were raised."""
    try:
        return run()
    except Exception as error:
        if isinstance(error, ImportError) and error.name == text:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        what = "".join(traceback.format_exception_only(error)).strip()
        raise ValueError(_MSG_RAISED.format(text=text, place=place, what=what)) from error


def _from_file(path: str) -> ModuleType:
    file = pathlib.Path(path)
    name = f"_fewbit_cli_{file.stem}"  # a file called jax.py must not become jax
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise Misuse(_MSG_NO_FILE.format(path=path, near=_near_file(path)))
    sys.path.insert(0, str(file.parent.resolve()))  # its own imports, as when it is run
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _carefully(path, lambda: loader.exec_module(module))
    return module


def _near_file(path: str) -> str:
    here = pathlib.Path(path)
    folder = here.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = [n for n in get_close_matches(pathlib.Path(path).name, names, 2) if folder / n != here]
    return f" Did you mean {str(folder / close[0])!r}?" if close else ""
