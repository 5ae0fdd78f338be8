"""Every public name of every module of Qwix, and what its functions take. Reads, imports nothing.

cd tests && python -m peers.qwix_names <where to write the .npz>
"""

import ast
import importlib.util
import pathlib
import sys

from peers import cases


def names_of(folder):
    """{module.name: arguments of a function, or '' of a class and '=' of a value}."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
                found[f"{module}.{node.name}"] = " ".join(arguments)
            elif isinstance(node, ast.ClassDef):
                found[f"{module}.{node.name}"] = ""
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[f"{module}.{node.targets[0].id}"] = "="
    return {full: what for full, what in found.items() if public(full)}


def public(full):
    return not full.rpartition(".")[2].startswith("_")


if __name__ == "__main__":
    answers = cases.Results()
    where = importlib.util.find_spec("qwix").submodule_search_locations[0]
    for full, what in names_of(pathlib.Path(where)).items():
        answers.say(full, what or "class")
    answers.save(sys.argv[1])
