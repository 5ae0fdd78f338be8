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


def answers_of(script, tmp_path_factory, prepare=None):
    """The results that `peers/<script>.py` writes.

    `prepare(folder)` is called before it, and the script is given the folder too; it is found at
    `folder_of(script, tmp_path_factory)`.
    """
    shared = _shared(tmp_path_factory)
    python, written = peers_python(), shared / f"{script}.npz"
    try:
        (shared / f"{script}.started").mkdir()
    except FileExistsError:
        _wait_for(written, shared / f"{script}.failed")
        return cases.Results.load(written)
    draft, given = shared / f"{script}.draft.npz", []
    if prepare is not None:
        folder = folder_of(script, tmp_path_factory)
        folder.mkdir()
        prepare(folder)
        given = [str(folder)]
    # Plain settings: strict promotion and several devices are our own tests' business.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [python, "-m", f"peers.{script}", str(draft), *given],
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


def folder_of(script, tmp_path_factory):
    """What a script was given and wrote beside its answers."""
    return _shared(tmp_path_factory) / f"{script}.folder"


def _shared(tmp_path_factory):
    """With xdist each worker has its own directory below the run's."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _wait_for(written, failed):
    deadline = time.monotonic() + LIMIT
    while not written.exists():
        if failed.exists() or time.monotonic() > deadline:
            pytest.fail(f"{written.stem}: the other worker got no answers")
        time.sleep(0.2)
