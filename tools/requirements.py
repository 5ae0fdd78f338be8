"""Prints what an environment for work on fewbit needs, one requirement per line, for `pip -r`.

All is in pyproject.toml: what fewbit needs, the extras named as arguments, and what builds it.
There jax is pinned, for its headers; the headers of the jax that fewbit runs with do as well.
"""

import pathlib
import re
import sys
import tomllib

PYPROJECT = pathlib.Path(__file__).parent.parent / "pyproject.toml"


def name_of(requirement):
    """As pip compares names: `ml_dtypes` and `ml-dtypes` are one.

    >>> name_of("ml_dtypes>=0.5.1"), name_of("jax==0.10.2; python_version < '3.15'")
    ('ml-dtypes', 'jax')
    """
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def requirements(extras):
    """The lines; an extra is a name in `[project.optional-dependencies]`."""
    facts = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    found = list(facts["project"]["dependencies"])
    for extra in extras:
        found += facts["project"]["optional-dependencies"][extra]
    names = {name_of(requirement) for requirement in found}
    building = facts["build-system"]["requires"]
    return found + [requirement for requirement in building if name_of(requirement) not in names]


if __name__ == "__main__":
    print(*requirements(sys.argv[1:]), sep="\n")
