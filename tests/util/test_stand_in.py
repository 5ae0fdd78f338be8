"""A package of another name that is made of ours, and programs that run with it."""

import importlib
import subprocess
import sys

import pytest

from fewbit._util import stand_in_for

NAME = "someone_elses"
MODULES = {
    "": {"__version__": "platform.__name__"},
    "core": {"sqrt": "math.sqrt", "root": "math.sqrt", "limit": 7},
    "core.inner": {"pi": "math.pi"},
}
REFUSED = {"core": {"train": "write fit"}, "gpu": {"": "it is not for CPUs"}}


def stand_in(**more):
    stand_in_for(NAME, MODULES, REFUSED, **{"runner": "fewbit.as_other", "loads": "math"} | more)


@pytest.fixture(autouse=True)
def gone_afterwards():
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before
    for module in [m for m in sys.modules if m.partition(".")[0] == NAME]:
        del sys.modules[module]


def test_names_are_ours_whatever_they_are_imported_as():
    stand_in()
    import math

    core = importlib.import_module(f"{NAME}.core")
    assert core.sqrt is math.sqrt is core.root and core.limit == 7
    assert importlib.import_module(f"{NAME}.core.inner").pi == math.pi
    assert importlib.import_module(NAME).__version__ == "platform"
    assert {"sqrt", "root", "limit"} <= {*dir(core)}
    everything = {}
    exec(f"from {NAME}.core import *", everything)
    assert everything["root"] is math.sqrt and "train" not in everything


def test_modules_inside_are_there_without_an_import_of_their_own():
    stand_in()
    assert importlib.import_module(NAME).core.inner.pi > 3


def test_again_nothing_happens():
    stand_in()
    finders = list(sys.meta_path)
    importlib.import_module(f"{NAME}.core")
    stand_in()
    assert sys.meta_path == finders


def test_what_was_imported_before_is_an_error():
    sys.modules[NAME] = sys
    with pytest.raises(RuntimeError, match="is imported already .* python -m fewbit.as_other"):
        stand_in()
    assert not any(getattr(finder, "name", "") == NAME for finder in sys.meta_path)


@pytest.mark.parametrize(
    ("line", "error", "sentence"),
    [
        ("from {}.core import sqr", ImportError, "core has no 'sqr'. Did you mean 'sqrt'"),
        ("import {}.coer", ImportError, "has no 'coer'. Did you mean 'core'"),
        ("import {}.core.x.y", ImportError, "{}.core has no 'x'"),
        ("import {0}.core; {0}.core.sqr", AttributeError, "Did you mean 'sqrt'"),
        ("import {0}.core; {0}.core.zzz", AttributeError, "It has inner, limit, root, sqrt, tr"),
        ("from {}.core import train; train()", NotImplementedError, "core.train: write fit"),
        ("from {}.gpu.a import b; b(1)", NotImplementedError, "gpu.a.b: it is not for CPUs"),
        ("import {0}.gpu; {0}.gpu.f()", NotImplementedError, "gpu.f: it is not for CPUs"),
        ("import {}.core.sqrt", ImportError, "'sqrt' is a name in {}.core and no module"),
        ("from {} import sqrt", ImportError, "{0} has no 'sqrt'. It is in {0}.core."),
        ("from {}.core import train; isinstance(1, train)", NotImplementedError, "write fit"),
    ],
)
def test_what_is_not_there_says_so(line, error, sentence):
    stand_in()
    with pytest.raises(error) as found:
        exec(line.format(NAME), {})
    assert sentence.format(NAME) in str(found.value)


def test_what_a_program_puts_in_the_place_of_a_name_is_told():
    stand_in()
    core = importlib.import_module(f"{NAME}.core")
    with pytest.warns(UserWarning, match=f"replaces {NAME}.core.sqrt, .* It stands for math.sqrt."):
        core.sqrt = abs
    core.something_of_its_own = 1
    assert core.sqrt(-1) == core.something_of_its_own == 1


def test_what_is_refused_can_be_imported():
    stand_in()
    exec(f"from {NAME}.core import train\nfrom {NAME}.gpu.a import b\nimport {NAME}.gpu.c", {})


# --- The runner -----------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from {name}.core import limit
import beside
print(__name__, sys.argv[1:], limit, beside.here, Path(sys.argv[0]).name)
"""
MAIN = """
import sys
from fewbit._util import run_program, stand_in_for
{setup}
def put(given):
    stand_in_for({name!r}, MODULES, REFUSED, runner="fewbit.as_other", loads="math")
run_program(sys.argv[1:], "fewbit.as_other", "Runs it.", put, {{}})
"""


@pytest.fixture
def runner(tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM.format(name=NAME))
    (folder / "beside.py").write_text("here = True")
    setup = f"MODULES = {MODULES!r}\nREFUSED = {REFUSED!r}"
    (tmp_path / "main.py").write_text(MAIN.format(setup=setup, name=NAME))

    def call(*argv, cwd):
        command = [sys.executable, str(tmp_path / "main.py"), *argv]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True)

    return call


def test_a_script_runs_as_python_would_run_it(runner, tmp_path):
    done = runner("programs/program.py", "-q", "x", cwd=tmp_path)
    assert done.stdout == "__main__ ['-q', 'x'] 7 True program.py\n", done.stderr


def test_a_module_runs_as_python_would_run_it(runner, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    done = runner("-m", "program", "-m", "y", cwd=tmp_path)
    assert done.stdout == "__main__ ['-m', 'y'] 7 True program.py\n", done.stderr


def test_an_exit_code_is_the_program_s(runner, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    assert runner("fails.py", cwd=tmp_path).returncode == 3


@pytest.mark.parametrize("argv", [[], ["-x"], ["-m"], ["nowhere.py"]])
def test_misuse_shows_the_usage(runner, tmp_path, argv):
    done = runner(*argv, cwd=tmp_path)
    assert done.returncode == 2 and "usage: python -m fewbit.as_other" in done.stderr
    assert not argv or argv[0] in done.stderr
