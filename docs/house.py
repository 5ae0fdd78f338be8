"""The house in numbers and as a picture: `make house`.

Counts files, lines and imports of each package, and circles of files; says how many files a call
enters; and draws docs/house.svg: packages by rank, with lines as thick as their imports are many.
Ranks and budgets are those that the tests hold the library to (tests/support/house.py).
"""

import argparse
import ast
import collections
import html
import io
import os
import pathlib
import sys
import tokenize

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
PACKAGE = ROOT / "fewbit"
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("support", "project"))]
os.environ.setdefault("KERAS_BACKEND", "jax")

from house import BUDGETS, RANKS, UPHILL  # noqa: E402

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(text):
    """Lines that are neither blank, nor comments, nor docstrings.

    >>> code_lines('def f():\\n    "What it does."\\n\\n    return 1  # one\\n')
    2
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in SILENT for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def package_of(path):
    """The package of a file of the library; 'face' for what is above all packages."""
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return first if first in RANKS else "face"


def sources():
    """{path: text} of every Python file and every list of a face."""
    paths = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])
    return {path: path.read_text(encoding="utf-8") for path in paths}


def targets(text):
    """The packages that a file imports from, once for each name, when it is loaded or later."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        for first, package, *_ in (name.split(".") for name in names if "." in name):
            if first == "fewbit" and package in RANKS:
                yield package


def counted(files):
    """{package: (files, lines, code lines, budget)}, and how many files import which package."""
    rows = {name: [0, 0, 0] for name in (*RANKS, "face")}
    weights = collections.Counter()
    for path, text in files.items():
        own = package_of(path)
        row = rows[own]
        row[0] += 1
        row[1] += text.count("\n")
        row[2] += code_lines(text)
        weights.update((own, other) for other in set(targets(text)) if other != own)
    return {k: (*row, BUDGETS.get(k, 0)) for k, row in rows.items() if row[0]}, weights


def circles():
    """The files that lead to each other by their imports, as the law finds them."""
    from test_house_laws import LIBRARY, cycle_faults

    return cycle_faults(LIBRARY)


# --- Walks: how many files of the library one call enters -----------------------------------------


def walk(call):
    """The files of the library in which a function runs during the call."""
    entered = set()

    def enter(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            if frame.f_code.co_name != "<module>":
                entered.add(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        out = call()
    finally:
        sys.setprofile(None)
    return out, len(entered)


def walks():
    """[(kind of model, files entered while it is quantized, and by its first call)]"""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import keras
    from flax import nnx

    import fewbit

    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    provider, x = fewbit.PtqProvider(rules), jnp.ones((2, 64))

    class Two(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(64, 64, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.down(self.up(x))

    def function(params, x):
        return x @ params["up"] @ params["down"]

    def of_tree(model, params, first, run):
        """`first`: what a plan takes before the inputs, the parameters or nothing."""

        def make():
            plan = fewbit.plan(model, rules, *first, x)
            return fewbit.quantize_model(model, provider), fewbit.quantize_params(params, plan)

        (quantized, qparams), made = walk(make)
        return made, walk(lambda: run(quantized, qparams))[1]

    linen = nn.Sequential([nn.Dense(64), nn.Dense(64)])
    params = linen.init(jax.random.key(0), x)["params"]
    weights = {"up": jnp.eye(64), "down": jnp.eye(64)}
    rows = [
        ("function", *of_tree(function, weights, (weights,), lambda f, q: f(q, x))),
        ("Linen", *of_tree(linen, params, (), lambda m, q: m.apply({"params": q}, x))),
    ]
    model = Two()
    quantized, first = walk(lambda: fewbit.quantize_model(model, provider, x))
    rows.append(("NNX", first, walk(lambda: quantized(x))[1]))
    net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(64)])
    config = fewbit.keras.DynamicQuantConfig("int8")
    net, first = walk(lambda: fewbit.quantize_model(net, config))
    rows.append(("Keras", first, walk(lambda: net(x))[1]))
    return rows


# --- The picture ----------------------------------------------------------------------------------

ROW, BOX, LEFT, TOP = 34, 215, 90, 40
SENTENCES, LETTER = 575, 7.5  # where they begin, and how wide a letter is at most, on average
STYLE = "font: 13px system-ui, sans-serif; fill: #223"


def sentence(package):
    """What a package says of itself first."""
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text("utf-8")))
    return text.split("\n")[0]


def picture(rows, weights):
    """Packages from the highest rank to the lowest; imports as arcs, the few uphill ones dashed."""
    names = [name for name in reversed(RANKS) if name in rows]
    weights = {pair: count for pair, count in weights.items() if "face" not in pair}
    y = {name: TOP + ROW * k for k, name in enumerate(names)}
    height = TOP + ROW * len(names) + 10
    width = SENTENCES + round(LETTER * max(len(sentence(name)) for name in names))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>The packages of fewbit by rank, with the weight of their imports</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" style="{STYLE}">package: lines of code; arcs lead to what it '
        "imports, dashed ones up</text>",
    ]
    for (own, other), count in sorted(weights.items(), key=lambda item: item[::-1]):
        down = y[own] < y[other]
        x = LEFT + BOX if down else LEFT
        bend = (1 if down else -1) * (30 + 15 * abs(y[own] - y[other]) / ROW)
        look = 'stroke="#4a6fa5" stroke-opacity="0.35"' if down else 'stroke="#c0392b"'
        dash = "" if down else ' stroke-dasharray="5 3"'
        parts.append(
            f'<path d="M{x} {y[own]} C{x + bend} {y[own]} {x + bend} {y[other]} {x} {y[other]}" '
            f'fill="none" {look}{dash} stroke-width="{0.6 + count**0.5:.1f}">'
            f"<title>{own} imports {other} in {count} files</title></path>"
        )
    for name in names:
        parts += [
            f'<rect x="{LEFT}" y="{y[name] - 11}" width="{BOX}" height="22" rx="4" '
            'fill="#eef2f7" stroke="#8fa3bf"/>',
            f'<text x="{LEFT + 8}" y="{y[name] + 5}" style="{STYLE}">{name}</text>',
            f'<text x="{LEFT + BOX - 8}" y="{y[name] + 5}" text-anchor="end" style="{STYLE}">'
            f"{rows[name][2]:,}</text>",
            f'<text x="{SENTENCES}" y="{y[name] + 5}" style="{STYLE}">'
            f"{html.escape(sentence(name))}</text>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-walks", action="store_true", help="count and draw only")
    arguments = parser.parse_args()
    rows, weights = counted(sources())
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"{'package':20}{'files':>7}{'lines':>8}{'code':>8}{'budget':>8}")
    for name in ("face", *reversed(RANKS), "together"):
        if name in rows or name == "together":
            files, *numbers = rows.get(name, total)
            print(f"{name:14}{files:>7}" + "".join(f"{number:>8,}" for number in numbers))
    uphill = sum(len(text.split("\n")) - 2 for text in UPHILL.values())
    print(f"imports to a higher rank: {uphill}")
    print(f"circles of files: {len(circles())}")
    print(f"in the flat folder: {', '.join(sorted(p.stem for p in PACKAGE.glob('*.py')))}")
    if not arguments.no_walks:
        print("\nfiles entered    quantizing   first call")
        for kind, made, first in walks():
            print(f"{kind:14}{made:>10}{first:>13}")
    (DOCS / "house.svg").write_text(picture(rows, weights), encoding="utf-8")
    print(f"\n{(DOCS / 'house.svg').relative_to(ROOT)}: the packages by rank")


if __name__ == "__main__":
    main()
