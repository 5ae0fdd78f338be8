"""Environment variables and versions: what cannot be followed is told; tables are the code's."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from fewbit import kernels
from fewbit._util import _versions
from fewbit.cli._commands import settings

ROOT = pathlib.Path(__file__).parents[2]
PRODUCT = """
import jax.numpy as jnp, fewbit
rules = [fewbit.QuantizationRule(weight_qtype='int8')]
f, params = lambda p, x: x @ p['w'], {'w': jnp.eye(64)}
try:
    print('plan', fewbit.plan(f, rules, params, jnp.ones((1, 64))).sites[0].runs_on)
except ValueError as error:
    print('error', error)
"""


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


needs_native = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)


@needs_native
def test_a_mistyped_instruction_set_is_an_error_at_the_first_product():
    out = python(PRODUCT, FEWBIT_ISA="avx3").stdout
    assert out.startswith(
        "error FEWBIT_ISA is 'avx3', which is no instruction set that fewbit knows"
    )
    assert "(avx512_vnni, avx2, portable); use one of those that this CPU has (" in out
    assert out.rstrip().endswith("portable), or unset it")


@needs_native
def test_a_mistyped_instruction_set_does_not_matter_to_xla():
    out = python(PRODUCT, FEWBIT_ISA="avx3", FEWBIT_BACKEND="xla").stdout
    assert out.startswith("plan xla")


def test_a_mistyped_backend_is_an_error_at_the_first_product():
    out = python(PRODUCT, FEWBIT_BACKEND="nativ").stdout
    assert "FEWBIT_BACKEND asks for the backend 'nativ', which is not known; did you mean" in out


def test_a_library_that_is_named_and_not_there_is_told_once(tmp_path):
    done = python(PRODUCT, FEWBIT_NATIVE_LIBRARY=str(tmp_path / "no.so"))
    assert done.stdout.startswith("plan xla")
    assert done.stderr.count("RuntimeWarning: The native kernels are not used") == 1
    assert "which is not a file; correct or unset it." in done.stderr
    quiet = python(PRODUCT, FEWBIT_NATIVE_LIBRARY="")
    assert quiet.stdout.startswith("plan xla") and "not used" not in quiet.stderr


def test_a_switch_is_on_or_off(monkeypatch):
    from fewbit._util._text import Progress

    monkeypatch.setenv("FEWBIT_PROGRESS", "off")
    with pytest.raises(ValueError, match="FEWBIT_PROGRESS is 'off', and can be 0 or 1"):
        Progress("Working", 3)
    monkeypatch.setenv("FEWBIT_PROGRESS", "")
    Progress("Working", 3)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("FEWBIT_IAS", "did you mean FEWBIT_ISA?"),
        ("FEWBIT_isa", "did you mean FEWBIT_ISA?"),
        ("FEWBIT_NATIVE_LIB", "did you mean FEWBIT_NATIVE_LIBRARY?"),
        ("FEWBITBACKEND", "did you mean FEWBIT_BACKEND?"),
        ("FEWBIT_THREADS", "It reads FEWBIT_BACKEND, FEWBIT_ISA,"),
    ],
)
def test_a_variable_that_nobody_reads_is_named_with_the_nearest(name, nearest):
    lines = settings({name: "1", "FEWBIT_ISA": "avx2", "PATH": "/bin"})
    assert lines[0] == "FEWBIT_ISA=avx2" and len(lines) == 2
    assert (
        lines[1].startswith(f"{name} is set, but fewbit does not read it") and nearest in lines[1]
    )


def test_doctor_names_versions_and_settings():
    done = subprocess.run(
        [sys.executable, "-m", "fewbit", "doctor"],
        env={**os.environ, "FEWBIT_IAS": "avx2"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("FEWBIT_IAS") == 1 and "did you mean FEWBIT_ISA?" in done.stdout
    for name in _versions.TESTED:
        line = next(row for row in done.stdout.splitlines() if row.startswith(f"{name}:"))
        assert _versions.known_range(name) in line or "not installed" in line


def test_every_variable_that_is_read_is_in_the_table():
    readers = [*ROOT.glob("fewbit/**/*.py"), *ROOT.glob("fewbit/native/**/*.cc")]
    readers += [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("bench/*.py")]
    readers += [*ROOT.glob("tools/*.py")]
    reading = re.compile(r"(?:environ\.get\(|environ\[|getenv\(|VARIABLE = )\"(FEWBIT_\w+)")
    found = {name for path in readers for name in reading.findall(path.read_text("utf-8"))}
    assert {"FEWBIT_ISA", "FEWBIT_BACKEND", "FEWBIT_NATIVE_LIBRARY", "FEWBIT_DATA"} <= found
    assert not found - set(_versions.VARIABLES)
    assert not set(_versions.VARIABLES) - found - {"FEWBIT_PROGRESS", "FEWBIT_REQUIRE_NATIVE"}


def test_the_page_has_the_table_of_the_code():
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    rows = re.findall(r"^\| `(FEWBIT_\w+)` \| (.*) \| (.*) \| (.*) \|$", page, re.M)
    assert {name: tuple(rest) for name, *rest in rows} == _versions.VARIABLES


# --- versions -------------------------------------------------------------------------------------


def test_the_readme_has_the_table_of_the_code():
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("## Versions")[2].partition("## ")[0]
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", section, re.M)
    names = {name.replace("-", ""): _versions.known_range(name) for name in _versions.TESTED}
    assert {name.lower(): versions for name, versions in rows} == names


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("jax", "0.10.2", "0.10.2 (tested: 0.10.2 to 0.12.0.1)"),
        ("jax", "0.12.0.1", "0.12.0.1 (tested"),
        ("jax", "0.10.1", "0.10.1, older than what fewbit is tested with: 0.10.2 to 0.12.0.1"),
        ("jax", "0.12.1.dev20261001", "newer than what fewbit is tested with"),
        ("python", "3.13.5", "3.13.5 (tested: 3.11 to 3.13)"),
        ("python", "3.14.0rc1", "newer"),
        ("keras", "3.15.9", "3.15.9 (tested: 3.15.x)"),
        ("keras", "3.16.0", "newer"),
        ("keras-hub", None, "not installed"),
    ],
)
def test_a_version_is_judged_by_the_table(name, version, said):
    assert said in _versions.judged(name, version)
