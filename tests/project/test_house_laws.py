"""The laws of the house: packages have ranks, imports go down, a name is one thing, budgets hold.

What is still otherwise is written down in `house.py`, exactly: what is not needed any more has to
go from there too.
"""

import ast
import collections
import functools

import pytest
from house import BUDGETS, FACE, GROUND, ON_DEMAND, RANKS, TWICE, UPHILL
from test_laws import FILES, PACKAGE, imports, relative

LONGEST, NEWLINE = 600, "\n"
LISTS = sorted(PACKAGE.rglob("*.pyi"))  # faces whose names are loaded when first used
MODULES = {relative(path).removesuffix(".py") for path in FILES}


def module_of(path):
    return relative(path).removesuffix(".pyi").removesuffix(".py")


def package_of(module):
    """The package that a module belongs to, 'face', or None for one without a place."""
    first = module.split("/")[0]
    if module in (*FACE, *(f"{name}/__init__" for name in FACE)):
        return "face"
    if module == GROUND:
        return GROUND
    return first if "/" in module and first in RANKS else None


def rank(package):
    return {GROUND: -1, "face": len(RANKS)}.get(package) or RANKS.index(package)


@functools.cache
def homes(module):
    """{name: room} of a package's face."""
    listed = PACKAGE / f"{module}.pyi"
    text = (listed if listed.exists() else PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    found = {}
    for line in ast.parse(text).body:
        if isinstance(line, ast.ImportFrom) and str(line.module).startswith("fewbit"):
            for alias in line.names:
                full = "/".join(f"{line.module}.{alias.name}".split(".")[1:])
                room = full if full in MODULES else full.rpartition("/")[0]
                found[alias.asname or alias.name] = room
    return found


@functools.cache
def all_imports(source, path):
    return list(imports(source, path))


@functools.cache
def imported(source, path):
    """(line, module, room) of every import of fewbit; the room is where a face has a name from."""
    return list(_imported(source, path))


def _imported(source, path):
    for line, name in all_imports(source, path):
        parts = name.split(".")
        if parts[0] != "fewbit":
            continue
        for end in range(len(parts), 0, -1):
            found = "/".join(parts[1:end])
            hits = [m for m in (found, f"{found}/__init__".lstrip("/")) if m in MODULES]
            if hits:
                names = parts[end:]
                is_face = hits[0].endswith("__init__") and names
                yield line, hits[0], homes(hits[0]).get(names[0], hits[0]) if is_face else hits[0]
                break


def uphill(source, path):
    """{(package, higher package): {'module -> module', ...}} of one file."""
    module, found = module_of(path), collections.defaultdict(set)
    own = package_of(module)
    for _, _, room in imported(source, path):
        other = package_of(room)
        places = own is not None and other not in (None, own, "face")
        if places and rank(other) > rank(own):
            found[own, other].add(f"{module} -> {room.removesuffix('/__init__')}")
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


def door_faults(sources):
    """Imports of another package's rooms: only its face is for others."""
    return [
        f"{relative(path)}:{line}: {module} is a room; take it from the face of its package"
        for path, source in sources.items()
        for line, module, _ in imported(source, path)
        if package_of(module_of(path)) not in ("face", package_of(module))
        and package_of(module) not in ("face", GROUND)
        and "/" in module.removesuffix("/__init__")
    ]


@functools.cache
def hiding(source, path):
    """Functions of one file that import fewbit."""
    kinds, ways = ast.FunctionDef | ast.AsyncFunctionDef, ast.Import | ast.ImportFrom | ast.Call
    lines = {line for line, _, _ in imported(source, path)}
    return [
        f"{module_of(path)}.{function.name}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, kinds)
        and any(isinstance(node, ways) and node.lineno in lines for node in ast.walk(function))
    ]


def hidden_faults(sources):
    """Imports of fewbit inside functions hide a cycle; some load a part that few need."""
    found = {name for path, source in sources.items() for name in hiding(source, path)}
    known = set(ON_DEMAND.split())
    return [f"{name}: imports fewbit inside a function" for name in sorted(found - known)] + [
        f"{name}: take it from ON_DEMAND of house.py" for name in sorted(known - found)
    ]


def cycles(graph):
    """The groups of two and more nodes that lead to each other."""
    order, low, stack, groups = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for node in graph:
        if node not in order:
            visit(node)
    return sorted(groups)


def cycle_faults(sources):
    """Files that import each other, at once or over others."""
    graph, own = {}, []
    for path, source in sources.items():
        here = module_of(path)
        if path.name.startswith("__init__"):
            continue
        found = imported(source, path)
        graph[here] = {
            room for _, _, room in found if package_of(room) != "face" or package_of(here) == "face"
        } - {here}
        face = f"{package_of(here)}/__init__"
        own += [f"{here}: a cycle over {face}" for _, _, room in found if room == face != here]
    return own + [f"a cycle: {', '.join(group)}" for group in cycles(graph)]


def place_faults(sources):
    """Modules that belong to no package."""
    return [
        f"{relative(path)}: no package has it; move it into one"
        for path in sources
        if package_of(module_of(path)) is None
    ]


def face_faults(sources):
    """Imports from fewbit's own face, which is for users."""
    return [
        f"{relative(path)}:{line}: import the module it is in, not fewbit's face"
        for path, source in sources.items()
        if package_of(module_of(path)) not in ("face", "cli")  # the command line is a user
        for line, target, _ in imported(source, path)
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


def length_faults(sources):
    """Files in which nobody finds anything."""
    return [
        f"{relative(path)}: {source.count(NEWLINE)} lines, {LONGEST} at most"
        for path, source in sources.items()
        if source.count(NEWLINE) > LONGEST
    ]


def leak_faults(sources):
    """What a face shows because it needs it itself: only what is given a name there is public."""
    return [
        f"{relative(path)}:{node.lineno}: {alias.name} is public by accident; import it as _..."
        for path, source in sources.items()
        if path.name == "__init__.py" and package_of(module_of(path)) not in ("face", "cli")
        for node in ast.parse(source).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname is None
    ]


def stranger_faults(sources):
    """Ways to find the nearest name besides `nearest()`."""
    return [
        f"{relative(path)}:{line}: take fewbit._util.nearest"
        for path, source in sources.items()
        for line, name in all_imports(source, path)
        if name.split(".")[0] == "difflib" and relative(path) != "_util/_names.py"
    ]


LAWS = [
    *(uphill_faults, door_faults, hidden_faults, cycle_faults, place_faults, face_faults),
    *(name_faults, budget_faults, length_faults, leak_faults, stranger_faults),
]
LIBRARY = {path: path.read_text(encoding="utf-8") for path in [*FILES, *LISTS]}


@pytest.mark.parametrize("law", LAWS)
def test_laws_hold(law):
    assert not law(LIBRARY), "\n".join(law(LIBRARY))


def test_every_budget_is_of_something_that_is_there():
    assert set(BUDGETS) == {package_of(module_of(path)) for path in LIBRARY} - {GROUND}


def test_the_flat_folder_holds_only_the_face():
    assert {path.stem for path in PACKAGE.glob("*.py")} <= {*FACE, GROUND}


# Each law is shown to bite: (law, file, a line that is added there, a piece of the complaint).
BITES = [
    (uphill_faults, "numerics/_a.py", "from fewbit import qarray", "numerics may not import qar"),
    (uphill_faults, "numerics/_a.py", "def f():\n    import fewbit.ops._dot", "import ops"),
    (uphill_faults, "ops/_take.py", "from ..tracing import Eqn", "ops may not import tracing"),
    (uphill_faults, "ops/_take.py", "import importlib\nimportlib.import_module('fewbit.io')", "io"),
    (
        uphill_faults,
        "tracing/_sites.py",
        "from fewbit.planning import Plan",
        "tracing/_sites -> planning/_plan: tracing",
    ),
    (uphill_faults, "interpreter/_site.py", None, "take it from UPHILL"),
    (door_faults, "ops/_take.py", "from fewbit.qarray._type import QArray", "_type is a room"),
    (door_faults, "keras/_quantize.py", "import fewbit.io.checkpoint._load", "_load is a room"),
    (door_faults, "io/_errors.py", "from fewbit.models.function import plan", "function is a room"),
    (
        door_faults,
        "debug/_mixed.py",
        "from fewbit.io import checkpoint",
        "checkpoint/__init__ is a",
    ),
    (door_faults, "keras/_quantize.py", "from fewbit.keras._planning import print_model", None),
    (hidden_faults, "ops/_take.py", "def f():\n    from fewbit.qarray import QArray", "_take.f"),
    (hidden_faults, "__init__.py", None, "take it from ON_DEMAND"),
    (cycle_faults, "qarray/_how.py", "from fewbit.qarray import QArray", "a cycle: qarray/_how"),
    (place_faults, "surprise.py", "", "surprise.py: no package has it"),
    (face_faults, "ops/_take.py", "from fewbit import quantize", "not fewbit's face"),
    (name_faults, "ops/_take.py", "def quantize_model(): ...", "given 3 times, 2 in TWICE"),
    (name_faults, "ops/_take.py", "class FORMATS: ...\ndef take(): ...", None),
    (name_faults, "ops/_dot.py", "class Site: ...", "Site: given 2 times, 1 in TWICE"),
    (name_faults, "keras/_quantize.py", None, "plan: given 5 times, 6 in TWICE"),
    (budget_faults, "ops/_take.py", "\n" * 1000, "ops: "),
    (length_faults, "ops/_take.py", "\n" * 600, "ops/_take.py: "),
    (leak_faults, "io/__init__.py", "from fewbit._util import face", "face is public by accident"),
    (stranger_faults, "ops/_take.py", "from difflib import get_close_matches", "nearest"),
    (
        cycle_faults,
        "ops/_take.py",
        "from fewbit import ops",
        "ops/_take: a cycle over ops/__init__",
    ),
    (hidden_faults, "ops/_take.py", "def f():\n    import_module('fewbit.io')", "_take.f"),
    (uphill_faults, "training/__init__.pyi", "from fewbit.io import load as load", "training may"),
    (door_faults, "training/__init__.pyi", "from fewbit.ops._dot import dot as dot", "is a room"),
    (uphill_faults, "qarray/_how.py", "if TYPE_CHECKING:\n    from fewbit import models", None),
    (uphill_faults, "ops/_take.py", "from fewbit.qarray import QArray\nfrom . import _dot", None),
]


@pytest.mark.parametrize(("law", "file", "line", "complaint"), BITES)
def test_laws_bite(law, file, line, complaint):
    path = PACKAGE / file
    source = "" if line is None else f"{LIBRARY.get(path, '')}\n{line}\n"
    faults = law(LIBRARY | {path: source})
    found = not faults if complaint is None else any(complaint in fault for fault in faults)
    assert found, faults
