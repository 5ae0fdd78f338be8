"""A progress bar on stderr, for work that takes long; silent where nobody looks."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TextIO, TypeVar

from fewbit._settings import is_on
from fewbit._text import human_bytes

T = TypeVar("T")

_EVERY = 0.1  # seconds between drawings: a bar must not cost what it measures
_PATIENCE = 0.5  # short work ends before anything is drawn
_MEGABYTE = 10**6


class Progress:
    """One line that says how much is done, how long it took and how long the rest will take.

    Nothing is written if the stream (stderr) is no terminal, with `show=False`, or with
    `FEWBIT_PROGRESS=0` in the environment. `note` names what is at hand, or is a function of the
    seconds that are over.

    >>> with Progress('Comparing', 4, show=False) as bar:
    ...     bar.update(note='mlp/up')
    >>> bar.line(10.0)
    'Comparing  25% |█████               | 1/4 [0:10 < 0:30] mlp/up'
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        show: bool = True,
        stream: TextIO | None = None,
        unit: int = 1,
        note: str | Callable[[float], str] = "",
    ):
        self.label, self.total, self.done, self.note = label, total, 0, note
        self._stream, self._unit = sys.stderr if stream is None else stream, unit
        self._visible = is_on("FEWBIT_PROGRESS") and show and self._stream.isatty()
        self._start = self._drawn = time.monotonic()
        self._width = 0

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Count some more as done."""
        self.done += count
        self.note = self.note if note is None else note
        now = time.monotonic()
        late = now - self._drawn >= _EVERY or self.done == self.total
        if self._visible and now - self._start >= _PATIENCE and late:
            self._drawn = now
            self._draw(self.line(now - self._start))

    def line(self, seconds: float) -> str:
        """What is shown after so many seconds."""
        done = self.done // self._unit
        total = None if self.total is None else self.total // self._unit
        note = self.note(seconds) if callable(self.note) else self.note
        if not total or done > total:
            pace = f"{done / max(seconds, 1e-9):.3g}/s"
            return f"{self.label} {done} [{_clock(seconds)}, {pace}] {note}".rstrip()
        filled = 20 * done // total
        bar = "█" * filled + " " * (20 - filled)
        left = seconds / max(done, 1) * (total - done)
        times = f"[{_clock(seconds)} < {_clock(left)}]"
        share = f"{100 * done // total:3d}%"
        return f"{self.label} {share} |{bar}| {done}/{total} {times} {note}".rstrip()

    def _draw(self, line: str) -> None:
        line = line[: max(shutil.get_terminal_size().columns - 1, 1)]
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:  # an error message must not continue the bar's line
            self._stream.write("\n")
            self._stream.flush()


def progress(
    iterable: Iterable[T],
    label: str,
    total: int | None = None,
    *,
    show: bool = True,
    stream: TextIO | None = None,
) -> Iterator[T]:
    """The items of `iterable`, with a bar beside the loop.

    `total` is len(iterable) if it has one; without it only the count, the pace and the time are
    told.

    >>> list(progress([1, 2], 'Adding'))
    [1, 2]
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    with Progress(label, total, show=show, stream=stream) as bar:
        for item in iterable:
            yield item
            bar.update()


def bytes_progress(label: str, total: int, *, show: bool = True) -> Progress:
    """A bar that counts megabytes, with the pace and the most memory that the process held.

    >>> bar = bytes_progress('Quantizing', 10**9, show=False)
    >>> bar.update(5 * 10**8)
    >>> bar.line(10.0)
    'Quantizing  50% |██████████          | 500/1000 [0:10 < 0:10] MB, 50 MB/s, peak ...'
    """

    def note(seconds: float) -> str:
        pace = bar.done / _MEGABYTE / max(seconds, 1e-9)
        return f"MB, {pace:.0f} MB/s, peak {human_bytes(peak_memory())}"

    bar = Progress(label, total, show=show, unit=_MEGABYTE, note=note)
    return bar


def peak_memory() -> int:
    """The most bytes of memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _clock(seconds: float) -> str:
    """Seconds as people write them.

    >>> _clock(7.4), _clock(3725)
    ('0:07', '1:02:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
