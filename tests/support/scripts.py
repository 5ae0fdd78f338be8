"""A script run as a user runs it."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str, timeout: float = 240, **variables: str) -> str:
    """Standard output of one script, run as `python script arguments`; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    flags = environment.get("XLA_FLAGS", "").split()  # one device, as a user has
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    environment |= variables
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
