"""Prints the XLA flags with which `make test` compiles: those of `WANTED` that this XLA knows.

Most of the time of the tests goes into compiling some ten thousand small programs that run once, so
XLA and LLVM are told to emit plain code and not to optimize it. `make test-all` compiles as users
do. XLA ends the process over a flag that it does not know, and flags come and go with its versions:
each is tried in a process of its own.
"""

import os
import subprocess
import sys

WANTED = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false",
]


def is_known(flag):
    """Whether XLA starts with a flag."""
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices('cpu')"],
        env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
    )
    return done.returncode == 0


if __name__ == "__main__":
    flags = " ".join(WANTED)
    print(flags if is_known(flags) else " ".join(filter(is_known, WANTED)))
