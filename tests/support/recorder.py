"""Writes down what a run of the tests found, while it runs: a failure that was seen is named.

`pytest --record <file>`: the command, the versions, every failed test, the time that each file took
and the slowest tests. The file is complete at any moment, so a run that is cut short leaves what it
knew. With xdist the process that started the workers writes; it sees every report.
"""

import collections
import datetime
import os
import pathlib
import platform
import shlex
import time
from importlib import metadata

import pytest

LIBRARIES = ("jax", "jaxlib", "flax", "keras", "keras-hub", "numpy", "pytest")
SLOWEST = 50
# conftest.py asks for them always.
DEVICES = "--xla_force_host_platform_device_count=8"
# Failures are written at once, other news after so many seconds.
PATIENCE = 20
RUNNING = "still running, or cut short"


class Recorder:
    """A plugin of pytest; `path` is the record."""

    def __init__(self, path, arguments):
        self.path = pathlib.Path(path).absolute()
        self.head = [
            f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"with: {versions()}",
            f"on: {machine()}",
            f"$ {command(arguments)}",
        ]
        self.start = self.written = time.monotonic()
        self.outcomes = collections.Counter()
        self.failed = {}
        self.files = collections.Counter()
        self.tests = collections.Counter()
        self.write(RUNNING)

    def pytest_runtest_logreport(self, report):
        self.files[report.nodeid.partition("::")[0]] += report.duration
        self.tests[report.nodeid] += report.duration
        if report.failed:
            word = "failed" if report.when == "call" else "errors"
            self.note_failure(f"{report.nodeid} ({report.when})", report, word)
        elif report.skipped:
            self.outcomes["xfailed" if hasattr(report, "wasxfail") else "skipped"] += 1
        elif report.when == "call":
            self.outcomes["xpassed" if hasattr(report, "wasxfail") else "passed"] += 1
        if time.monotonic() > self.written + PATIENCE:
            self.write(RUNNING)

    def pytest_collectreport(self, report):
        if report.failed:
            self.note_failure(f"{report.nodeid} (collection)", report, "errors")

    def note_failure(self, name, report, word):
        self.outcomes[word] += 1
        self.failed[name] = first_line(report)
        self.write(RUNNING)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session):
        """After all others, who may yet turn success into failure."""
        yield
        self.write(f"ended with exit code {int(session.exitstatus)}")

    def write(self, state):
        self.written = time.monotonic()
        fresh = self.path.with_name(self.path.name + ".part")
        fresh.write_text("\n".join(self.lines(state)) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)

    def lines(self, state):
        seconds = time.monotonic() - self.start
        counts = ", ".join(f"{number} {word}" for word, number in sorted(self.outcomes.items()))
        lines = [*self.head, f"{counts or 'nothing yet'} in {seconds:.0f} s, {state}"]
        if self.failed:
            lines += ["", "failed:", *(f"  {name}: {why}" for name, why in self.failed.items())]
        shown = [(file, spent) for file, spent in self.files.most_common() if spent >= 1]
        lines += ["", "seconds per file (those of less than one: together)"]
        lines += [f"{spent:9.1f}  {file}" for file, spent in shown]
        rest = self.files.total() - sum(spent for _, spent in shown)
        lines += [f"{rest:9.1f}  {len(self.files) - len(shown)} other files"]
        lines += ["", f"the {SLOWEST} slowest tests"]
        lines += [f"{spent:9.1f}  {name}" for name, spent in self.tests.most_common(SLOWEST)]
        return lines


class Teller:
    """A plugin of pytest that names a failure on the terminal when it is seen.

    pytest itself prints an "F", and the name in a summary that a run which is killed never reaches.
    """

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tell(f"{report.nodeid} ({report.when})", report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report):
        if report.failed:
            self.tell(f"{report.nodeid} (collection)", report)

    def tell(self, name, report):
        if reporter := self.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.write_line(f"failed: {name}: {first_line(report)}", red=True)
            reporter.flush()


def first_line(report):
    """The first line of what a failure says; of an import that fails the line with the error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return next(iter(errors or lines), "")


def versions():
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return f"Python {platform.python_version()}, {', '.join(found)}"


def machine():
    """Processors and the widest of the instruction sets that make a difference here."""
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        flags = []
    best = next((isa for isa in ("avx512_vnni", "avx2") if isa in flags), "no AVX2")
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {best}"


def command(arguments):
    flags = os.environ.get("XLA_FLAGS", "").replace(DEVICES, "").strip()
    words = shlex.join(["python", "-m", "pytest", *map(str, arguments)])
    return f"XLA_FLAGS={shlex.quote(flags)} {words}" if flags else words
