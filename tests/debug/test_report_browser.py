"""The report in a real headless browser: it is seen, it works, it asks nobody for anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import Browser, find_browser
from flax import nnx
from test_report_page import HOSTILE, everything

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.debug import compare, html_report

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        find_browser() is None,
        reason="no chromium on PATH: install one (Debian: apt-get install chromium)",
    ),
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of a real model."""
    model = nnx.Sequential(
        nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(128, 10, rngs=nnx.Rngs(1))
    )
    x = jax.random.normal(jax.random.key(0), (32, 64))
    rules = [
        QuantizationRule(module_path="layers/2", weight_qtype="int8", act_qtype="int8"),
        QuantizationRule(weight_qtype="int4", act_qtype="int8"),
    ]
    plan = fewbit.plan(model, rules, x)
    small = fewbit.quantize_model(model, PtqProvider(rules), x)
    stat = {"count": 3, "sum_of_absmax": jnp.array([[9.0]]), "max_of_absmax": jnp.array([[4.0]])}
    path = tmp_path_factory.mktemp("report") / "report.html"
    return html_report(
        path,
        plan=plan,
        comparison=compare(model, small, x),
        stats={"layers": {"0": {"dot_general0_lhs": stat}}},
        curve=[("float32", 38_000, 0.98), ("int8", 9_700, 0.975), ("int4", 5_100, 0.93)],
    )


def url(path, state=""):
    return path.as_uri() + state


def share_drawn(picture):
    """Where the picture is not its ground."""
    picture = picture.astype(int)
    return np.abs(picture - np.median(picture.reshape(-1, 3), axis=0)).max(-1) > 40


ROWS = "Array.from(document.querySelectorAll('#plan-table tbody tr'))"


@pytest.mark.parametrize("width", [1000, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_seen_and_asks_for_nothing(browser, report, width, dark):
    browser.open(url(report), width, 700, dark)
    assert browser.requests == [url(report)]
    assert browser.complaints == []
    picture = browser.picture().astype(int)
    assert picture.shape == (700, width, 3)
    ground = np.median(picture.reshape(-1, 3), axis=0).mean()
    assert (ground < 60) == dark and (ground > 220) == (not dark)
    drawn = share_drawn(picture)
    assert 0.02 < drawn.mean() < 0.5  # neither blank nor full
    assert drawn[:350].any() and drawn[350:].any()
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50
    # A phone scrolls down, never sideways.
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_the_theme_can_be_switched(browser, report):
    browser.open(url(report), 400, 300)
    light = browser.picture().mean()
    assert browser.run("document.querySelector('.theme').textContent") == "Dark"
    browser.run("document.querySelector('.theme').click()")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert browser.run("location.hash") == "#theme=dark"
    assert browser.picture().mean() < light / 3
    browser.run("document.querySelector('.theme').click()")
    assert abs(browser.picture().mean() - light) < 3
    browser.open(
        url(report, "#theme=light"), 400, 300, dark=True
    )  # what was chosen wins over the system
    assert abs(browser.picture().mean() - light) < 3


def test_sorting_by_heading_and_by_address(browser, report):
    values = f"{ROWS}.map(row => Number(row.cells[6].dataset.value))"
    browser.open(url(report))
    press = "document.querySelector('#plan-table button[data-key=bytes]').click()"
    browser.run(press)
    rising = browser.run(values)
    assert rising == sorted(rising) and len(set(rising)) > 1
    heading = "document.querySelector('#plan-table th[aria-sort]')"
    assert browser.run(f"{heading}.getAttribute('aria-sort')") == "ascending"
    browser.run(press)
    assert browser.run(values) == rising[::-1]
    assert browser.run("location.hash") == "#sort=bytes&dir=desc"
    browser.open(url(report, "#sort=bytes&dir=desc"))
    assert browser.run(values) == rising[::-1]
    browser.run("document.querySelector('#plan-table button[data-key=module]').click()")
    names = browser.run(f"{ROWS}.map(row => row.cells[0].textContent)")
    assert names == ["layers/0", "layers/2"]


def test_filtering(browser, report):
    shown = f"{ROWS}.filter(row => row.offsetHeight > 0).map(row => row.cells[0].textContent)"
    browser.open(url(report, "#filter=layers%2F2"))
    assert browser.run(shown) == ["layers/2"]
    count = "document.querySelector('.count').textContent"
    assert browser.run(count) == "1 of 2"
    fill = "var box = document.querySelector('input[type=search]'); box.value = '{}'; "
    fill += "box.dispatchEvent(new Event('input'))"
    browser.run(fill.format("int4 LAYERS"))
    assert browser.run(shown) == ["layers/0"]
    browser.run(fill.format("nothing like it"))
    assert browser.run(shown) == [] and browser.run(count) == "0 of 2"
    browser.run(fill.format(""))
    assert len(browser.run(shown)) == 2 and browser.run("location.hash") == ""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_run_nothing(browser, tmp_path, name):
    path = tmp_path / "hostile.html"
    path.write_text(everything([name, "b", name + "c"], name), "utf-8")
    browser.open(url(path))
    assert browser.complaints == [] and browser.requests == [url(path)]
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.documentElement.dataset.ready") == "yes"


def test_these_checks_can_fail(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<title>x</title><img src='missing.png'><script>nonsense()</script>")
    browser.open(url(path))
    assert len(browser.requests) == 2 and browser.complaints
    assert share_drawn(browser.picture()).mean() < 0.02
