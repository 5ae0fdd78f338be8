"""Runs every test but the soak ones, comparisons with other libraries too, and writes it down.

`make test-all` calls this; the record is tests/last-test-all.txt, written while the tests run
(tests/support/recorder.py).
"""

import argparse
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
RECORD = TESTS / "last-test-all.txt"
SANITIZED = ROOT / "build" / "last-test-sanitized.txt"


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
    pytest = [".venv/bin/python", "-m", "pytest", "-q", "-n", workers, "--strict-skips"]
    pytest += ["-m", "not soak", "--record", str(RECORD.relative_to(ROOT))]
    code, last = run(pytest)
    said = RECORD.read_text(encoding="utf-8")
    if not (ROOT / ".venv-peers" / "bin" / "python").exists():
        said += "\n.venv-peers is missing: nothing was compared with other libraries\n"

    sanitized = ["make", "--no-print-directory", "test-sanitized", f"WORKERS={workers}"]
    said += f"\n$ {' '.join(sanitized)}\n"
    RECORD.write_text(said + "still running, or cut short\n", encoding="utf-8")
    SANITIZED.parent.mkdir(exist_ok=True)
    SANITIZED.unlink(missing_ok=True)
    sanitized_code, sanitized_last = run([*sanitized, f"RECORD={SANITIZED.relative_to(ROOT)}"])
    said += f"{sanitized_last}\nexit code {sanitized_code}\n"
    if SANITIZED.exists():
        said += "\n" + SANITIZED.read_text(encoding="utf-8")
    RECORD.write_text(said, encoding="utf-8")

    print(f"{RECORD.relative_to(ROOT)}: {last}, exit code {code};", end=" ")
    print(f"sanitized: {sanitized_last}, exit code {sanitized_code}")
    return int(code != 0 or sanitized_code != 0)


if __name__ == "__main__":
    sys.exit(main())
