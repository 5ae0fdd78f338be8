"""A report as one HTML file: the plan, accuracy against bytes, errors per Site, distributions."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from fewbit._atomic import write_atomically
from fewbit._plan import Plan
from fewbit.debug._comparison import Comparison
from fewbit.report_page._page import render as render

_MSG_PLACE = "The report cannot be written to {path}: {why}. Nothing was changed there."


def html_report(
    path: str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    comparison: Comparison | None = None,
    stats: Any = None,
    curve: Sequence[tuple[str, int, float]] | None = None,
    title: str = "Quantization report",
) -> pathlib.Path:
    """Write a report that opens in any browser, offline; returns its path.

    `plan` is from `fewbit.plan`, `comparison` from `fewbit.debug.compare`, `stats` what calibration
    collected, `curve` points (label, bytes, accuracy) of models to hold against each other. Each
    may be left out. The file is written whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = html_report(f'{folder}/report.html', curve=[('int8', 1000, 0.97)])
    ...     made.name, made.read_text('utf-8')[:15]
    ('report.html', '<!doctype html>')
    """
    page = render(plan=plan, comparison=comparison, stats=stats, curve=curve, title=title)
    return write_page(path, page)


def write_page(path: str | os.PathLike[str], page: str) -> pathlib.Path:
    """Write a page, whole or not at all; returns its path."""
    target = pathlib.Path(path)
    _write_whole(target, page.encode("utf-8"))
    return target


def _write_whole(target: pathlib.Path, data: bytes) -> None:
    def write(file: BinaryIO) -> None:
        file.write(data)

    try:
        write_atomically(target, write)
    except OSError as error:
        why = error.strerror or str(error)
        raise type(error)(error.errno, _MSG_PLACE.format(path=target, why=why)) from error
