"""Tests that hang, and tests that end the process they run in, end neither the run nor never.

A test that takes longer than `--longest` ends its process with the tracebacks of all threads. With
xdist the test is then a failure with a name, and another worker goes on with the tests after it.
"""

import atexit
import faulthandler
import os
import pathlib
import shutil
import tempfile

import pytest

# So many times what a quick test may take may one take that is marked so.
MORE_TIME = {"soak": 36, "long": 6}


class Watchdog:
    """Ends a process in which a test hangs, from a thread that Python's lock does not hold up."""

    def __init__(self, longest):
        self.longest = longest
        self.stderr = os.dup(2)  # the terminal's: while a test runs pytest keeps what is written

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_protocol(self, item):
        factor = next((n for mark, n in MORE_TIME.items() if item.get_closest_marker(mark)), 1)
        faulthandler.dump_traceback_later(factor * self.longest, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_enter_pdb(self):
        faulthandler.cancel_dump_traceback_later()


class SharedFolder:
    """Gives the workers of xdist a folder for what `Once` notes."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="fewbit-running-")
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["running"] = self.folder


class Once:
    """Leaves out a test that has ended another worker, which xdist would try again and again.

    Each worker notes what it runs. No two run the same test: who noted it elsewhere is dead.
    """

    def __init__(self, workerinput):
        self.own = pathlib.Path(workerinput["running"], workerinput["workerid"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        others = [path for path in self.own.parent.iterdir() if path != self.own]
        if any(path.read_text(encoding="utf-8") == item.nodeid for path in others):
            return True
        self.own.write_text(item.nodeid, encoding="utf-8")
