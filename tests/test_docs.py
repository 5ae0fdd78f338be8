"""The Python in README.md and docs/ runs, and prints what the page says it prints."""

import contextlib
import io
import pathlib
import re
import sys

import jax
import pytest

from fewbit.numerics import FORMATS, bits_per_weight

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
FORMATS_PAGE = (ROOT / "docs/formats.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text())


def promotion(page, code):
    """Keras relies on JAX's ordinary promotion."""
    return jax.numpy_rank_promotion("allow" if "keras" in page + code else "raise")


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
            lines = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
            assert lines == [line.rstrip() for line in expected.rstrip().splitlines()]


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
