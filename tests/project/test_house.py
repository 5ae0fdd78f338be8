"""What stays as it is while the library is built anew inside: plans, programs, public names.

The goldens are in `golden/house/`. A change that is meant is written down by
`python tests/project/test_house.py`, once with each version of JAX that has programs there, in a
commit that says which and why.
"""

import collections
import contextlib
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import pathlib
import re
import sys

import jax
import pytest

import fewbit

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from house_cases import HOUSES

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "house"
BACKENDS = ("native", "xla")


@functools.cache
def made(name, backend):
    """(plan as JSON, text of the lowered program)."""
    with fewbit.kernels.backend(backend), settings(name):
        house = HOUSES[name]()
        return json.loads(house.plan.to_json()), jax.jit(house.run).lower(*house.args).as_text()


def settings(name):
    """Keras relies on JAX's ordinary promotion."""
    stack = contextlib.ExitStack()
    if name.startswith("keras"):
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
    return stack


def operations(text):
    """How often each operation stands in a program, native functions by their names."""
    found = re.findall(r"= \"?((?:stablehlo|chlo|func|sdy)\.\w+|call)\"?(?: @(fewbit\w+))?", text)
    return dict(sorted(collections.Counter(other or name for name, other in found).items()))


def fingerprint(text):
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "operations": operations(text)}


def versions_file():
    return GOLDEN / f"programs-jax-{jax.__version__}.json"


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def differences(golden, found):
    """The lines that differ of two values as JSON."""
    texts = [json.dumps(value, indent=1, sort_keys=True).splitlines() for value in (golden, found)]
    return "\n".join(difflib.unified_diff(*texts, "golden", "found", lineterm="", n=2))


def signature(value):
    """Names, kinds and defaults of parameters; how types are written differs between Pythons."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return type(value).__name__
    text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    # Not where a default lies: neither its address nor its module.
    return re.sub(r" at 0x\w+", "", re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text))


def described(value):
    if inspect.ismodule(value):
        return "module"
    if isinstance(value, dict):
        return sorted(value)
    if not isinstance(value, type):
        return signature(value) if callable(value) else repr(value)
    own = [vars(c) for c in value.__mro__ if c.__module__.startswith("fewbit")]
    members = {n for names in own for n in names if not n.startswith("_")}
    return {"": signature(value), **{n: described_member(value, n) for n in sorted(members)}}


def described_member(cls, name):
    value = inspect.getattr_static(cls, name)
    value = getattr(value, "__func__", value)
    return signature(value) if inspect.isroutine(value) else "attribute"


def public_names(face, names):
    module = importlib.import_module(face)
    return {n: described(getattr(module, n)) if hasattr(module, n) else "missing" for n in names}


@pytest.mark.parametrize("name", HOUSES)
def test_plans_stay(name):
    plan, _ = made(name, "native")
    golden = read(GOLDEN / f"{name}.json")
    assert plan == golden, differences(golden, plan)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HOUSES)
def test_programs_stay(name, backend):
    if not versions_file().exists():
        pytest.skip(f"no programs of JAX {jax.__version__} were written down")
    _, text = made(name, backend)
    golden, found = read(versions_file())[name][backend], fingerprint(text)
    assert golden == found, differences(golden, found) or "the same operations, other operands"


def test_public_names_stay():
    golden = read(GOLDEN / "names.json")
    found = {face: public_names(face, names) for face, names in golden.items()}
    assert found == golden, differences(golden, found)


def write():
    """Writes down how everything is now."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    programs = {}
    for name in HOUSES:
        programs[name] = {}
        for backend in BACKENDS:
            plan, text = made(name, backend)
            programs[name][backend] = fingerprint(text)
            if backend == "native":
                write_json(GOLDEN / f"{name}.json", plan)
    write_json(versions_file(), programs)
    names = read(GOLDEN / "names.json")
    write_json(GOLDEN / "names.json", {face: public_names(face, names[face]) for face in names})


def write_json(path, value):
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
