"""Plain text for people: columns that fit a width, numbers one can read.

Everything here returns or writes ordinary strings without colour, so that it looks the same in a
terminal, a log file and an issue report.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

MIN_WIDTH = 60
DEFAULT_WIDTH = 100
_GAP = "  "
_NARROWEST = 6
COMFORT = 24  # a column in which a sentence still reads well


def terminal_width() -> int:
    """Columns to write in: the terminal's, 100 where there is none, never less than 60.

    >>> terminal_width() >= 60
    True
    """
    return max(MIN_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


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
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return lines or [(indent if first is None else first).rstrip()]


def table(
    rows: Sequence[Sequence[str]],
    header: Sequence[str],
    align: str,
    width: int,
) -> str:
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
    head = _row_lines(header, align.replace("w", "l"), widths)
    head.append("─" * (sum(widths) + len(_GAP) * (columns - 1)))
    return [head, *(_row_lines(row, align, widths) for row in rows)]


def natural_width(rows: Sequence[Sequence[str]]) -> int:
    """Columns the rows take when nothing is cut.

    >>> natural_width([("ab", "c"), ("a", "cde")])
    7
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _column_widths(rows: Sequence[Sequence[str]], align: str, width: int) -> list[int]:
    widths = [max(1, *map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
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
    for i in range(max(map(len, cells))):
        parts = [cell[i] if i < len(cell) else "" for cell in cells]
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
