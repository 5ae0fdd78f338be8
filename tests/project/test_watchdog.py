"""A test that hangs or ends its process is named, and the run goes on to its end."""

import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
BEHAVES = {
    "hangs": "threading.Event().wait()",
    "dies": "os._exit(3)",
}
FILE = """
    import os, threading
    import pytest

    def test_before(): pass
    def test_bad(): assert False, 'on purpose'
    def test_it(): {0}
    def test_after(): pass
"""
CONFTEST = """
    import pytest
    from recorder import Teller
    from watchdog import Once, SharedFolder, Watchdog

    def pytest_configure(config):
        config.addinivalue_line('markers', 'long: takes six times as long')
        config.pluginmanager.register(Watchdog(1))
        if hasattr(config, 'workerinput'):
            config.pluginmanager.register(Once(config.workerinput))
        else:
            config.pluginmanager.register(Teller(config))
            config.pluginmanager.register(SharedFolder())
"""


def run(folder, source, *options):
    (folder / "test_it.py").write_text(textwrap.dedent(source))
    (folder / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, "test_it.py"],
        cwd=folder,
        env={"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("how", BEHAVES)
def test_with_workers_it_fails_once_and_the_others_run(tmp_path, how):
    done = run(tmp_path, FILE.format(BEHAVES[how]), "-n", "2", "--dist", "loadfile")
    assert done.returncode == 1
    assert "2 failed, 2 passed" in done.stdout
    assert re.search(r"failed: test_it.py::test_it \(\?\?\?\): worker 'gw\d' crashed", done.stdout)
    assert done.stderr.count("in test_it\n") == (how == "hangs")


def test_alone_it_ends_the_run_after_the_failures_before_were_named(tmp_path):
    done = run(tmp_path, FILE.format(BEHAVES["hangs"]))
    assert done.returncode == 1
    assert "failed: test_it.py::test_bad (call): AssertionError: on purpose\n" in done.stdout
    assert "short test summary" not in done.stdout
    assert "Timeout (0:00:01)!" in done.stderr
    assert "in test_it\n" in done.stderr


def test_long_ones_get_more_time(tmp_path):
    slow = """
        import time
        import pytest

        @pytest.mark.long
        def test_it(): time.sleep(1.5)
    """
    done = run(tmp_path, slow)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "workers"])
def test_failures_of_fixtures_and_modules_are_told_at_once(tmp_path, workers):
    source = """
        import pytest

        @pytest.fixture
        def broken(): raise ValueError('of a fixture')

        def test_it(broken): pass
    """
    done = run(tmp_path, source, *workers)
    assert "failed: test_it.py::test_it (setup): ValueError: of a fixture\n" in done.stdout
    assert done.stdout.index("failed: ") < done.stdout.index("ERRORS")
    done = run(tmp_path, "import no_such_library", *workers)
    assert "failed: test_it.py (collection): ModuleNotFoundError: No module" in done.stdout
