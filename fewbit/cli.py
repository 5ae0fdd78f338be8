"""The command line: `fewbit doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from fewbit import kernels
from fewbit._version import __version__

_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "keras", "keras-hub")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 all is well, 1 something is missing, 2 misuse.

    >>> main(['doctor']) in (0, 1)
    fewbit ...
    True
    """
    parser = argparse.ArgumentParser(prog="fewbit", description="JAX models with fewer bits.")
    parser.add_argument("--version", action="version", version=f"fewbit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="what this machine has, and why a kernel is not used")
    parser.parse_args(argv)
    return doctor()


def doctor() -> int:
    """Print versions and kernels; 1 if the native part is missing."""
    print(f"fewbit {__version__}")
    for name in _LIBRARIES:
        print(f"{name + ':':16}{_installed(name)}")
    found = kernels.info()
    print(found)
    return 0 if found.native else 1


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
