"""Puts a printed table into its page of docs/, so that the page never shows older numbers."""

from __future__ import annotations

import pathlib
import re

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "performance.md", DOCS / "performance-avx2.md")


def put(name: str, text: str, *pages: pathlib.Path) -> str:
    """Replaces the block after a page's line `<!-- bench: name -->`; says what it did."""
    pattern = re.compile(rf"(<!-- bench: {re.escape(name)} -->\n+```text\n).*?(```)", re.DOTALL)
    for page in pages or PAGES:
        old = page.read_text(encoding="utf-8")
        new, count = pattern.subn(lambda found: f"{found[1]}{text.rstrip()}\n{found[2]}", old)
        if count:
            page.write_text(new, encoding="utf-8")
            return f"{page.name}: block {name!r} renewed"
    return f"no page has a block named {name!r}; the table is only printed"
