"""`.ci/run`: every part runs whatever became of the others; what is left out is said by name."""

import re
import shutil

import pytest
from machines import ROOT, Machine

MAKE = """
echo "$1" >> calls
case " $BROKEN " in *" $1 "*) echo "1 failed in 1s"; exit 2;; esac
echo "3 passed in 1s"
"""


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.program("bin/make", MAKE)
    for folder in (".ci", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    machine.python("bin/python3.13", "3.13.2")
    machine.python("bin/python3.11", "3.11.9")
    return machine


def run(machine, **settings):
    done = machine.shell("bash", ".ci/run", **settings)
    calls = (machine.root / "calls").read_text().split()
    return done, [call for call in calls if call != ".venv-oldest"], ".venv-oldest" in calls


def test_all_parts_run(machine):
    done, calls, made = run(machine)
    assert done.returncode == 0, done.stderr
    assert calls == ["lint", "test", "test-oldest"]
    assert made
    assert done.stdout.count("3 passed in 1s") == 3
    assert "make test-oldest: passed, " in done.stdout


def test_each_part_says_when_it_begins_and_ends(machine):
    """One that is killed has said how far it was, and how long each part took."""
    said = run(machine, BROKEN="test")[0].stdout
    for part, verdict in (("lint", "passed"), ("test", "FAILED"), ("test-oldest", "passed")):
        begins = re.search(rf"== make {part}, \d+ s after the start\n", said)
        ends = re.search(rf"== make {part} {verdict} after \d+ s, \d+ s after the start\n", said)
        assert begins.end() < ends.start()


@pytest.mark.parametrize("broken", ["lint", "test", "test-oldest"])
def test_one_that_fails_fails_the_whole_and_stops_nothing(machine, broken):
    done, calls, _ = run(machine, BROKEN=broken)
    assert done.returncode == 1
    assert calls == ["lint", "test", "test-oldest"]
    assert f"make {broken}: FAILED, " in done.stdout
    assert done.stdout.count(": passed, ") == 2


def test_where_the_newest_python_is_the_oldest_one(machine):
    (machine.root / "bin/python3.13").unlink()
    done, calls, made = run(machine)
    assert done.returncode == 0
    assert calls == ["lint", "test"]
    assert not made
    assert "make test-oldest: skipped, there is no newer Python than 3.11" in done.stdout


def test_where_there_is_no_oldest_python(machine):
    (machine.root / "bin/python3.11").unlink()
    done, calls, made = run(machine)
    assert done.returncode == 0
    assert calls == ["lint", "test"]
    assert not made
    assert "make test-oldest: skipped, it needs Python 3.11, which is not here" in done.stdout
