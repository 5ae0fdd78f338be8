"""Builds docs/_site: the pages of docs/ and one API page per module, from the docstrings.

`make docs` calls this. A module whose framework is not installed is left out, and said to be.
"""

import ast
import html
import importlib
import inspect
import pathlib
import pkgutil
import re
import shutil
import sys

import markdown2
import pdoc

DOCS = pathlib.Path(__file__).parent
SITE = DOCS / "_site"
PRIVATE = r".*\._"
MARKDOWN_EXTRAS = ["fenced-code-blocks", "header-ids", "tables"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - fewbit</title>
<style>
body {{ max-width: 50rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.6 system-ui; }}
pre {{ overflow-x: auto; padding: .8rem; background: #f5f5f5; }}
code {{ font-size: .92em; }}
table {{ border-collapse: collapse; }}
th, td {{ border: 1px solid #ccc; padding: .2rem .6rem; text-align: left; }}
</style>
</head>
<body>
<nav><a href="index.html">fewbit</a> | <a href="api/fewbit.html">API</a></nav>
{body}
</body>
</html>
"""


def importable_modules(package):
    """(names that import, {name: framework that is missing}) of a package and all below it."""
    names, missing = [package], {}
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
        if found.name.rpartition(".")[2].startswith("_"):
            continue
        try:
            importlib.import_module(found.name)
            names.append(found.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == package:
                raise
            missing[found.name] = error.name
    return names, missing


def say_what_it_offers(name):
    """Lists in `__all__` what a module offers: pdoc shows nothing imported that is not there.

    Offered is what a module defines, and what it imports under the same name again (`as dot`), or
    lists in its `.pyi`.
    """
    module = sys.modules[name]
    listed = pathlib.Path(module.__file__).with_suffix(".pyi")
    tree = ast.parse(listed.read_text("utf-8") if listed.exists() else inspect.getsource(module))
    offered = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname and not alias.name.startswith("_")
    ]
    values = {
        other: getattr(module, other) for other in offered
    }  # loads what comes when first used
    offered = [other for other, value in values.items() if not inspect.ismodule(value)]
    if not offered:
        return
    vars(module).update((other, values[other]) for other in offered)
    own = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]
    below = [info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ()))]
    module.__all__ = sorted({*own, *offered, *(b for b in below if not b.startswith("_"))})


def write_page(source, title):
    """One Markdown file as an HTML page; links between pages follow."""
    text = source.read_text(encoding="utf-8").replace(".md)", ".html)")
    body = markdown2.markdown(text, extras=MARKDOWN_EXTRAS)
    target = SITE / f"{source.stem}.html"
    target.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")


def title_of(source):
    lines = source.read_text(encoding="utf-8").splitlines()
    first = next((line for line in lines if line.startswith("# ")), source.stem)
    return first.removeprefix("# ")


def main():
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir()

    modules, missing = importable_modules("fewbit")
    for name in modules:
        say_what_it_offers(name)
    pdoc.render.configure(docformat="google", show_source=True)
    # pdoc finds what is below a package itself. What private modules hold for users is on the page
    # of the package that offers it; pages of their own took half of the time.
    left_out = (PRIVATE, *(f"^{re.escape(name)}(\\.|$)" for name in missing))
    pdoc.pdoc("fewbit", *(f"!{pattern}" for pattern in left_out), output_directory=SITE / "api")

    pages = sorted(DOCS.glob("*.md"))
    for page in pages:
        write_page(page, title_of(page))
    for picture in (*DOCS.glob("*.svg"), *DOCS.glob("*.png")):
        shutil.copy(picture, SITE)
    items = "\n".join(
        f'<li><a href="{page.stem}.html">{html.escape(title_of(page))}</a></li>' for page in pages
    )
    body = f'<h1>fewbit</h1><ul>{items}<li><a href="api/fewbit.html">API</a></li></ul>'
    (SITE / "index.html").write_text(PAGE.format(title="Contents", body=body), encoding="utf-8")

    print(f"{SITE.relative_to(DOCS.parent)}: {len(pages)} pages, {len(modules)} modules")
    for name, framework in missing.items():
        print(f"left out: {name} needs {framework}, which is not installed")


if __name__ == "__main__":
    main()
