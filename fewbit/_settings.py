"""The environment variables that fewbit reads, in one table; docs/settings.md has the same rows."""

import difflib
import os
from collections.abc import Mapping

# {name: (values, what it does, who reads it)}
VARIABLES: dict[str, tuple[str, str, str]] = {
    "FEWBIT_BACKEND": (
        "`native` or `xla`",
        "`xla` leaves the native kernels alone in the whole process",
        "fewbit",
    ),
    "FEWBIT_ISA": (
        "`avx512_vnni`, `avx2` or `portable`",
        "the kernels to use, of those that the CPU has; the best ones if unset",
        "fewbit",
    ),
    "FEWBIT_NATIVE_LIBRARY": (
        "a file, or empty",
        "the native part to open instead of the installed one; empty turns it off",
        "fewbit",
    ),
    "FEWBIT_PROGRESS": ("`0` or `1`", "`0` turns progress bars off", "fewbit"),
    "FEWBIT_DATA": ("a folder", "where data sets lie", "tests and examples"),
    "FEWBIT_PEERS_PYTHON": (
        "an interpreter",
        "the environment of the libraries that fewbit is compared with",
        "tests",
    ),
    "FEWBIT_REQUIRE_NATIVE": (
        "`1`",
        "a failed compilation is an error, not an installation without kernels",
        "the build",
    ),
}

_MSG_UNKNOWN = "{name} is set, but fewbit does not read it{hint}"
_MSG_SWITCH = "{name} is {value!r}, and can be 0 or 1. Set it to one of these, or unset it."


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that looks like one of fewbit's and is not.

    >>> unknown_variables({'FEWBIT_IAS': 'avx2', 'FEWBIT_ISA': 'avx2'})
    ['FEWBIT_IAS is set, but fewbit does not read it; did you mean FEWBIT_ISA?']
    """
    said = []
    for name in sorted(environment):
        if not name.upper().startswith("FEWBIT") or name in VARIABLES:
            continue
        close = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.75)
        hint = f"; did you mean {close[0]}?" if close else f". It reads {', '.join(VARIABLES)}"
        said.append(_MSG_UNKNOWN.format(name=name, hint=hint))
    return said


def is_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a switch is on, which it is unless it says 0; anything but 0 and 1 is an error.

    >>> is_on('FEWBIT_PROGRESS', {}), is_on('FEWBIT_PROGRESS', {'FEWBIT_PROGRESS': '0'})
    (True, False)
    """
    value = environment.get(name) or "1"
    if value not in ("0", "1"):
        raise ValueError(_MSG_SWITCH.format(name=name, value=value))
    return value == "1"
