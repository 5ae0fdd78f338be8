"""Which Python `make` takes for an environment: one that runs, the newest, or the one asked for."""

import os
import sys

import pytest
from machines import Machine


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_newest_on_the_path_is_taken_and_said(machine):
    for version in ("3.11.9", "3.13.2", "3.12.4", "3.14.1"):
        machine.python(f"bin/python{version.rpartition('.')[0]}", version)
    done = machine.find()
    assert done.returncode == 0
    assert done.stdout == f"{machine.root}/bin/python3.13\n"
    assert done.stderr == f"Python 3.13.2: {machine.root}/bin/python3.13\n"


def test_a_shim_that_only_prints_an_error_is_passed_by(machine):
    machine.path.insert(0, machine.root / "shims")
    machine.shim("shims/python3.13")
    machine.shim("shims/python3.12")
    machine.python("bin/python3.12", "3.12.4")
    assert machine.find().stdout == f"{machine.root}/bin/python3.12\n"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, "home/.pyenv/versions/3.13.10/bin/python3.13"),
        ({"PYENV_ROOT": "{}/elsewhere"}, "elsewhere/versions/3.13.10/bin/python3.13"),
        ({}, "home/.local/share/uv/python/cpython-3.13.10-linux-x86_64-gnu/bin/python3.13"),
        ({"UV_PYTHON_INSTALL_DIR": "{}/uv"}, "uv/cpython-3.13.10-linux-gnu/bin/python3.13"),
    ],
)
def test_version_managers_keep_theirs_elsewhere(machine, settings, kept):
    machine.shim("bin/python3.13")
    machine.python("bin/python3.11", "3.11.9")
    machine.python(kept.replace("3.13.10", "3.13.9"), "3.13.9")
    machine.python(kept, "3.13.10")
    settings = {name: value.format(machine.root) for name, value in settings.items()}
    assert machine.find(**settings).stdout == f"{machine.root}/{kept}\n"


def test_only_an_old_one_is_good_enough(machine):
    machine.shim("bin/python3.13")
    machine.python("bin/python3.11", "3.11.9")
    assert machine.find().stdout == f"{machine.root}/bin/python3.11\n"


def test_python3_without_a_version_in_its_name_will_do(machine):
    machine.python("bin/python3", "3.12.4")
    assert machine.find().stdout == f"{machine.root}/bin/python3\n"


def test_warnings_before_the_answer_are_passed_over(machine):
    """Of a wrapper, or of the linker about something to preload."""
    real = machine.python("real", "3.13.2")
    machine.program("bin/python3.13", f"echo 'ERROR: ld.so: ignored.' >&2\nexec '{real}' \"$@\"")
    assert machine.find().stdout == f"{real}\n"


def test_places_with_spaces_in_their_names(tmp_path):
    machine = Machine(tmp_path / "my machine")
    machine.shim("bin/python3.13")
    machine.python("home/.pyenv/versions/3.13.2/bin/python3.13", "3.13.2")
    kept = f"{machine.root}/home/.pyenv/versions/3.13.2/bin/python3.13"
    assert machine.find().stdout == f"{kept}\n"
    assert machine.run("make_env.sh", "my env").returncode == 0
    assert (machine.root / "my env/.python").read_text() == f"made by: {kept}\n"


def test_none_at_all_is_an_error_that_says_what_was_found(machine):
    machine.shim("bin/python3.13")
    machine.python("bin/python3", "3.10.1")
    machine.program("bin/python3.12", "echo \"No module named 'ensurepip'\" >&2; exit 1")
    done = machine.find()
    assert done.returncode == 1 and done.stdout == ""
    assert "No Python of 3.13 3.12 3.11 that runs. Install one" in done.stderr
    assert "make PYTHON=/path/to/python3.13 ..." in done.stderr
    assert f"{machine.root}/bin/python3.13: pyenv: python3.13: command not found" in done.stderr
    assert f"{machine.root}/bin/python3.12: No module named 'ensurepip'" in done.stderr
    assert done.stderr.count(f"{machine.root}/bin/python3: is Python 3.10.1") == 1


def test_nothing_found_and_nothing_tried(machine):
    done = machine.find()
    assert done.returncode == 1
    assert "Found, and of no use" not in done.stderr


def test_the_python_asked_for_is_taken(machine):
    machine.python("bin/python3.13", "3.13.2")
    asked = machine.python("mine/python", "3.14.0")
    assert machine.find(PYTHON=str(asked)).stdout == f"{asked}\n"
    assert machine.find(PYTHON="").stdout == f"{machine.root}/bin/python3.13\n"


def test_a_python_asked_for_that_is_none(machine):
    machine.python("bin/python3.13", "3.13.2")
    done = machine.find(PYTHON="python3.12")
    assert done.returncode == 1 and done.stdout == ""
    assert "PYTHON=python3.12 names no program; give the path of a Python 3.11" in done.stderr
    done = machine.find(PYTHON=str(machine.shim("bin/python3.12")))
    assert done.returncode == 1 and done.stdout == ""
    assert "python3.12 cannot be used:" in done.stderr
    assert "pyenv: python3.12: command not found" in done.stderr


def test_this_python_answers(machine):
    """Through a link, as version managers have them; of an environment the Python that made it."""
    version = "{}.{}".format(*sys.version_info)
    link = machine.place(machine.root / "bin" / f"python{version}")
    link.symlink_to(sys.executable)
    done = machine.find(version)
    assert done.returncode == 0, done.stderr
    assert os.access(done.stdout.strip(), os.X_OK)
    assert done.stderr.startswith(f"Python {version}.")


class TestEnvironment:
    def make(self, machine, **settings):
        done = machine.run("make_env.sh", "env", **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def made_by(self, machine):
        return (machine.root / "env/.python").read_text().splitlines()[0]

    def test_it_is_made_once(self, machine):
        machine.python("bin/python3.12", "3.12.4")
        assert self.make(machine) == ""
        made = (machine.root / "env/.python").stat().st_mtime_ns
        assert self.make(machine) == ""
        assert (machine.root / "env/.python").stat().st_mtime_ns == made
        assert self.made_by(machine) == f"made by: {machine.root}/bin/python3.12"

    def test_it_is_made_anew_by_a_newer_python(self, machine):
        machine.python("bin/python3.11", "3.11.9")
        self.make(machine)
        machine.python("bin/python3.13", "3.13.2")
        said = self.make(machine)
        assert said == "env was made by Python 3.11; there is Python 3.13 now: it is made anew\n"
        assert self.made_by(machine) == f"made by: {machine.root}/bin/python3.13"

    def test_one_that_was_asked_for_stays(self, machine):
        machine.python("bin/python3.13", "3.13.2")
        asked = machine.python("bin/python3.11", "3.11.9")
        self.make(machine)
        assert "is another one: it is made anew" in self.make(machine, PYTHON=str(asked))
        said = self.make(machine)
        assert "env stays on Python 3.11, asked for by PYTHON=" in said
        assert "`rm -rf env` starts over" in said

    def test_it_is_made_anew_where_its_python_is_gone(self, machine):
        machine.python("bin/python3.13", "3.13.2")
        self.make(machine)
        (machine.root / "env/bin/python").unlink()
        assert self.make(machine) == "The Python of env does not run any more: it is made anew\n"
        assert (machine.root / "env/bin/python").exists()

    def test_a_folder_of_something_else_is_left_alone(self, machine):
        machine.python("bin/python3.13", "3.13.2")
        precious = machine.place(machine.root / "env/precious")
        precious.write_text("")
        done = machine.run("make_env.sh", "env")
        assert done.returncode == 1
        assert "env is there and is no Python environment; move it away" in done.stderr
        assert precious.exists()

    def test_a_python_asked_for_that_is_none_changes_nothing(self, machine):
        machine.python("bin/python3.13", "3.13.2")
        self.make(machine)
        done = machine.run("make_env.sh", "env", PYTHON="python3.12")
        assert done.returncode == 1
        assert "PYTHON=python3.12 names no program" in done.stderr
        assert (machine.root / "env/bin/python").exists()
