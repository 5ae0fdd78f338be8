"""Plain text for people: columns that fit a width, numbers one can read, bars of progress.

Everything here returns or writes ordinary strings without colour, so that it looks the same in a
terminal, a log file and an issue report.
"""

from __future__ import annotations

import itertools
import resource
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TextIO, TypeVar

from fewbit._util._versions import is_on

MIN_WIDTH = 60
COMFORT = 24  # a column in which a sentence still reads well
_NARROWEST = 6
_GAP = "  "
_EVERY = 0.1  # seconds between drawings of a bar, which must not cost what it measures
_PATIENCE = 0.5  # short work ends before anything is drawn
_MEGABYTE = 10**6

T = TypeVar("T")


def terminal_width() -> int:
    """Columns to write in: the terminal's, 100 where there is none, never less than 60.

    >>> terminal_width() >= 60
    True
    """
    return max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)


def human_bytes(count: int) -> str:
    """A byte count with three significant digits and a binary unit.

    >>> human_bytes(999), human_bytes(1536), human_bytes(7 * 2**30)
    ('999 B', '1.50 KiB', '7.00 GiB')
    """
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), separator=" ")


def human_count(count: int) -> str:
    """A count with three significant digits and a decimal unit.

    >>> human_count(512), human_count(12_345), human_count(6_740_000_000)
    ('512', '12.3k', '6.74G')
    """
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P"), separator="")


def _scaled(count: int, base: int, units: Sequence[str], separator: str) -> str:
    value, unit = float(count), 0
    # 999.5 would print as "1000": move to the next unit before rounding does.
    while abs(value) >= (999.5 if unit else base) and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    if unit == 0:
        return f"{count}{separator}{units[0]}".rstrip()
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{separator}{units[unit]}"


def shorten(text: str, width: int, where: str = "middle") -> str:
    """`text` in at most `width` characters, an ellipsis standing for what was cut.

    >>> shorten("decoder/layers/0/attention/query", 20)
    'decoder/l…tion/query'
    >>> shorten("a long reason", 8, where="end")
    'a long…'
    """
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    if where == "end":
        return text[: width - 1].rstrip() + "…"
    # The tail of a path says more than its head, so it gets the odd character.
    head = (width - 1) // 2
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


def wrap(text: str, width: int, indent: str = "", first: str | None = None) -> list[str]:
    """Lines of at most `width`; the first starts with `first`, the others with `indent`.

    >>> wrap("one two three", 9, indent="  ", first="- ")
    ['- one two', '  three']
    """
    first = indent if first is None else first
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    )
    return lines or [first.rstrip()]


def table(rows: Sequence[Sequence[str]], header: Sequence[str], align: str, width: int) -> str:
    """Rows in aligned columns, no line wider than `width`.

    `align` has one letter per column: `l` left (cut at the end), `r` right, `m` left and cut in
    the middle (for paths), `w` left and wrapped over several lines (for sentences). Too little
    room is taken from the widest column first.

    >>> print(table([("mlp/up", "64"), ("head", "1000")], ("module", "size"), "mr", 60))
    module  size
    ────────────
    mlp/up    64
    head    1000
    """
    return "\n".join(line for block in table_blocks(rows, header, align, width) for line in block)


def table_blocks(
    rows: Sequence[Sequence[str]], header: Sequence[str], align: str, width: int
) -> list[list[str]]:
    """The lines of `table`, kept apart: the header's with the rule below it, then each row's.

    >>> table_blocks([("up", "64")], ("name", "size"), "lr", 60)
    [['name  size', '──────────'], ['up      64']]
    """
    columns = len(header)
    if len(align) != columns or any(len(row) != columns for row in rows):
        raise ValueError(
            f"The header has {columns} columns; align={align!r} and every row need as many."
        )
    widths = _column_widths([header, *rows], align, width)
    head = [*_row_lines(header, align.replace("w", "l"), widths), "─" * _whole_width(widths)]
    return [head, *(_row_lines(row, align, widths) for row in rows)]


def natural_width(rows: Sequence[Sequence[str]]) -> int:
    """Columns the rows take when nothing is cut.

    >>> natural_width([("ab", "c"), ("a", "cde")])
    7
    """
    return _whole_width([max(map(len, column)) for column in zip(*rows, strict=True)])


def _whole_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _column_widths(rows: Sequence[Sequence[str]], align: str, width: int) -> list[int]:
    widths = [max(1, *map(len, column)) for column in zip(*rows, strict=True)]
    excess = _whole_width(widths) - width
    # Sentences lose nothing by being wrapped, so they give way first.
    wrapped = [i for i, letter in enumerate(align) if letter == "w"]
    everything = list(range(len(widths)))
    for columns, floor in ((wrapped, COMFORT), (everything, _NARROWEST), (everything, 1)):
        while excess > 0 and max((widths[i] for i in columns), default=0) > floor:
            widest = max(columns, key=lambda i: widths[i])
            widths[widest] -= 1
            excess -= 1
    return widths


def _row_lines(row: Sequence[str], align: str, widths: Sequence[int]) -> list[str]:
    cells = [_cell_lines(cell, a, w) for cell, a, w in zip(row, align, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        padded = [
            part.rjust(w) if a == "r" else part.ljust(w)
            for part, a, w in zip(parts, align, widths, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _cell_lines(text: str, align: str, width: int) -> list[str]:
    if align == "w":
        return wrap(text, width) if text else [""]
    return [shorten(text, width, where="middle" if align == "m" else "end")]


# --- A progress bar on stderr, for work that takes long; silent where nobody looks ----------------


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


# --- Values in words: their kind, never their numbers ---------------------------------------------

_SHOWN = 4  # keys of a mapping: enough to recognise it


def describe(value: Any) -> str:
    """A value in a few words: an array by type and shape, a container by what it holds.

    >>> import jax.numpy as jnp
    >>> describe(jnp.ones((2, 3))), describe({'up': jnp.ones(3)}), describe(3), describe(describe)
    ('a float32[2,3] array', "a dict with the key 'up'", 'the int 3', 'the function describe')
    """
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | complex):
        return f"the {type(value).__name__} {value!r}"
    if isinstance(value, str):
        return f"the string {value[:60]!r}{'...' if len(value) > 60 else ''}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return with_article(kind) + _keys(value)
    if isinstance(value, list | tuple):
        return _sequence(kind, value)
    if is_array_like(value):
        return _array(kind, value)
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return with_article(kind)


def is_array_like(value: Any) -> bool:
    """Whether a value has the shape and the type of an array, concrete or abstract.

    >>> import numpy as np
    >>> is_array_like(np.ones(3)), is_array_like([1.0])
    (True, False)
    """
    if isinstance(value, type):
        return False
    return getattr(value, "shape", None) is not None and getattr(value, "dtype", None) is not None


def with_article(noun: str) -> str:
    """
    >>> with_article('int8[3] array'), with_article('Plan')
    ('an int8[3] array', 'a Plan')
    """
    # "a uint8", "a unit": the letter u is mostly spoken as a consonant in names of types.
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def _array(kind: str, value: Any) -> str:
    try:
        shape = ",".join(map(str, value.shape))
    except TypeError:
        return with_article(kind)
    text = f"{value.dtype}[{shape}]"
    if kind in ("QArray", "WithAux"):
        return f"a {kind} that stands for {text}"
    return with_article(f"{text} array")


def _keys(value: Mapping[Any, Any]) -> str:
    names = [repr(key) if isinstance(key, str) else type(key).__name__ for key in value]
    if not names:
        return " without any key"
    more = ", ..." if len(names) > _SHOWN else ""
    return f" with the key{'s' * (len(names) > 1)} {', '.join(names[:_SHOWN])}{more}"


def _sequence(kind: str, value: Any) -> str:
    if not len(value):
        return f"an empty {kind}"
    if all(map(is_array_like, value)):
        return f"{with_article(kind)} of {len(value)} array{'s' * (len(value) > 1)}"
    inner = {type(item).__name__ for item in value}
    return with_article(kind) + (f" of {inner.pop()} objects" if len(inner) == 1 else "")


def key_name(keypath: tuple[Any, ...]) -> str:
    """A pytree key path as a parameter path: `layers/0/kernel`."""
    return "/".join(map(_part, keypath))


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")
