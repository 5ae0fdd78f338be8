"""The HTML report as text: everything is in it, nothing is fetched, no name is ever markup."""

import html.parser
import os
import pathlib
import re

import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fewbit import QuantizationRule
from fewbit.debug import html_report
from fewbit.debug._comparison import Comparison, LayerError, OutputError, SiteError
from fewbit.debug._metrics import Difference, Distribution, Outlier
from fewbit.debug.page._charts import frontier
from fewbit.debug.page._page import render
from fewbit.planning._plan import Plan
from fewbit.planning._rows import LeafPlan, SitePlan
from fewbit.qarray import HowToQuantize
from fewbit.tracing import ArrayInfo, Site

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title><svg onload=alert(1)>",
    "<!-- ]]> &amp; &#0; \x00\x1b[31m\ud800",
    "javascript:alert(1)//\u202e",
]


def make_plan(names):
    info = ArrayInfo((4, 64, 64), "float32")
    how = HowToQuantize(qtype="int4", channelwise_axes=(1,))
    rows, leaves = [], []
    for k, name in enumerate(names):
        site = Site(
            *(name, "dot_general", 0), lhs=info, rhs=info, out=info, macs=100 * (k + 1), weight=name
        )
        reason = f"because {name}" if k == 0 else None
        rows.append(
            SitePlan(site, 0, "int4", "int8", "dynamic", "per-channel", name, reason, (name,))
        )
        sizes = (4096 * (k + 1), 4096 * (k + 1) // 7)
        leaves.append(LeafPlan(name, (64, 64), "float32", how, *sizes, (name,)))
    rules = (QuantizationRule(weight_qtype="int4"),)
    return Plan(rules, tuple(rows), tuple(leaves), notes=tuple(names), kind="nnx")


def make_comparison(names, not_finite=0):
    rows, outliers, weights = [], [], []
    for k, name in enumerate(names):
        error = Difference(10.0 + k, 0.99, 0.1)
        layers = tuple(LayerError((i,), Difference(12.0 + i, 0.9, 0.2), error) for i in range(3))
        rows.append(
            SiteError(
                *(f"{name}:dot_general0", f"{name} x int8", name, 100),
                *(error, error, error, 0.01, 20.0, 30.0),
                not_finite=not_finite,
                layers=layers if k == 0 else (),
            )
        )
        outliers.append(Outlier(name, name, k, 10.0, 1.0, 10.0, (1,)))
        weights.append(
            Distribution(
                *(name, name, -2.5, 1.5, (1, 5, 7, 2), (-2.0, -1.0, 0.0, 1.0), (1, 5, 7, 2)),
                *(-2.0, 1.0, 0.5, 15),
            )
        )
    return Comparison(
        tuple(rows),
        OutputError(14.6, 0.98, 0.18, 0.6),
        "nnx",
        names[0] if not_finite else None,
        tuple(names),
        tuple(outliers),
        tuple(weights),
    )


def statistics(names):
    stat_of = lambda k: {  # noqa: E731
        "count": jnp.array(4),
        "sum_of_absmax": jnp.array([[4.0 * (k + 1)]]),
        "max_of_absmax": jnp.array([[3.0 * (k + 1)]]),
    }
    return {name: {"dot_general0_lhs": stat_of(k)} for k, name in enumerate(names)}


def everything(names, title="Report"):
    return render(
        plan=make_plan(names),
        comparison=make_comparison(names, not_finite=3),
        stats=statistics(names),
        curve=[(name, 1000 * (k + 1), 0.9 + 0.01 * k) for k, name in enumerate(names)],
        title=title,
    )


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self):
        super().__init__()
        self.tags, self.words, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


NAMES = ["encoder/up", "encoder/down", "head"]


def test_every_section_and_number_is_there():
    reader = read(everything(NAMES, "Digits"))
    words = " ".join(reader.words)
    for heading in (
        *("Summary", "Accuracy against bytes", "Error per Site", "Plan", "Weights, before and"),
        *("Outlier channels", "Activation ranges", "Made with"),
    ):
        assert heading in words
    for fact in ("7.00x", "14.6 dB", "60.0%", "encoder/up:dot_general0", "because encoder/up"):
        assert fact in words, fact
    assert "NaN or infinity first appears at encoder/up." in words
    assert "layer 0 of 3: 12.0" in words  # the worst layer in words, beside its picture
    assert re.search(r"native kernels|no native", words) and "fewbit" in words


def test_nothing_is_fetched_and_only_our_script_may_run():
    page = everything(NAMES)
    reader = read(page)
    assert "http:" not in page and "https:" not in page and "@import" not in page
    assert not re.search(r"url\(|src=", page)
    names = [tag for tag, _ in reader.tags]
    assert names.count("script") == names.count("style") == 1
    assert not {"img", "link", "iframe", "object", "form"} & set(names)
    policy = next(a["content"] for _, a in reader.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert "script-src 'unsafe-inline'" not in policy


def structure(page):
    return [tag for tag, _ in read(page).tags]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name):
    names = [name, "b", name + "c"]
    page = everything(names, name)
    assert structure(page) == structure(everything(["a", "b", "c"], "a"))
    for _, attributes in read(page).tags:
        assert not any(key.startswith("on") for key in attributes)
        assert not attributes.get("href", "#").startswith("java")
    page.encode("utf-8")


@settings(deadline=None, max_examples=12)
@given(st.text(min_size=1, max_size=30))
@example("a<b>")
def test_no_name_at_all_changes_the_structure(name):
    names = [f"x{name}", "b", f"y{name}"]
    assert structure(everything(names, name)) == structure(everything(["a", "b", "c"], "a"))


def test_it_can_be_used_without_eyes():
    reader = read(everything(NAMES))
    assert ("html", {"lang": "en"}) in reader.tags
    tables = [a for tag, a in reader.tags if tag == "table"]
    captions = [tag for tag, _ in reader.tags if tag == "caption"]
    assert len(captions) == len(tables) == 5
    assert all(a.get("scope") in ("col", "row") for tag, a in reader.tags if tag == "th")
    pictures = [a for tag, a in reader.tags if tag == "svg"]
    ids = {a["id"] for _, a in reader.tags if "id" in a}
    assert len(pictures) == 4
    assert all(a["role"] == "img" and a["aria-labelledby"] in ids for a in pictures)
    assert len(ids) == sum("id" in a for _, a in reader.tags)  # each once


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_both_themes():
    """WCAG AA: 4.5 for text, 3 for what charts are drawn with."""
    style = (pathlib.Path(__file__).parents[2] / "fewbit/debug/page/page.css").read_text()
    themes = re.findall(r"color-scheme: (\w+);(.*?)\}", style, re.DOTALL)
    assert [name for name, _ in themes] == ["light", "dark", "dark"]
    for _, body in themes:
        colour = dict(re.findall(r"--(\w+): (#\w{6})", body))
        for ground in ("page", "card", "faint"):
            for ink in ("ink", "soft", "accent", "bad"):
                assert contrast(colour[ink], colour[ground]) >= 4.5, (ink, ground)
        for drawn in ("after", "second"):
            assert contrast(colour[drawn], colour["faint"]) >= 3, drawn
    assert themes[1][1].split() == themes[2][1].split()


def test_parts_may_be_left_out():
    only = read(render(curve=[("int8", 100, 0.9)]))
    assert "Accuracy against bytes" in " ".join(only.words)
    assert "Plan" not in only.words
    plan = " ".join(read(render(plan=make_plan(NAMES))).words)
    assert "Error per Site" not in plan and "encoder/up" in plan
    empty = Comparison((), OutputError(float("inf"), 1.0, 0.0))
    assert "exact" in " ".join(read(render(comparison=empty)).words)


def test_points_that_nothing_beats():
    points = [("a", 10, 0.9), ("b", 5, 0.8), ("c", 20, 0.85), ("d", 10, 0.7), ("e", 40, 0.95)]
    slow = [p for p in points if not any(o[1] <= p[1] and o[2] >= p[2] and o != p for o in points)]
    assert frontier(points) == sorted(slow, key=lambda p: p[1])


def test_errors_of_the_report(tmp_path):
    cases = (
        (dict(), ValueError, "A report needs something to show"),
        (dict(plan="plan"), TypeError, "plan= takes a Plan, from fewbit.plan.*got the string"),
        (dict(comparison=3), TypeError, "comparison= takes a Comparison, from fewbit.debug"),
        (dict(stats=[1]), TypeError, "stats= takes the statistics that calibration made"),
        (dict(stats={"a": {"b": 1}}), TypeError, "stats= takes the statistics"),
        (dict(curve=[("int8", 0, 0.9)]), ValueError, "curve= takes points .label, bytes, accu"),
        (dict(curve=[("int8", 10, float("nan"))]), ValueError, "curve= takes points"),
        (dict(curve=["int8"]), ValueError, "curve= takes points"),
    )
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            html_report(tmp_path / "r.html", **arguments)
    assert not list(tmp_path.iterdir())


def test_it_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    assert html_report(target, plan=make_plan(NAMES)) == target
    before = target.read_bytes()
    assert before.startswith(b"<!doctype html>") and before.endswith(b"</html>\n")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="cannot be written to .*: No space left on device. Nothing"):
        html_report(target, plan=make_plan(NAMES[:1]))
    monkeypatch.undo()
    assert target.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(IsADirectoryError, match="Is a directory. Nothing was changed there"):
        html_report(tmp_path, plan=make_plan(NAMES))
    with pytest.raises(FileNotFoundError, match="cannot be written to .*No such file"):
        html_report(tmp_path / "missing" / "r.html", plan=make_plan(NAMES))
