"""The laws of the house: packages have ranks, imports go down, a name is one thing, budgets hold.

What is still otherwise is written down in `house.py`, exactly: what is not needed any more has to
go from there too.
"""

import ast
import collections
import functools

import pytest
from house import BUDGETS, FACE, GROUND, HOMES, RANKS, TWICE, UPHILL
from test_laws import FILES, PACKAGE, imports, relative

MODULES = {relative(path).removesuffix(".py") for path in FILES}
MOVES = dict(line.split() for line in HOMES.strip().splitlines())
HOME = {module: home.split("/")[0] for module, home in MOVES.items()}


def module_of(path):
    return relative(path).removesuffix(".py")


def package_of(module):
    """The package that a module belongs to, 'face', or None for one without a place."""
    first = module.split("/")[0]
    if module in (*FACE, *(f"{name}/__init__" for name in FACE)):
        return "face"
    if module == GROUND:
        return GROUND
    return HOME.get(module) or (first if "/" in module and first in RANKS else None)


def rank(package):
    return {GROUND: -1, "face": len(RANKS)}.get(package) or RANKS.index(package)


@functools.cache
def imported(source, path):
    """(line, module) of every import of fewbit."""
    return list(_imported(source, path))


def _imported(source, path):
    for line, name in imports(source, path):
        parts = name.split(".")
        if parts[0] != "fewbit":
            continue
        for end in range(len(parts), 0, -1):
            found = "/".join(parts[1:end])
            hits = [m for m in (found, f"{found}/__init__".lstrip("/")) if m in MODULES]
            if hits:
                yield line, hits[0]
                break


def uphill(source, path):
    """{(package, higher package): {'module -> module', ...}} of one file."""
    module, found = module_of(path), collections.defaultdict(set)
    own = package_of(module)
    for _, target in imported(source, path):
        other = package_of(target)
        places = own is not None and other not in (None, own, "face")
        if places and rank(other) > rank(own):
            found[own, other].add(f"{module} -> {target.removesuffix('/__init__')}")
    return found


def allowed():
    lines = {packages: text.strip().splitlines() for packages, text in UPHILL.items()}
    return {packages: {line.strip() for line in found} for packages, found in lines.items()}


def uphill_faults(sources):
    """Imports that go up and are not on the list, and those on the list that nobody needs."""
    found = collections.defaultdict(set)
    for path, source in sources.items():
        for packages, edges in uphill(source, path).items():
            found[packages] |= edges
    faults = []
    for packages in sorted({*found, *allowed()}):
        may, does = allowed().get(packages, set()), found.get(packages, set())
        here, above = packages
        faults += [f"{edge}: {here} may not import {above}, above it" for edge in does - may]
        faults += [f"{edge}: take it from UPHILL of house.py" for edge in may - does]
    return faults


def place_faults(sources):
    """Modules that belong to no package."""
    return [
        f"{relative(path)}: no package has it; move it into one, or give it a home in house.py"
        for path in sources
        if package_of(module_of(path)) is None
    ]


def face_faults(sources):
    """Imports from fewbit's own face, which is for users."""
    return [
        f"{relative(path)}:{line}: import the module it is in, not fewbit's face"
        for path, source in sources.items()
        if package_of(module_of(path)) not in ("face", "cli")  # the command line is a user
        for line, target in imported(source, path)
        if target == "__init__"
    ]


@functools.cache
def public_definitions(source):
    kinds = ast.ClassDef | ast.FunctionDef
    names = [node.name for node in ast.parse(source).body if isinstance(node, kinds)]
    return {name for name in names if not name.startswith("_")}


def name_faults(sources):
    """Names given to more, or to fewer, public functions and classes than the list says."""
    given = collections.Counter()
    for source in sources.values():
        given.update(public_definitions(source))
    known = {name: int(count) for name, count in (word.split(":") for word in TWICE.split())}
    found = {name: count for name, count in given.items() if count > 1}
    return [
        f"{name}: given {found.get(name, 1)} times, {known.get(name, 1)} in TWICE of house.py"
        for name in sorted({*known, *found})
        if known.get(name, 1) != found.get(name, 1)
    ]


def budget_faults(sources):
    """Packages that are larger than planned."""
    lines = collections.Counter()
    for path, source in sources.items():
        lines[package_of(module_of(path))] += source.count("\n")
    return [
        f"{package}: {count} lines, {BUDGETS.get(package, 0)} in BUDGETS of house.py"
        for package, count in lines.items()
        if package not in (None, GROUND) and count > BUDGETS.get(package, 0)
    ]


LAWS = [uphill_faults, place_faults, face_faults, name_faults, budget_faults]
LIBRARY = {path: path.read_text(encoding="utf-8") for path in FILES}


@pytest.mark.parametrize("law", LAWS)
def test_laws_hold(law):
    assert not law(LIBRARY), "\n".join(law(LIBRARY))


def test_every_home_and_every_budget_is_of_something_that_is_there():
    assert set(MOVES) <= MODULES
    assert len(set(MOVES.values())) == len(MOVES) == len(HOMES.strip().splitlines())
    assert set(HOME.values()) <= {*RANKS, "_absent", *FACE}
    assert set(BUDGETS) <= {*RANKS, "face"}


# Each law is shown to bite: (law, file, a line that is added there, a piece of the complaint).
BITES = [
    (uphill_faults, "numerics.py", "from fewbit import qarray", "numerics may not import qarray"),
    (uphill_faults, "numerics.py", "def f():\n    import fewbit.ops.dot_general", "import ops"),
    (uphill_faults, "ops/take.py", "from ..jaxprs import Form", "ops may not import tracing"),
    (uphill_faults, "ops/take.py", "import importlib\nimportlib.import_module('fewbit.io')", "io"),
    (
        uphill_faults,
        "trace.py",
        "from fewbit.planner import make_plan",
        "trace -> planner: tracing",
    ),
    (uphill_faults, "trace.py", None, "trace -> _plan: take it from UPHILL"),
    (place_faults, "surprise.py", "", "surprise.py: no package has it"),
    (face_faults, "ops/take.py", "from fewbit import quantize", "not fewbit's face"),
    (name_faults, "ops/take.py", "def quantize_model(): ...", "given 3 times, 2 in TWICE"),
    (name_faults, "ops/take.py", "class FORMATS: ...\ndef take(): ...", None),
    (name_faults, "ops/dot_general.py", "class Site: ...", "Site: given 2 times, 1 in TWICE"),
    (name_faults, "keras/_quantize.py", None, "plan: given 5 times, 6 in TWICE"),
    (budget_faults, "ops/take.py", "\n" * 1000, "ops: "),
    (uphill_faults, "qarray.py", "if TYPE_CHECKING:\n    from fewbit import modes", None),
    (uphill_faults, "ops/take.py", "from fewbit.qarray import QArray\nfrom . import scaling", None),
]


@pytest.mark.parametrize(("law", "file", "line", "complaint"), BITES)
def test_laws_bite(law, file, line, complaint):
    path = PACKAGE / file
    source = "" if line is None else f"{LIBRARY.get(path, '')}\n{line}\n"
    faults = law(LIBRARY | {path: source})
    found = not faults if complaint is None else any(complaint in fault for fault in faults)
    assert found, faults
