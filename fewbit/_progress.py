"""A progress bar on stderr, for work that takes long; silent where nobody looks."""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO, TypeVar

T = TypeVar("T")

_EVERY = 0.1  # seconds between drawings: a bar must not cost what it measures
_PATIENCE = 0.5  # short work ends before anything is drawn


def progress(
    iterable: Iterable[T],
    label: str,
    total: int | None = None,
    *,
    show: bool = True,
    stream: TextIO | None = None,
) -> Iterator[T]:
    """The items of `iterable`, drawing how many are done and how long the rest will take.

    `total` is len(iterable) if it has one; without it only the count, the pace and the time are
    told. Nothing is written if the stream (stderr) is no terminal, or with `FEWBIT_PROGRESS=0`.

    >>> list(progress([1, 2], 'Adding'))
    [1, 2]
    """
    stream = sys.stderr if stream is None else stream
    if not show or not _is_watched(stream):
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    start = drawn = time.monotonic()
    done, width = 0, 0
    try:
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - start >= _PATIENCE and (now - drawn >= _EVERY or done == total):
                drawn = now
                width = _draw(stream, bar_line(label, done, total, now - start), width)
    finally:
        if width:  # an error message must not continue the bar's line
            stream.write("\n")
            stream.flush()


def _is_watched(stream: TextIO) -> bool:
    return os.environ.get("FEWBIT_PROGRESS", "1") != "0" and stream.isatty()


def _draw(stream: TextIO, line: str, width: int) -> int:
    line = line[: max(shutil.get_terminal_size().columns - 1, 1)]
    stream.write("\r" + line.ljust(width))
    stream.flush()
    return len(line)


def bar_line(label: str, done: int, total: int | None, seconds: float) -> str:
    """One line of the bar.

    >>> bar_line('Calibrating', 5, 20, 10.0)
    'Calibrating  25% |█████               | 5/20 [0:10 < 0:30]'
    >>> bar_line('Calibrating', 5, None, 10.0)
    'Calibrating 5 [0:10, 0.5/s]'
    """
    if not total or done > total:
        return f"{label} {done} [{_clock(seconds)}, {done / max(seconds, 1e-9):.3g}/s]"
    filled = 20 * done // total
    bar = "█" * filled + " " * (20 - filled)
    left = seconds / max(done, 1) * (total - done)
    share = f"{100 * done // total:3d}%"
    return f"{label} {share} |{bar}| {done}/{total} [{_clock(seconds)} < {_clock(left)}]"


def _clock(seconds: float) -> str:
    """Seconds as people write them.

    >>> _clock(7.4), _clock(3725)
    ('0:07', '1:02:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
