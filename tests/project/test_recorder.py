"""`pytest --record`: a failure that was seen is named, even where the run does not end."""

import pathlib
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from recorder import Recorder


def report(name, when="call", outcome="passed", duration=0.5, **more):
    facts = {"passed": False, "failed": False, "skipped": False, outcome: True, "longrepr": None}
    return SimpleNamespace(nodeid=name, when=when, duration=duration, **{**facts, **more})


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path / "record.txt", ["-q", "-m", "not long"])


def said(recorder):
    return recorder.path.read_text()


def test_the_record_is_there_from_the_start(recorder):
    assert "$ " in said(recorder)
    assert "python -m pytest -q -m 'not long'" in said(recorder)
    assert "nothing yet in 0 s, still running, or cut short" in said(recorder)
    assert f"Python {sys.version.split()[0]}, jax " in said(recorder)


def test_a_failure_is_named_at_once(recorder):
    recorder.pytest_runtest_logreport(report("tests/test_a.py::test_one"))
    crash = SimpleNamespace(message="AssertionError: 1 is not 2\nassert 1 == 2")
    failure = SimpleNamespace(reprcrash=crash)
    recorder.pytest_runtest_logreport(
        report("tests/test_a.py::test_two[int4]", outcome="failed", longrepr=failure)
    )
    assert "1 failed, 1 passed in 0 s, still running" in said(recorder)
    assert "  tests/test_a.py::test_two[int4] (call): AssertionError: 1 is not 2\n" in said(
        recorder
    )


def test_errors_of_modules_fixtures_and_workers_are_failures(recorder):
    recorder.pytest_collectreport(report("tests/test_b.py", outcome="failed", longrepr="no jax"))
    recorder.pytest_runtest_logreport(
        report("tests/test_a.py::test", when="setup", outcome="failed", longrepr="\n no fixture")
    )
    recorder.pytest_runtest_logreport(
        report("tests/test_a.py::test", when="???", outcome="failed", longrepr="worker crashed")
    )
    for line in (
        "  tests/test_b.py (collection): no jax",
        "  tests/test_a.py::test (setup): no fixture",
        "  tests/test_a.py::test (???): worker crashed",
        "3 errors",
    ):
        assert line in said(recorder)


def test_times_are_summed_per_file_and_the_slowest_come_first(recorder):
    for name, seconds in (("a.py::x", 3.0), ("b.py::y", 2.5), ("b.py::z", 2.5), ("c.py::w", 0.25)):
        for when in ("setup", "call", "teardown"):
            recorder.pytest_runtest_logreport(report(name, when, duration=seconds))
    recorder.write("ended")
    assert "     15.0  b.py\n      9.0  a.py\n      0.8  1 other files\n" in said(recorder)
    assert "slowest tests\n      9.0  a.py::x\n      7.5  b.py::y\n" in said(recorder)


def test_a_whole_run(tmp_path):
    """Skips and expected failures are counted; the exit code is the one of whoever judges last."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import pytest
            def test_good(): pass
            def test_bad(): assert False, 'on purpose'
            @pytest.mark.skip(reason='-')
            def test_not(): pass
            @pytest.mark.xfail
            def test_known(): assert False
            """
        )
    )
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from recorder import Recorder
            def pytest_configure(config):
                config.pluginmanager.register(Recorder('record.txt', config.invocation_params.args))
            @pytest.hookimpl(trylast=True)
            def pytest_sessionfinish(session):
                session.exitstatus = 7
            """
        )
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(pathlib.Path(__file__).parents[1] / "support")},
        capture_output=True,
        check=False,
    )
    record = (tmp_path / "record.txt").read_text()
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed in" in record
    assert "ended with exit code 7" in record
    assert "test_it.py::test_bad (call): AssertionError: on purpose" in record
