"""Nothing compiled is left out of `make test-sanitized`: sources, programs, test files."""

import os
import pathlib
import re
import subprocess

import pytest

from fewbit.kernels import _library

ROOT = pathlib.Path(__file__).parents[2]
NATIVE = ROOT / "fewbit" / "native"
NATIVE_TESTS = ROOT / "tests" / "native"

# Test files that need the native part and do not run under sanitizers, with the reason.
ELSEWHERE = {
    "tests/kernels/test_backend.py": "which backend is chosen and what export says; no kernels",
    "tests/keras/test_keras_memory.py": "measures resident memory, which sanitizers multiply",
    "tests/util/test_settings.py": "which library is opened and refused; no kernel runs",
    "tests/kernels/test_storing.py": "the bytes that kernels read, which XLA packs; no kernel runs",
}


@pytest.fixture(scope="module")
def recipe():
    """What `make test-sanitized` would run."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "test-sanitized"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def names(suffix, text):
    return set(re.findall(rf"[\w/]+{re.escape(suffix)}\b", text))


def test_every_source_is_in_a_target_that_gets_the_sanitizers():
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    targets = re.findall(r"(?:add_library|target_sources)\((\w+)([^)]*)\)", text)
    assert {name for name, _ in targets} == {"fewbit_kernels", "fewbit_native"}
    compiled = set().union(*(names(".cc", sources) for _, sources in targets))
    assert compiled == {path.relative_to(ROOT).as_posix() for path in NATIVE.rglob("*.cc")}
    assert "set(fewbit_targets fewbit_kernels fewbit_native)" in text


def test_every_program_is_built_and_run(recipe):
    programs = {path.stem for path in NATIVE_TESTS.glob("*_test.cc")}
    text = (NATIVE_TESTS / "CMakeLists.txt").read_text(encoding="utf-8")
    assert set(re.search(r"set\(test_programs ([^)]*)\)", text)[1].split()) == programs
    assert programs == {name.rpartition("/")[2] for name in names("_test", recipe)}


def test_every_unit_of_an_instruction_set_is_emulated_where_the_cpu_lacks_it():
    text = (NATIVE_TESTS / "CMakeLists.txt").read_text(encoding="utf-8")
    paths = list(NATIVE.rglob("*avx512.cc"))
    units = {path.relative_to(NATIVE).with_suffix("").as_posix() for path in paths}
    assert set(re.search(r"foreach\(unit ([^)]*)\)", text)[1].split()) == units
    for path in paths:
        assert "FEWBIT_EMULATE_AVX512" in path.read_text(encoding="utf-8"), path.name


def test_every_test_file_that_needs_the_native_part_runs_under_sanitizers(recipe):
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    texts = {path.relative_to(ROOT).as_posix(): text for path, text in files.items()}
    needing = {name for name, text in texts.items() if "\n@needs_native" in text}
    run = names(".py", recipe)
    assert needing - run == set(ELSEWHERE) & needing
    assert not run & set(ELSEWHERE)
    assert all((ROOT / name).exists() for name in run | set(ELSEWHERE))


def test_every_function_of_the_library_is_called_by_them(recipe):
    """By its own name, or through the module of fewbit.kernels that calls it."""
    callers = {
        name: [
            path.stem
            for path in (ROOT / "fewbit" / "kernels").glob("*.py")
            if f'"{name}"' in path.read_text(encoding="utf-8") and path.stem != "_library"
        ]
        for name in _library.FUNCTIONS
    }
    assert all(callers.values()), callers
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in names(".py", recipe))
    for name, modules in callers.items():
        words = [name.removeprefix("fewbit_"), *modules]
        assert any(re.search(rf"\b{word}\b", text) for word in words), name
