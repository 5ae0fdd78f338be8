"""Children of a process that starts them, and that are killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

SUPPORT = pathlib.Path(__file__).parent


class Victims:
    """Children of one process, each killed after so many seconds of its work."""

    def __init__(self, process):
        self.process = process

    def kill(self, job, place, number, moment):
        self.process.stdin.write(json.dumps([job, str(place), number]) + "\n")
        self.process.stdin.flush()
        lines = {self.process.stdout.readline().strip(), self.process.stdout.readline().strip()}
        assert "ready" in lines, lines
        (child,) = lines - {"ready"}
        time.sleep(moment)
        os.kill(int(child), signal.SIGKILL)
        assert self.process.stdout.readline().strip() == str(-signal.SIGKILL)


@pytest.fixture(scope="module")
def victims():
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "killed.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # JAX warns of the fork
        text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parents[1])},
        start_new_session=True,
    )
    with process:
        yield Victims(process)
        os.killpg(process.pid, signal.SIGKILL)  # a child too, where a test failed before its kill
