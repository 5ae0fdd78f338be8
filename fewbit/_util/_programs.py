"""Somebody else's program, run as Python itself runs it, after something of ours was done.

`python -m fewbit.as_qwix SCRIPT.py ARGS` and its like: the program finds `sys.argv`, `sys.path[0]`
and `__main__` as it would under `python SCRIPT.py ARGS`, and leaves with its own exit code.
"""

import functools
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from fewbit._util._names import nearest

_MSG_USAGE = """\
usage: python -m {command} [options] SCRIPT.py [ARGS ...]
       python -m {command} [options] -m MODULE [ARGS ...]

{text}

options, before SCRIPT.py or -m:
{options}
  -h, --help   this text
"""
_MSG_NOTHING = "no program to run: name a script, or a module after -m"
_MSG_OPTION = "unknown option {option!r}.{near} Options of the program go after its name"
_MSG_VALUE = "{option} needs {what} after it"
_MSG_NO_MODULE = "no module named {name!r}"
_MSG_PACKAGE = "{name!r} is a package without a __main__ and cannot be run"
_MSG_NO_FILE = "can't open file {path!r}: {why}{module}"
_MSG_IS_MODULE = ". A module is named after -m: -m {path}"


class UsageError(Exception):
    """What is wrong with a command line."""


def run_program(
    arguments: Sequence[str],
    command: str,
    text: str,
    prepare: Callable[[Mapping[str, str]], None],
    options: Mapping[str, str],
) -> None:
    """Take our own options off `arguments`, prepare, and run what they name.

    `options` are {'--plan FILE': 'what it does'}; `prepare` gets {'--plan': value}. Errors of ours
    end the process with code 2, as usage errors do; what the program raises goes up.
    """
    kinds = {option.split()[0]: option.split()[1] for option in options}
    wide = max((len(option) for option in options), default=0) + 3
    lines = "\n".join(f"  {option:{wide}}{what}" for option, what in options.items())
    usage = _MSG_USAGE.format(command=command, text=text, options=lines)
    try:
        given, is_module, target, rest = _split(arguments, kinds)
        if target is None:
            print(usage, end="")
            return
        run = None if is_module else _script(target)
        prepare(given)  # before a package around the module is imported
        sys.argv[:] = ["-m" if is_module else target, *rest]
        run = run or _module(target)
    except UsageError as error:
        short = usage.split("\n\n")[0]
        print(f"{short}\n{command}: {error}.", file=sys.stderr)
        sys.exit(2)
    run()


def _split(
    arguments: Sequence[str], kinds: Mapping[str, str]
) -> tuple[dict[str, str], bool, str | None, list[str]]:
    """(our options, whether it is a module, the program or None for help, its arguments)."""
    given: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            return given, False, None, []
        if word.startswith("-m") and not word.startswith("--"):
            if word == "-m" and not rest:
                raise UsageError(_MSG_VALUE.format(option="-m", what="a MODULE"))
            return given, True, word[2:] or rest.pop(0), rest
        if name in kinds:
            if not equals and not rest:
                raise UsageError(_MSG_VALUE.format(option=name, what=f"a {kinds[name]}"))
            given[name] = value if equals else rest.pop(0)
            continue
        if word.startswith("-"):
            near = nearest(name, [*kinds, "--help", "-m"], cutoff=0.4)
            raise UsageError(_MSG_OPTION.format(option=word, near=near))
        return given, False, word, rest
    raise UsageError(_MSG_NOTHING)


def _module(name: str) -> Callable[[], object]:
    """What `python -m name` does; its folder, the working one, is `sys.path[0]` already."""
    for part in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(part)
        except ModuleNotFoundError as error:
            # The module itself or a package around it; what one of these imports is its own fault.
            if error.name is None or not f"{part}.".startswith(f"{error.name}."):
                raise
            spec = None
        except ValueError:  # a relative name, or one whose parent is no package
            spec = None
        if spec is None:
            message = _MSG_NO_MODULE if part == name else _MSG_PACKAGE
            raise UsageError(message.format(name=name))
        if spec.submodule_search_locations is None:
            break
    return functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)


def _script(path: str) -> Callable[[], object]:
    """What `python path` does."""
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        return functools.partial(_run_packed, path)
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        parts = path.split(".")
        is_name = all(map(str.isidentifier, parts)) and parts[-1] != "py"
        module = _MSG_IS_MODULE.format(path=path) if is_name else ""
        text = _MSG_NO_FILE.format(path=path, why=error.strerror, module=module)
        raise UsageError(text) from error
    return functools.partial(_run_source, path, source)


def _run_packed(path: str) -> None:
    """A folder or an archive, which is `sys.path[0]` itself, in place of the working folder."""
    if not sys.flags.safe_path:
        del sys.path[0]
    runpy.run_path(path, run_name="__main__")


def _run_source(path: str, source: bytes) -> None:
    """In a module that stays, as Python's own does: threads and exit handlers read its names."""
    full = os.path.join(os.getcwd(), path)
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = full, None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
    main.__package__ = None
    vars(main).update(__builtins__=__builtins__, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(full))
    exec(compile(source, full, "exec", dont_inherit=True), vars(main))
