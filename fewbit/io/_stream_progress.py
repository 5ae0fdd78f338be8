"""How far a stream of bytes is: share, pace, time left, and the most memory it took."""

from __future__ import annotations

import resource
import sys
import time
from types import TracebackType

from fewbit._progress import bar_line
from fewbit._text import human_bytes

_EVERY = 0.2  # seconds between drawings


class StreamProgress:
    """A line on a terminal that counts megabytes; silent elsewhere.

    >>> with StreamProgress('Quantizing', 10**9, show=False) as bar:
    ...     bar.advance(5 * 10**8)
    >>> bar.line(10.0)
    'Quantizing  50% |██████████          | 500/1000 [0:10 < 0:10] MB, 50 MB/s, peak ...
    """

    def __init__(self, label: str, total: int, show: bool = True):
        self._label, self._total, self._done, self._skipped = label, total, 0, 0
        self._show = show and sys.stderr.isatty()
        self._start = self._drawn = time.monotonic()
        self._width = 0

    def skip(self, size: int) -> None:
        """Count bytes that an earlier run has done."""
        self._done += size
        self._skipped += size

    def advance(self, size: int) -> None:
        """Count bytes that are done."""
        self._done += size
        now = time.monotonic()
        if self._show and now - self._drawn >= _EVERY:
            self._drawn = now
            self._draw(self.line(now - self._start))

    def line(self, seconds: float) -> str:
        """What is shown."""
        done, total = (self._done - self._skipped) // 10**6, (self._total - self._skipped) // 10**6
        pace = done / max(seconds, 1e-9)
        peak = human_bytes(peak_memory())
        bar = bar_line(self._label, done, total, seconds)
        return f"{bar} MB, {pace:.0f} MB/s, peak {peak}"

    def _draw(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def __enter__(self) -> StreamProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._draw(self.line(time.monotonic() - self._start))
            sys.stderr.write("\n")


def peak_memory() -> int:
    """The most bytes of memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
