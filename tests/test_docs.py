"""The Python in README.md and docs/ runs, and prints what the page says it prints."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from tolerances import PRINTED_ERROR

from fewbit.numerics import FORMATS, bits_per_weight

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
FORMATS_PAGE = (ROOT / "docs/formats.md").read_text()
NUMBER = re.compile(r"\d+\.\d+")
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text())


def promotion(page, code):
    """Keras relies on JAX's ordinary promotion."""
    return jax.numpy_rank_promotion("allow" if "keras" in page + code else "raise")


def assert_printed(found, expected):
    """The same lines; where XLA was told not to optimize, measured errors may differ a little."""
    found, expected = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (found, expected)
    )
    if "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", ""):
        numbers = [[float(n) for n in NUMBER.findall("\n".join(t))] for t in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=PRINTED_ERROR)
        found, expected = ([NUMBER.sub("#", line) for line in text] for text in (found, expected))
    assert found == expected


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)])
def test_code_on_the_page_runs_and_prints_what_it_says(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    if "keras" in sys.modules:
        sys.modules["keras"].utils.clear_session()  # a reader's names start at 'dense'
    namespace = {"__name__": "__main__"}
    for code, expected in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), promotion(page, code):
            exec(compile(code, page, "exec"), namespace)
        if expected:
            assert_printed(printed.getvalue(), expected)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_table_of_formats_is_the_library_s():
    pattern = r"^\| `(\w+)` \| (\d+) \| `(\w+)` \|.*\| ([\d.]+)[^|]*\|$"
    rows = re.findall(pattern, FORMATS_PAGE, re.M)
    groups = {name: row.tile or 32 for name, row in FORMATS.items()}
    assert rows == [
        (name, str(row.bits), str(row.storage), f"{bits_per_weight(name, groups[name]):g}")
        for name, row in FORMATS.items()
    ]


@pytest.mark.long
def test_the_site_is_built_without_settings_of_ones_own():
    """`make docs`, where no Keras backend has been chosen."""
    settings = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        ["make", "docs"], cwd=ROOT, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"docs/_site: \d+ pages, \d+ modules", done.stdout)
    api = ROOT / "docs/_site/api"
    assert 'id="quantize_model"' in (api / "fewbit.html").read_text()
    assert 'id="compare"' in (api / "fewbit/debug.html").read_text()
    assert not list(api.rglob("_*.html"))
