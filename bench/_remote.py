"""A peer library in its own process and environment, called one kernel at a time.

The peer's script answers lines of JSON (bench/peers/_serve.py), so its calls take turns with ours
in the same rounds although it shares no environment with us. It measures its seconds itself.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from typing import Any

PAUSE = 0.01
SCRIPTS = pathlib.Path(__file__).with_name("peers")


class Remote:
    """One running peer script."""

    def __init__(self, python: str, script: pathlib.Path) -> None:
        self.name = script.stem
        self._process = subprocess.Popen(
            [python, str(script), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions: dict[str, str] = self._ask({"what": "versions"})

    @classmethod
    def all_of(cls, python: str, subject: str) -> list[Remote]:
        """Every peer of a subject whose script starts; one that does not is named and left out."""
        found = []
        for script in sorted(SCRIPTS.glob(f"[a-z]*_{subject}.py")):
            try:
                found.append(cls(python, script))
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr)
        return found

    def prepare(self, task: Any) -> dict[str, int]:
        """Builds the peer's kernels for a shape: their names and the bytes of their weights."""
        return self._ask({"what": "prepare", "task": task})

    def call(self, name: str) -> float:
        """Seconds of one call, after which the peer's threads get the time to stop spinning."""
        seconds = float(self._ask({"what": "call", "name": name}))
        time.sleep(PAUSE)
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self.name} ended; run it alone to see why: bench/peers")
        return json.loads(answer)
