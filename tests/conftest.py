"""Hostile settings for every test: eight host devices, strict promotion (warnings: pyproject)."""

import atexit
import collections
import fnmatch
import gc
import os
import pathlib
import re
import shutil
import tempfile

from recorder import DEVICES, Recorder, Teller
from watchdog import Once, SharedFolder, Watchdog

# Before the first import of jax: the device count is read once, when the CPU client starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")
# The workers of a run, and the processes that tests start, compile the same small programs: once is
# enough. The cache is as old as the run, so that no test meets what another version compiled.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="fewbit-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import pytest
from victims import victims as victims  # a fixture

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A slow machine fails no test. `make test` draws the same examples every time, others draw anew.
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("searching", **PATIENT)
hypothesis.settings.register_profile("repeatable", derandomize=True, **PATIENT)
hypothesis.settings.load_profile("searching")

# Sweeps over formats run with these in `make test-all` only; the others stand for them.
RARE_FORMATS = {
    *("int2", "int5", "int6", "int7", "int16", "uint4", "uint8", "mxfp8_16", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
}
# Of a sweep of as many cases `make test` runs every second one.
SWEEP = 6
# What has to hold with every version that is supported: every primitive with a body, all examples,
# the flows of Qwix's guide.
EVERYWHERE = {
    *("test_identity.py", "test_jaxprs.py", "test_examples.py", "test_keras_examples.py"),
    "test_from_qwix.py",
}
SOAK_FILE = pathlib.Path(__file__).with_name("soak.txt")
LONG_FILE = pathlib.Path(__file__).with_name("long.txt")
SKIPS_FILE = pathlib.Path(__file__).with_name("skips.txt")


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs(request):
    """JAX keeps all it compiled: gigabytes over a run. Doctests are many and small."""
    yield
    if request.path.name.startswith("test_"):
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish():
    """Tracing makes much and drops it at once: Python's search for cycles takes a tenth of a run.
    What was imported is never garbage, and `forget_compiled_programs` collects the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser):
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail if a test is skipped that tests/skips.txt does not list with a reason",
    )
    parser.addoption(
        "--record",
        metavar="FILE",
        help="write what was run and found, failed tests and times too, while it runs",
    )
    parser.addoption(
        "--longest",
        metavar="SECONDS",
        type=float,
        default=600,
        help="a test that takes longer hangs: it says where and ends its process; long ones get"
        " more (default: %(default)s; 0: wait for ever)",
    )


def pytest_configure(config):
    if config.getoption("longest"):
        config.pluginmanager.register(Watchdog(config.getoption("longest")), "watchdog")
    # With xdist every report also reaches the process that started the workers: judge there.
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Once(config.workerinput), "once")
        return
    config.pluginmanager.register(SharedFolder(), "shared-folder")
    config.pluginmanager.register(Teller(config), "teller")
    if config.getoption("strict_skips"):
        config.pluginmanager.register(SkipJudge(read_skips(SKIPS_FILE)), "skip-judge")
    if path := config.getoption("record"):
        recorder = Recorder(path, config.invocation_params.args)
        config.pluginmanager.register(recorder, "recorder")


def read_skips(path):
    """The allowed skips: {pattern over test ids: reason}."""
    allowed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, separator, reason = line.partition(" | ")
        if not separator or not reason.strip():
            raise pytest.UsageError(
                f"{path.name}:{number}: {line!r} gives no reason; write `<test id> | <reason>`"
            )
        allowed[pattern.strip()] = reason.strip()
    return allowed


def read_patterns(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def pytest_collection_modifyitems(items):
    """Marks what tests/soak.txt and tests/long.txt list, and as long the larger part of sweeps."""
    soak, long = read_patterns(SOAK_FILE), read_patterns(LONG_FILE)
    sweeps = collections.Counter(item.nodeid.partition("[")[0] for item in items)
    seen = collections.Counter()
    for item in items:
        if item.path.name in EVERYWHERE:
            item.add_marker(pytest.mark.everywhere)
        function, _, parameters = item.nodeid.partition("[")
        words = set(re.split(r"[-, ]+", parameters.rstrip("]")))
        if item.get_closest_marker("soak") or _is_listed(item, soak):
            item.add_marker(pytest.mark.soak)
            item.add_marker(pytest.mark.long)
            continue
        if _is_listed(item, long) or words & RARE_FORMATS:
            item.add_marker(pytest.mark.long)
            continue
        seen[function] += 1
        if sweeps[function] >= SWEEP and seen[function] % 2 == 0 and not _is_quick(function):
            item.add_marker(pytest.mark.long)


def _is_quick(function):
    """Sweeps over names and messages, which compile nothing, and over primitives with bodies."""
    words = ("names", "messages", "rules", "docs", "laws", "test_jaxprs", "test_identity", "house")
    return any(word in function for word in words)


def _is_listed(item, patterns):
    """Parameters come after a colon: brackets mean something to fnmatch. Without, all are meant."""
    name = item.nodeid.replace("[", ":").replace("]", "")
    names = (name, item.nodeid.partition("[")[0])
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


class SkipJudge:
    """Collects skips, of tests and of whole modules, and fails the session on an unlisted one."""

    def __init__(self, allowed):
        self.allowed = allowed
        self.unlisted = {}

    def pytest_runtest_logreport(self, report):
        self._judge(report)

    def pytest_collectreport(self, report):
        self._judge(report)

    def _judge(self, report):
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if not any(fnmatch.fnmatchcase(report.nodeid, pattern) for pattern in self.allowed):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.unlisted[report.nodeid] = str(reason)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.unlisted:
            terminalreporter.section("skipped, but not listed in tests/skips.txt", red=True)
            for nodeid, reason in sorted(self.unlisted.items()):
                terminalreporter.line(f"{nodeid}: {reason}")
            terminalreporter.line("Make them run, or list them with the reason: <test id> | <why>")
