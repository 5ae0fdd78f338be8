"""`python -m fewbit.as_qwix SCRIPT.py ARGS` and `python -m fewbit.as_qwix -m MODULE ARGS`."""

import sys
from collections.abc import Mapping

from fewbit._util import run_program
from fewbit.as_qwix import install_as_qwix
from fewbit.as_qwix._plans import write_plans

TEXT = """\
Runs a program that imports qwix on fewbit, as it is: `import qwix` and its submodules give
fewbit's names, whether Qwix is installed or not. The program's own arguments, exit code and
output are its own."""
OPTIONS = {
    "--plan FILE": "write the plan of the model that it quantizes (of others: FILE-2, FILE-3, ...)"
}


def get_ready(given: Mapping[str, str]) -> None:
    """What is done before the program runs."""
    install_as_qwix()
    if "--plan" in given:
        write_plans(given["--plan"])


if __name__ == "__main__":
    run_program(sys.argv[1:], "fewbit.as_qwix", TEXT, get_ready, OPTIONS)
