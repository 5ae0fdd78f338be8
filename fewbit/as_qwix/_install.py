"""`import qwix` without Qwix: the table given to Python's import."""

from typing import Any

from fewbit._util import Said, refusal, stand_in_for
from fewbit.as_qwix._table import SHORT, TABLE, Refused

ROOT, RUNNER = "qwix", "fewbit.as_qwix"

_MSG_LOADED = (
    "Qwix itself has been imported already{where}, and its names are in use: two libraries cannot "
    "have one name. Call fewbit.install_as_qwix() before the first `import qwix`, at the top of "
    "the program, or run it as `python -m {runner} SCRIPT.py ARGS`."
)
_MSG_REFUSED = "{name} is not in fewbit: {what}. Instead: {instead}."
_MSG_NO_NAME = "fewbit, which stands for Qwix here, has no {word!r} in {module}.{near}"
_MODULE = "fewbit in the place of {module}: docs/as-qwix.md."


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
    modules = {
        _below(module): {name: _meaning(f"{module}.{name}", entry) for name, entry in names.items()}
        for module, names in TABLE.items()
    }
    short = {name: _below(module) for name, module in SHORT.items()}
    said = Said(module=_MODULE, imported=_MSG_LOADED, no_name=_MSG_NO_NAME)
    stand_in_for(ROOT, modules, runner=RUNNER, short=short, said=said)


def _below(module: str) -> str:
    return module.partition(".")[2]


def _meaning(name: str, entry: Any) -> Any:
    if not isinstance(entry, Refused):
        return entry
    text = _MSG_REFUSED.format(name=name, what=entry.what, instead=entry.instead)
    return refusal(name, text, is_class=entry.kind == "class")
