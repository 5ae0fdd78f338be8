"""Puts a printed table into docs/performance.md, so that the page never shows older numbers."""

from __future__ import annotations

import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def put(name: str, text: str, page: pathlib.Path = PAGE) -> str:
    """Replaces the block after the page's line `<!-- bench: name -->`; says what it did."""
    old = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- bench: {re.escape(name)} -->\n+```text\n).*?(```)", re.DOTALL)
    new, count = pattern.subn(lambda found: f"{found[1]}{text.rstrip()}\n{found[2]}", old)
    if not count:
        return f"{page.name} has no block named {name!r}; the table is only printed"
    page.write_text(new, encoding="utf-8")
    return f"{page.name}: block {name!r} renewed"
