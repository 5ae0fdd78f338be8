"""The report as one HTML file: sections put together, style and script inside, nothing fetched."""

import base64
import datetime
import hashlib
import importlib.resources
import math
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

from fewbit import kernels
from fewbit._util import describe, human_bytes, versions_of, write_atomically
from fewbit.debug._comparison import Comparison
from fewbit.debug.page._charts import (
    Cell,
    Markup,
    Point,
    accuracy_chart,
    join,
    section,
    sortable,
    tag,
    text,
)
from fewbit.debug.page._sections import (
    distributions,
    errors,
    outliers,
    plan_table,
    ranges,
    summary,
)
from fewbit.planning import Plan

_MSG_NOTHING = (
    "A report needs something to show: plan=fewbit.plan(...), "
    "comparison=fewbit.debug.compare(...), stats= or curve=."
)
_MSG_KIND = "{name}= takes {wanted}, got {found}."
_MSG_POINT = (
    "curve= takes points (label, bytes, accuracy) such as ('int8', 1_500_000, 0.97); got {found!r}."
)
_KINDS = {"linen": "a Linen model", "nnx": "an NNX model", "function": "a function"}
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
    target, data = pathlib.Path(path), page.encode("utf-8")
    try:
        write_atomically(target, lambda file: file.write(data))
    except OSError as error:
        why = error.strerror or str(error)
        raise type(error)(error.errno, _MSG_PLACE.format(path=target, why=why)) from error
    return target


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
        ("summary", "Summary", summary(plan, comparison) if plan or comparison else None),
        ("accuracy", "Accuracy and bytes", _accuracy(curve) if curve else None),
        ("errors", "Errors", errors(comparison) if comparison else None),
        ("plan", "Plan", plan_table(plan) if plan else None),
        ("weights", "Weights", distributions(comparison) if comparison else None),
        ("outliers", "Outliers", outliers(comparison) if comparison else None),
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
    files = importlib.resources.files("fewbit.debug.page")
    style, script = ((files / name).read_text("utf-8") for name in ("page.css", "page.js"))
    # Nothing may be fetched, and no script may run but ours, even if a name were markup.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
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
    lead = "Up and to the left is better; the dashed line joins those that nothing beats."
    chart = tag("div", accuracy_chart(points), table, class_="curve")
    return section("accuracy", "Accuracy against bytes", lead, chart)


def _made() -> Markup:
    entries = [(tag("dt", name), tag("dd", value)) for name, value in facts()]
    return tag("section", tag("h2", "Made with"), tag("dl", entries, class_="facts"), id="made")


def _check(plan: Any, comparison: Any, stats: Any, curve: Any) -> None:
    if all(part is None for part in (plan, comparison, stats, curve)):
        raise ValueError(_MSG_NOTHING)
    for name, value, kind, wanted in (
        ("plan", plan, Plan, "a Plan, from fewbit.plan(...)"),
        ("comparison", comparison, Comparison, "a Comparison, from fewbit.debug.compare(...)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(_MSG_KIND.format(name=name, wanted=wanted, found=describe(value)))
    for point in curve or ():
        try:
            label, size, score = point
            good = size > 0 and math.isfinite(score) and bool(text(label))
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(_MSG_POINT.format(found=point))


# --- Where a report was made: versions and the machine, without names or paths of people ----------


def facts() -> list[tuple[str, str]]:
    """Label and text of each fact.

    >>> [name for name, _ in facts()][:2]
    ['Made', 'fewbit']
    """
    now = datetime.datetime.now(datetime.UTC)
    found = [("Made", f"{now:%Y-%m-%d %H:%M} UTC")]
    found.extend(versions_of(("jax", "jaxlib", "numpy", "flax")))
    info, devices = kernels.info(), jax.devices()
    missing = f"no native kernels: {info.missing}"
    native = f"native kernels for {info.isa}" if info.native else missing
    found += [
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("Devices", f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"),
        ("CPU", f"{_cpu_model()}, {info.threads} usable threads, {native}"),
    ]
    return found


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
