"""Runs a script in the environment of the peers, once for all workers of a test run."""

import os
import pathlib
import subprocess
import time

import pytest
from peers import cases

PEERS = pathlib.Path(__file__).parent
ROOT = PEERS.parent.parent
LIMIT = 1800  # seconds; the slowest script takes one minute of an idle core


def peers_python():
    """The interpreter of the peers: .venv-peers, or FEWBIT_PEERS_PYTHON."""
    python = os.environ.get("FEWBIT_PEERS_PYTHON", str(ROOT / ".venv-peers" / "bin" / "python"))
    if not pathlib.Path(python).exists():
        pytest.skip(f"the environment of the peers is missing: {python}; `make .venv-peers`")
    return python


def answers_of(script, tmp_path_factory):
    """The results that `peers/<script>.py` writes."""
    # With xdist each worker has its own directory below the run's.
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    python, written = peers_python(), shared / f"{script}.npz"
    try:
        (shared / f"{script}.started").mkdir()
    except FileExistsError:
        _wait_for(written, shared / f"{script}.failed")
        return cases.Results.load(written)
    draft = shared / f"{script}.draft.npz"
    # Plain settings: strict promotion and several devices are our own tests' business.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [python, "-m", f"peers.{script}", str(draft)],
        cwd=PEERS.parent,
        capture_output=True,
        text=True,
        env=env | {"JAX_PLATFORMS": "cpu"},
        timeout=LIMIT,
    )
    if done.returncode:
        (shared / f"{script}.failed").write_text(done.stderr[-3000:])
        pytest.fail(f"{script} failed:\n{done.stderr[-3000:]}")
    draft.rename(written)
    return cases.Results.load(written)


def _wait_for(written, failed):
    deadline = time.monotonic() + LIMIT
    while not written.exists():
        if failed.exists() or time.monotonic() > deadline:
            pytest.fail(f"{written.stem}: the other worker got no answers")
        time.sleep(0.2)
