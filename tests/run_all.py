"""Runs every test, long ones and comparisons with other libraries too, and writes down the result.

`make test-all` calls this; the record is tests/last-test-all.txt.
"""

import argparse
import datetime
import pathlib
import platform
import subprocess
import sys
from importlib.metadata import version

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
RECORD = TESTS / "last-test-all.txt"


def run(command):
    """Runs a command with its output shown; returns its code and last line."""
    print("$", *command, flush=True)
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    workers = str(parser.parse_args().workers)

    # Comparisons with other libraries are among them: they call scripts in .venv-peers.
    commands = [
        [".venv/bin/python", "-m", "pytest", "-q", "-n", workers, "--strict-skips"],
        ["make", "test-sanitized", f"WORKERS={workers}"],
    ]

    results = []
    for command in commands:
        code, last = run(command)
        results.append((" ".join(command), code, last))

    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "pytest"))
    lines = [
        f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"with: Python {platform.python_version()}, {versions}",
    ]
    for command, code, last in results:
        lines += ["", f"$ {command}", last, f"exit code {code}"]
    if not (ROOT / ".venv-peers" / "bin" / "python").exists():
        lines += ["", ".venv-peers is missing: nothing was compared with other libraries"]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(RECORD.read_text(encoding="utf-8"))
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
