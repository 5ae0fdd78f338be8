"""Laws of docs/design.md: frameworks have their place, versions decide nothing, no patching."""

import ast
import fnmatch
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from fewbit.tracing._jaxprs import FORMS, OPTIONAL

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "fewbit"
FILES = sorted(PACKAGE.rglob("*.py"))

# Which files know a framework. Everything else speaks JAX alone.
FRAMEWORKS = {
    "flax": ["models/linen/*", "models/nnx/*", "models/_flax_*"],
    "keras": ["keras/*"],
    "keras_hub": ["keras/*"],
    "haiku": [],
    "equinox": [],
    "tensorflow": ["odml/*", "io/litert*"],
    "torch": [],
}
PATCHABLE = ("jax", "jaxlib", "flax", "keras", "keras_hub", "numpy", "optax")


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node):
    """Like ast.walk, without what only a type checker runs."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield from walk(child)


def imports(source, path):
    """(line, absolute dotted name) of every import, lazy ones inside functions too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def framework_faults(source, path):
    """Imports of a framework outside its own front end."""
    faults = []
    for line, name in imports(source, path):
        homes = FRAMEWORKS.get(name.split(".")[0])
        if homes is not None and not any(fnmatch.fnmatch(relative(path), h) for h in homes):
            faults.append(f"{relative(path)}:{line}: {name} belongs in {homes or 'no file'}")
    return faults


def root_name(node):
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def registers_own_primitive(target):
    """`ad.primitive_jvps[our_p] = rule`: JAX's tables are where a primitive of ours gets rules."""
    return (
        isinstance(target, ast.Subscript)
        and ast.unparse(target.value).split(".")[-1].startswith("primitive_")
        and isinstance(target.slice, ast.Name)
        and target.slice.id.endswith("_p")
    )


def patch_faults(source, path):
    """Private JAX, or writing into another library's modules and classes."""
    tree = ast.parse(source)
    foreign = set()
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{a.name}", a.asname or a.name) for a in node.names]
        else:
            continue
        for full, local in names:
            if full.split(".")[0] in PATCHABLE:
                foreign.add(local)
            if full.startswith("jax._src"):
                faults.append(f"{relative(path)}:{node.lineno}: imports {full}")
            if full.startswith("unittest.mock"):
                faults.append(f"{relative(path)}:{node.lineno}: imports {full}, a patching tool")
    for node in ast.walk(tree):
        where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
        written = []
        if isinstance(node, ast.Assign | ast.Delete):
            written = [t for target in node.targets for t in ast.walk(target)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            written = [node.target]
        for target in written:
            if registers_own_primitive(target):
                continue
            if isinstance(target, ast.Attribute | ast.Subscript) and root_name(target) in foreign:
                if isinstance(target.ctx, ast.Store | ast.Del):
                    faults.append(f"{where}: writes to {ast.unparse(target)}")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            setter = called in ("setattr", "delattr") and node.args
            if setter and root_name(node.args[0]) in foreign:
                faults.append(f"{where}: {ast.unparse(node)}")
            if called == "jax.config.update":
                faults.append(f"{where}: changes the user's JAX settings: {ast.unparse(node)}")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            faults.append(f"{where}: reads jax._src")
    return faults


# The one file that reads the params of a primitive with a body, and their names; the common words
# among them mean something else in other dictionaries.
READER = "tracing/_jaxprs.py"
BODY_PARAMS = {name for forms in FORMS.values() for form in forms.values() for name in form}
BODY_PARAMS = BODY_PARAMS.union(*OPTIONAL.values())
COMMON_WORDS = {"name", "mesh", "length", "reverse", "policy", "inline", "unroll", "bwd"}

# Where the version of another library is named, for a person to read or for a file's identity.
NAMES_VERSIONS = [
    *("_util/_versions.py", "cli/_commands.py", "tracing/_jaxprs.py"),
    *("kernels/_library.py", "debug/page/_page.py", "keras/saving/_format.py"),
    *("io/checkpoint/_manifest.py", "io/stream/_checkpoint.py"),
]
VERSION_FUNCTIONS = {"version", "versions_of", "installed", "is_known"}


def asked_key(node):
    """(dictionary, key) of `d["key"]`, `d.get("key")`, `d.pop("key")` and `"key" in d`."""
    if isinstance(node, ast.Subscript):
        return node.value, getattr(node.slice, "value", None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in ("get", "pop"):
            return node.func.value, getattr(node.args[0], "value", None)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return node.comparators[0], getattr(node.left, "value", None)
    return None, None


def reads_params(node):
    """Whether an expression is the params of an equation, or made of them."""
    named = isinstance(node, ast.Attribute) and node.attr == "params"
    return named or (isinstance(node, ast.Call) and ast.unparse(node).endswith(", 'params')"))


def assigned_from(tree, is_source):
    """Names that are given a value in which some node is a source."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            if any(map(is_source, ast.walk(node.value))):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                found |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return found


def body_param_faults(source, path):
    """Params of a primitive with a body, read anywhere but in the one reader.

    Their names may not even be written down elsewhere, but for those that are common words.
    """
    if relative(path) == READER:
        return []
    tree, faults = ast.parse(source), []
    from_params = assigned_from(tree, reads_params)
    for node in ast.walk(tree):
        where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in BODY_PARAMS - COMMON_WORDS:
                faults.append(f"{where}: {node.value!r} belongs in {READER}")
        holder, key = asked_key(node)
        if isinstance(key, str) and key in COMMON_WORDS & BODY_PARAMS:
            if ast.unparse(holder) in from_params or any(map(reads_params, ast.walk(holder))):
                faults.append(f"{where}: {ast.unparse(node)} belongs in {READER}")
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords} & (BODY_PARAMS - COMMON_WORDS)
            if names and ast.unparse(node.func).split(".")[-1] in ("dict", "bind", "replace"):
                faults.append(f"{where}: {names} belongs in {READER}")
        if isinstance(node, ast.Attribute) and node.attr in ("values", "items", "popitem"):
            if ast.unparse(node.value).endswith("eqn.params"):
                faults.append(f"{where}: {ast.unparse(node)} belongs in {READER}")
    return faults


def version_reader(tree):
    """A function that tells whether an expression asks for the version of another library."""
    attributes = ("__version__", "__version_info__")
    values, functions = set(), set(VERSION_FUNCTIONS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("fewbit"):
            for alias in node.names:
                if alias.name in attributes:
                    values.add(alias.asname or alias.name)
                if (node.module, alias.name) == ("importlib.metadata", "version"):
                    functions.add(alias.asname or alias.name)

    def reads(node):
        if isinstance(node, ast.Attribute) and node.attr in attributes:
            return root_name(node) != "fewbit"
        if isinstance(node, ast.Call):
            return ast.unparse(node.func).split(".")[-1] in functions
        return isinstance(node, ast.Name) and node.id in values

    return reads


def says_only(parent, node):
    """Whether a value goes on unchanged where it stands: into a text, a call, a dictionary."""
    if isinstance(parent, ast.Call):
        return node is not parent.func
    if isinstance(parent, ast.Dict):
        return node in parent.values
    kinds = ast.keyword | ast.FormattedValue | ast.Return | ast.Expr | ast.List | ast.Tuple
    return isinstance(parent, kinds | ast.Assign | ast.AnnAssign | ast.NamedExpr)


def version_faults(source, path):
    """Versions of other libraries, decided by anywhere, or named where nobody reads them."""
    tree, faults = ast.parse(source), []
    reads = version_reader(tree)
    read = [node for node in ast.walk(tree) if reads(node)]
    if not any(fnmatch.fnmatch(relative(path), name) for name in NAMES_VERSIONS):
        faults += [f"{relative(path)}:{n.lineno}: names a version: {ast.unparse(n)}" for n in read]
    if relative(path) == "_util/_versions.py":
        return faults  # it compares in order to say so
    holds = assigned_from(tree, reads)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def is_version(node):
        held = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in holds
        return held or reads(node)

    for node in ast.walk(tree):
        asked = node if isinstance(node, ast.Compare) else getattr(node, "test", None)
        asked = node.subject if isinstance(node, ast.Match) else asked
        decides = asked is not None and any(map(is_version, ast.walk(asked)))
        if decides or (is_version(node) and not says_only(parents[node], node)):
            faults.append(f"{relative(path)}:{node.lineno}: decides by a version")
    return faults


VERSIONED = ("jax", "jaxlib", "flax")


def probe_faults(source, path):
    """Asking JAX or Flax what they have is deciding by their version under another name."""
    tree, faults, theirs = ast.parse(source), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(str(node.module), alias.asname or alias.name) for alias in node.names]
        else:
            continue
        # Of classes people make objects, which may have what they want; modules have versions.
        theirs |= {n.split(".")[0] for full, n in found if full.split(".")[0] in VERSIONED}
    for node in ast.walk(tree):
        where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and node.args and root_name(node.args[0]) in theirs:
            called, asked = ast.unparse(node.func).split(".")[-1], node.args[0]
            probes = called in ("hasattr", "signature")
            probes = probes or (called == "getattr" and len(node.args) == 3)
            if probes and isinstance(asked, ast.Name | ast.Attribute):
                faults.append(f"{where}: probes for a version: {ast.unparse(node)}")
        if isinstance(node, ast.Try) and any(map(_catches_absence, node.handlers)):
            inside = ast.unparse(ast.Module(node.body, []))
            if re.search(r"^\s*(from|import) (jax|jaxlib|flax\.)", inside, re.MULTILINE):
                faults.append(f"{where}: probes for a version: {inside}")
    return faults


def _catches_absence(handler):
    text = ast.unparse(handler.type) if handler.type else ""
    return re.search("ImportError|ModuleNotFoundError|AttributeError", text) is not None


LAWS = [
    *(framework_faults, patch_faults),
    *(body_param_faults, version_faults, probe_faults),
]


@pytest.mark.parametrize("law", LAWS)
def test_the_package_keeps_the_law(law):
    faults = [fault for path in FILES for fault in law(path.read_text(encoding="utf-8"), path)]
    assert not faults, "\n".join(faults)


# Each law is shown to bite: (law, file, source, a piece of the complaint or None).
SAMPLES = [
    (framework_faults, "ops/dot.py", "def f():\n    from flax import linen", "flax"),
    (framework_faults, "models/linen/_module.py", "import keras", "keras/*"),
    (framework_faults, "models/linen/_module.py", "from flax import linen as nn", None),
    (patch_faults, "ops/dot.py", "import jax\njax.lax.dot_general = None", "writes to"),
    (patch_faults, "ops/dot.py", "from jax import lax\nsetattr(lax, 'dot', None)", "setattr"),
    (patch_faults, "ops/dot.py", "from jax import lax\nlax.dot, a = 1, 2", "writes to"),
    (patch_faults, "ops/dot.py", "from jax._src import core", "jax._src"),
    (patch_faults, "ops/d.py", "from jax import ad\nad.primitive_jvps[lax.dot_p] = 1", "writes to"),
    (patch_faults, "ops/d.py", "from jax import ad\nad.primitive_jvps[our_p] = 1", None),
    (patch_faults, "ops/dot.py", "import jax\njax._src.core", "reads jax._src"),
    (patch_faults, "ops/dot.py", "import jax\njax.config.update('a', 1)", "settings"),
    (patch_faults, "ops/dot.py", "from jax import lax\nself.x = lax.dot\nd[lax.p] = 1", None),
    (
        body_param_faults,
        "tracing/_sites.py",
        "eqn.params['branches']",
        "belongs in tracing/_jaxprs.py",
    ),
    (
        body_param_faults,
        "tracing/_sites.py",
        "p.get('branches_platforms')",
        "belongs in tracing/_jaxprs.py",
    ),
    (
        body_param_faults,
        "tracing/_sites.py",
        "p = eqn.params\np.get('length')",
        "belongs in tracing/_jaxprs.py",
    ),
    (
        body_param_faults,
        "tracing/_sites.py",
        "'ft_in' in eqn.params",
        "belongs in tracing/_jaxprs.py",
    ),
    (body_param_faults, "tracing/_sites.py", "row['length'], eqn.params['permutation']", None),
    (
        body_param_faults,
        "tracing/_sites.py",
        "key = 'ft_in'\neqn.params[key]",
        "belongs in tracing/_jaxprs.py",
    ),
    (
        body_param_faults,
        "tracing/_sites.py",
        "bind(**{**eqn.params, 'call_jaxpr': b})",
        "belongs in",
    ),
    (
        body_param_faults,
        "tracing/_sites.py",
        "match eqn.params:\n    case {'branches': b}: f(b)",
        "belongs in",
    ),
    (
        body_param_faults,
        "tracing/_sites.py",
        "p: dict = eqn.params\np['length']",
        "belongs in tracing/_jaxprs.py",
    ),
    (body_param_faults, "tracing/_jaxprs.py", "eqn.params['branches']", None),
    (
        version_faults,
        "tracing/_sites.py",
        "if jax.__version__ > '0.11': f()",
        "decides by a version",
    ),
    (
        version_faults,
        "tracing/_sites.py",
        "v = jax.__version_info__\nnew = v >= (0, 11)",
        "decides by",
    ),
    (
        version_faults,
        "io/checkpoint/_manifest.py",
        "v = version('jax')\nf() if v else g()",
        "decides by",
    ),
    (
        version_faults,
        "tracing/_sites.py",
        "from jax import __version__ as v\nnew = v > '0.11'",
        "decides",
    ),
    (
        version_faults,
        "tracing/_sites.py",
        "from importlib.metadata import version as v\nf(v('jax'))",
        "names",
    ),
    (
        version_faults,
        "tracing/_jaxprs.py",
        "v: str = jax.__version__\nif v > '0.11': f()",
        "decides by",
    ),
    (
        version_faults,
        "tracing/_jaxprs.py",
        "use = jax.__version__.startswith('0.10')",
        "decides by",
    ),
    (version_faults, "tracing/_jaxprs.py", "use = FORMS[jax.__version__]", "decides by"),
    (version_faults, "tracing/_jaxprs.py", "f(jax.__version__ and g())", "decides by"),
    (version_faults, "tracing/_jaxprs.py", "text = MESSAGE.format(version=jax.__version__)", None),
    (version_faults, "tracing/_sites.py", "print(jax.__version__)", "names a version"),
    (version_faults, "io/checkpoint/_manifest.py", "found['jax'] = metadata.version('jax')", None),
    (version_faults, "tracing/_sites.py", "fewbit.__version__", None),
    (body_param_faults, "tracing/_sites.py", "new = {**eqn.params, **dict(jaxpr=1)}", "belongs in"),
    (body_param_faults, "tracing/_sites.py", "p.bind(*args, branches=b)", "belongs in"),
    (body_param_faults, "tracing/_sites.py", "dict(eqn.params)['length']", "belongs in"),
    (body_param_faults, "tracing/_sites.py", "getattr(eqn, 'params').get('mesh')", "belongs in"),
    (body_param_faults, "tracing/_sites.py", "for v in eqn.params.values(): f(v)", "belongs in"),
    (
        probe_faults,
        "tracing/_sites.py",
        "import jax\nif hasattr(jax.lax, 'axis_size'): f()",
        "probes",
    ),
    (
        probe_faults,
        "tracing/_sites.py",
        "from jax import lax\nf = getattr(lax, 'f', None)",
        "probes",
    ),
    (
        probe_faults,
        "tracing/_sites.py",
        "import jax\n'f' in inspect.signature(jax.jit).parameters",
        "probes",
    ),
    (
        probe_faults,
        "tracing/_sites.py",
        "try:\n    from jax import f\nexcept ImportError:\n    f = 1",
        "probes",
    ),
    (
        probe_faults,
        "tracing/_sites.py",
        "import jax\nhasattr(jax.tree.leaves(x)[0], 'dtype')",
        None,
    ),
    (
        probe_faults,
        "tracing/_sites.py",
        "try:\n    import flax\nexcept ImportError:\n    f = 1",
        None,
    ),
]


@pytest.mark.parametrize(("law", "file", "source", "complaint"), SAMPLES)
def test_the_law_bites_where_it_should(law, file, source, complaint):
    faults = law(source, PACKAGE / file)
    assert (complaint is None and not faults) or any(complaint in fault for fault in faults)


def run_python(code):
    """Runs code in a fresh interpreter; a failed assertion there fails here, with its text."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_fewbit_adds_nothing_but_fewbit_and_the_standard_library():
    run_python("""
        import sys
        import jax
        before = set(sys.modules)
        import fewbit
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        foreign = new - {"fewbit"} - sys.stdlib_module_names - {m.split(".")[0] for m in before}
        assert not foreign, f"import fewbit also imports {sorted(foreign)}"
        for name in ("flax", "keras", "tensorflow", "yaml", "optax", "torch"):
            assert name not in sys.modules, f"import fewbit also imports {name}"
    """)


def test_a_linen_model_is_planned_and_run_without_nnx():
    run_python("""
        import sys
        import flax.linen as nn, jax, jax.numpy as jnp, fewbit
        model, x, before = nn.Dense(4), jnp.ones((2, 8)), set(sys.modules)
        rules = [fewbit.QuantizationRule(weight_qtype="int8")]
        params = model.init(jax.random.key(0), x)["params"]
        params = fewbit.quantize_params(params, fewbit.plan(model, rules, x))
        fewbit.quantize_model(model, fewbit.PtqProvider(rules)).apply({"params": params}, x)
        new = {".".join(name.split(".")[:2]) for name in set(sys.modules) - before}
        found = {name for name in new if name == "flax.nnx" or name.split(".")[0] == "optax"}
        assert not found, f"a Linen model also loads {sorted(found)}"
    """)


def test_import_fewbit_does_not_open_the_native_library():
    run_python("""
        import fewbit, fewbit.kernels
        maps = open("/proc/self/maps").read()
        assert "fewbit_native" not in maps, "the native library was opened at import"
    """)


def test_importing_every_module_changes_nothing_of_jax_and_flax():
    """Functions are the same objects before and after; new lazy attributes are nobody's patch."""
    out = run_python("""
        import importlib, pkgutil
        import jax, jax.numpy, flax.linen, flax.nnx, numpy
        watched = [jax, jax.lax, jax.numpy, jax.nn, jax.random, jax.tree_util, jax.Array, numpy,
                   flax.linen, flax.linen.Module, flax.linen.Dense, flax.nnx, flax.nnx.Module,
                   flax.nnx.Linear]
        before = [dict(vars(place)) for place in watched]
        settings = dict(jax.config.values)
        import fewbit
        loaded = 0
        for found in pkgutil.walk_packages(fewbit.__path__, "fewbit.", onerror=lambda name: None):
            if found.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(found.name)
                loaded += 1
            except ModuleNotFoundError as error:
                # A front end whose framework is not installed; our own modules must all be there.
                assert not error.name.startswith("fewbit"), error
        for place, old in zip(watched, before):
            for name, value in old.items():
                assert vars(place).get(name) is value, f"{place.__name__}.{name} was replaced"
        assert jax.config.values == settings, "JAX settings changed"
        print(loaded)
    """)
    assert int(out) >= 3


def test_every_allowed_skip_names_a_file_that_exists():
    for line in (ROOT / "tests" / "skips.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            file = line.partition(" | ")[0].partition("::")[0].strip()
            assert list(ROOT.glob(file)), f"tests/skips.txt lists {file}, which is gone"


LISTS = ["long.txt", "soak.txt"]


@pytest.mark.parametrize("name", LISTS)
def test_every_listed_test_exists(name):
    """A pattern that matches nothing lets a renamed test slip back into the quick ones."""
    for line in (ROOT / "tests" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            file, _, test = line.partition("::")
            test = test.partition(":")[0]
            names = re.findall(r"def (test_\w+)", (ROOT / file).read_text())
            assert fnmatch.filter(names, test), line


@pytest.mark.long
def test_every_listed_test_is_marked():
    """Each pattern matches, with its parameters, a test that is there today."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only"]
    done = subprocess.run(
        [*command, "-m", "long", "tests"], cwd=ROOT, capture_output=True, text=True
    )
    ids = [line.replace("[", ":").replace("]", "") for line in done.stdout.splitlines()]
    for line in "\n".join((ROOT / "tests" / n).read_text() for n in LISTS).splitlines():
        if line and not line.startswith("#"):
            assert fnmatch.filter(ids, line) or fnmatch.filter(ids, f"{line}:*"), line
