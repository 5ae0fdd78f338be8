"""Tables that the page's script can sort and filter, and that read well without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fewbit.report_page._markup import Markup, tag


@dataclass(frozen=True)
class Cell:
    """What a cell shows and what it sorts by."""

    shown: Any
    value: float | None = None
    class_: str | None = None


def sortable(
    name: str,
    caption: str,
    columns: Sequence[tuple[str, str, bool]],
    rows: Sequence[Sequence[Any]],
    *,
    filtered: bool = False,
) -> Markup:
    """A table of (key, heading, is a number) columns; the first cell of a row is its heading."""
    head = [
        tag(
            "th",
            tag("button", heading, type="button", data_key=key),
            scope="col",
            class_="number" if number else None,
        )
        for key, heading, number in columns
    ]
    body = [tag("tr", [_cell(c, k, columns[k][2]) for k, c in enumerate(row)]) for row in rows]
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        id=name,
        class_="sortable",
    )
    wrapped = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)
    if not filtered:
        return wrapped
    box = tag(
        "label",
        "Filter ",
        tag(
            "input",
            type="search",
            data_table=name,
            placeholder="module, op, type, kernel …",
            autocomplete="off",
            spellcheck="false",
        ),
        tag("span", f"{len(rows)} of {len(rows)}", class_="count", aria_live="polite"),
        class_="filter",
    )
    return tag("div", box, wrapped)


def _cell(cell: Any, number: int, numeric: bool) -> Markup:
    if not isinstance(cell, Cell):
        cell = Cell(cell)
    classes = " ".join(filter(None, ("number" if numeric else None, cell.class_))) or None
    attributes: dict[str, Any] = dict(class_=classes, data_value=cell.value)
    if number == 0:
        return tag("th", cell.shown, scope="row", **attributes)
    return tag("td", cell.shown, **attributes)
