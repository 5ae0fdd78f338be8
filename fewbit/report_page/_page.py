"""The page as one string: sections put together, style and script inside, nothing from outside."""

import base64
import hashlib
import importlib.resources
import math
from collections.abc import Sequence
from typing import Any

from fewbit._errors import describe
from fewbit._plan import Plan
from fewbit._text import human_bytes
from fewbit.debug._comparison import Comparison
from fewbit.report_page import _error_section, _plan_section
from fewbit.report_page._charts import Point, accuracy_chart
from fewbit.report_page._facts import facts
from fewbit.report_page._markup import Markup, join, tag, text
from fewbit.report_page._stats_section import ranges
from fewbit.report_page._tables import Cell, sortable

_MSG_NOTHING = (
    "A report needs something to show: plan=fewbit.plan(...), "
    "comparison=fewbit.debug.compare(...), stats= or curve=."
)
_MSG_KIND = "{name}= takes {wanted}, got {found}."
_MSG_POINT = (
    "curve= takes points (label, bytes, accuracy) such as ('int8', 1_500_000, 0.97); got {found!r}."
)
_KINDS = {"linen": "a Linen model", "nnx": "an NNX model", "function": "a function"}


def render(
    *,
    plan: Plan | None = None,
    comparison: Comparison | None = None,
    stats: Any = None,
    curve: Sequence[Point] | None = None,
    title: str = "Quantization report",
) -> str:
    """A whole HTML document.

    >>> page = render(curve=[('float32', 4000, 0.98), ('int8', 1000, 0.97)], title='<digits>')
    >>> '&lt;digits&gt;' in page, 'http' in page.replace('http-equiv', '')
    (True, False)
    """
    _check(plan, comparison, stats, curve)
    sections = [
        ("summary", "Summary", _summary(plan, comparison)),
        ("accuracy", "Accuracy and bytes", _accuracy(curve) if curve else None),
        ("errors", "Errors", _error_section.errors(comparison) if comparison else None),
        ("plan", "Plan", _plan_section.plan_table(plan) if plan else None),
        ("weights", "Weights", _error_section.distributions(comparison) if comparison else None),
        ("outliers", "Outliers", _error_section.outliers(comparison) if comparison else None),
        ("ranges", "Activations", ranges(stats) if stats is not None else None),
        ("made", "Made with", _made()),
    ]
    present = [(name, label, body) for name, label, body in sections if body is not None]
    links = [tag("a", label, href=f"#{name}") for name, label, _ in present]
    kind = plan.kind if plan is not None else comparison.kind if comparison is not None else None
    below = f"Of {_KINDS.get(kind, kind)}, by fewbit" if kind else "By fewbit"
    toggle = tag("button", "Dark", class_="theme", type="button", hidden=True)
    header = tag("header", tag("div", tag("h1", title), tag("p", below, class_="soft")), toggle)
    footer = tag("footer", "One file, no network: style, script and pictures are inside.")
    main = tag("main", [body for _, _, body in present])
    return document(title, join(header, tag("nav", links, aria_label="Sections"), main, footer))


def document(title: str, body: Markup) -> str:
    """A page with this body; style and script are inside."""
    style, script = _resource("page.css"), _resource("page.js")
    # Nothing may be fetched, and no script may run but ours, even if a name were markup.
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="fewbit"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    whole = tag("html", head, tag("body", body, tag("script", Markup(script))), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _resource(name: str) -> str:
    return importlib.resources.files("fewbit.report_page").joinpath(name).read_text("utf-8")


def _summary(plan: Plan | None, comparison: Comparison | None) -> Markup | None:
    if plan is None and comparison is None:
        return None
    return _plan_section.summary(plan, comparison)


def _accuracy(points: Sequence[Point]) -> Markup:
    largest = max(points, key=lambda p: p[1])
    rows = [
        [
            label,
            Cell(human_bytes(size), size),
            Cell(f"{score:.6g}", score),
            Cell(f"{score - largest[2]:+.4g}", score - largest[2]),
        ]
        for label, size, score in points
    ]
    columns = (
        ("label", "model", False),
        ("bytes", "bytes", True),
        ("accuracy", "accuracy", True),
        ("change", "change", True),
    )
    table = sortable("curve-table", "Accuracy against bytes", columns, rows)
    intro = tag(
        "p",
        "Up and to the left is better; the dashed line joins those that nothing beats.",
        class_="soft lead",
    )
    chart = tag("div", accuracy_chart(points), table, class_="curve")
    title = tag("h2", "Accuracy against bytes")
    return tag("section", title, intro, chart, id="accuracy")


def _made() -> Markup:
    entries = [(tag("dt", name), tag("dd", value)) for name, value in facts()]
    return tag("section", tag("h2", "Made with"), tag("dl", entries, class_="facts"), id="made")


def _check(plan: Any, comparison: Any, stats: Any, curve: Any) -> None:
    if all(part is None for part in (plan, comparison, stats, curve)):
        raise ValueError(_MSG_NOTHING)
    if plan is not None and not isinstance(plan, Plan):
        wanted = "a Plan, from fewbit.plan(...)"
        raise TypeError(_MSG_KIND.format(name="plan", wanted=wanted, found=describe(plan)))
    if comparison is not None and not isinstance(comparison, Comparison):
        found, wanted = describe(comparison), "a Comparison, from fewbit.debug.compare(...)"
        raise TypeError(_MSG_KIND.format(name="comparison", wanted=wanted, found=found))
    for point in curve or ():
        try:
            label, size, score = point
            good = size > 0 and math.isfinite(score) and bool(text(label))
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(_MSG_POINT.format(found=point))
