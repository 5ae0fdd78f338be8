"""What we say we need is what we test with: pyproject.toml, oldest.txt, `_util/_versions.py`."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from fewbit._util._versions import TESTED

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
OLDEST = dict(
    line.split("==")
    for line in (ROOT / "tests/oldest.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
# Tools of `dev` that need not be old: they build and check, and nothing of theirs is called.
TOOLS = {"auditwheel", "cmake", "pdoc", "pytest", "pytest-xdist", "ruff", "scikit-build-core"}


def bounds(requirements):
    """{name: what follows it}."""
    pattern = re.compile(r"([\w.-]+)\s*(.*)")
    return dict(pattern.fullmatch(requirement).groups() for requirement in requirements)


NEEDED = {"": PROJECT["dependencies"], **{k: v for k, v in EXTRAS.items() if k != "dev"}}


@pytest.mark.parametrize("extra", NEEDED)
def test_the_lower_bounds_are_the_oldest_versions_tested(extra):
    for name, bound in bounds(NEEDED[extra]).items():
        assert bound == f">={OLDEST[name]}", f"{name} in pyproject.toml and in tests/oldest.txt"


def test_so_are_those_of_the_libraries_that_tests_alone_need():
    found = {name: bound for name, bound in bounds(EXTRAS["dev"]).items() if bound}
    assert {name: b for name, b in found.items() if name not in TOOLS} == {
        name: f">={OLDEST[name]}" for name in found if name not in TOOLS
    }


def test_every_constraint_is_one_that_somebody_has_to_keep():
    declared = set().union(*(bounds(r) for r in (*NEEDED.values(), EXTRAS["dev"])))
    assert set(OLDEST) - declared == {"jaxlib"}  # jax brings it, and wants one of its own age


def test_nothing_is_said_twice_and_nothing_is_bounded_from_above():
    for requirements in (PROJECT["dependencies"], *EXTRAS.values()):
        names = [re.match(r"[\w.-]+", requirement).group() for requirement in requirements]
        assert len(names) == len(set(names))
        assert not [r for r in requirements if re.search(r"<|==|~=|!=", r)]
    assert PROJECT["requires-python"] == f">={TESTED['python'][0]}"


def test_the_table_of_tested_versions_begins_with_the_oldest():
    for name, (oldest, _) in TESTED.items():
        if name != "python":
            assert f"{OLDEST[name]}.".startswith(f"{oldest}."), name


def test_the_classifiers_name_every_tested_python():
    newest = int(TESTED["python"][1].partition(".")[2])
    wanted = [f"Programming Language :: Python :: 3.{minor}" for minor in range(11, newest + 1)]
    assert [c for c in PROJECT["classifiers"] if c in wanted] == wanted
    assert sum("Python :: 3." in c for c in PROJECT["classifiers"]) == len(wanted)


def test_a_wheel_is_compiled_with_the_headers_of_the_oldest_jax():
    """The other way round it would be refused by every JAX between the two."""
    jax = [r for r in PYPROJECT["build-system"]["requires"] if r.startswith("jax")]
    assert jax[0].startswith(f"jax=={OLDEST['jax']}; python_version < ")
    assert jax[1].startswith(f"jax>={OLDEST['jax']}; python_version >= ")


def test_an_environment_gets_the_newest_jax_and_what_builds():
    listed = subprocess.run(
        [sys.executable, ROOT / "tools/requirements.py", "dev", "flax"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    assert f"jax>={OLDEST['jax']}" in listed
    assert not [line for line in listed if line.startswith("jax==")]
    assert {"ninja", "pdoc>=15", f"flax>={OLDEST['flax']}"} <= set(listed)
