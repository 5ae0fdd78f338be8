"""The Python in README.md and docs/ runs, and prints what the page says it prints."""

import collections
import contextlib
import doctest
import functools
import importlib
import importlib.util
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from house import RANKS
from tolerances import PRINTED_ERROR

from fewbit.numerics import FORMATS, bits_per_weight

ROOT = pathlib.Path(__file__).parents[2]
# Its blocks stand alone, and are run under Qwix too: test_from_qwix.py.
ONE_BY_ONE = "docs/from-qwix.md"
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


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p) and p != ONE_BY_ONE])
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


PATH = re.compile(
    r"(?<![\w/.-])((?:fewbit|tests|docs|bench|demo|examples|tools)/[\w./*-]*[\w*]|CMakeLists\.txt|Makefile)"
)
# Rooms are named from `fewbit/` on, and where that is clear by their file's name alone.
ROOM = re.compile(
    r"(?<![\w/.*<-])((?:\w+/)+\w+\.(?:pyi?|cc|h)|_[a-z]\w+\.py|test_\w+\.py|\w+\.svg)\b"
)
FOLDER = re.compile(rf"`((?:{'|'.join(RANKS)}|native)(?:/\w+)+)/?`")
DOTTED = re.compile(r"(?<![\w./-])fewbit(?:\.\w+)+")
# In what is quoted of a terminal, of a file, or of a name that is still to come.
NOT_HERE = {"fewbit.tmp", "fewbit.json", "fewbit.gptq"}
# What commands of the Makefile write.
MADE = {"tests/last-soak.txt", "tests/last-test-foreign.txt", "docs/_site"}


@functools.cache
def rooms():
    """Every file and folder, from the folders on that pages leave out, and every file's name."""
    found, names = set(), collections.Counter()
    for folder in ("fewbit", "tests", "docs"):
        for path in (ROOT / folder).rglob("*"):
            found.add(path.relative_to(ROOT / folder).as_posix())
            names[path.name] += path.is_file()
    return found | {name for name, count in names.items() if count == 1}


def lost_paths(text):
    """Paths in a text that are no file or folder, and names that are those of several files."""
    whole = set(PATH.findall(text))
    lost = [path for path in whole - MADE if not list(ROOT.glob(path.rstrip("/")))]
    return sorted([*lost, *({*ROOM.findall(text), *FOLDER.findall(text)} - whole - rooms())])


def stands_for(name):
    """What a dotted name is; AttributeError or ImportError if it is nothing."""
    found, parts = importlib.import_module("fewbit"), name.split(".")[1:]
    for k, part in enumerate(parts, 1):
        if inspect.ismodule(found) and not hasattr(found, part):
            found = importlib.import_module(".".join(["fewbit", *parts[:k]]))
        else:
            found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_every_path_and_every_dotted_name_is_there(page):
    text = (ROOT / page).read_text()
    assert not lost_paths(text)
    for name in set(DOTTED.findall(text)) - NOT_HERE:
        with promotion(page, "keras"):
            assert stands_for(name) is not None, f"{page}: there is no {name}"


def test_paths_and_names_that_are_not_there_are_found():
    assert PATH.findall("see `fewbit/qarray/_type.py`, bench/products.py.") == [
        "fewbit/qarray/_type.py",
        "bench/products.py",
    ]
    there = (
        "`docs/design.md`, `qarray/_type.py`, `_ptq.py`, `models/linen`, test_house.py, house.svg"
    )
    assert not lost_paths(there)
    gone = (
        "`docs/nothing.md`, `qarray/_gone.py`, `_quantize.py`, `models/gone`, [test_gone.py], a.svg"
    )
    assert lost_paths(gone) == [
        *("_quantize.py", "a.svg", "docs/nothing.md", "models/gone", "qarray/_gone.py"),
        "test_gone.py",
    ]
    assert DOTTED.findall("`fewbit.qarray.QArray` and fewbit.save(x)") == [
        "fewbit.qarray.QArray",
        "fewbit.save",
    ]
    for name in ("fewbit.qarray.nothing", "fewbit.nothing", "fewbit.Plan.nothing"):
        with pytest.raises((AttributeError, ImportError)):
            stands_for(name)


def test_the_house_is_counted_and_drawn():
    spec = importlib.util.spec_from_file_location("docs_house", ROOT / "docs/house.py")
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    assert doctest.testmod(house).failed == 0
    rows, weights = house.counted(house.sources())
    assert all(lines <= budget for _, lines, _, budget in rows.values())
    assert not house.circles()
    assert house.picture(rows, weights).count("stroke-dasharray") == len(house.UPHILL)


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
