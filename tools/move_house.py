"""Moves modules into their rooms: `python tools/move_house.py numerics qarray ...` (packages).

Where each goes is in HOMES of tests/house.py. Files move by `git mv`, so that history follows;
every import, dotted name and path of them in the repository is rewritten. Nothing else changes. A
package with the name of a module that moves into it (`fewbit.qarray`) needs a face afterwards, with
what others import from there.
"""

import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from house import HOMES  # noqa: E402

PACKAGE = ROOT / "fewbit"
# Text beside Python in which names and paths of modules stand; not what tells of the past.
TEXTS = (".md", ".txt", ".toml", ".sh", "Makefile", ".yml")
PAST = ("CHANGELOG.md", "tests/golden", "tests/last-", "tests/house.py")


def git(*words):
    """The lines that a git command prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def dotted(module):
    """The name by which a module is imported."""
    return "fewbit." + module.removesuffix("/__init__").replace("/", ".")


class Move:
    """Some modules on their way to their new homes."""

    def __init__(self, packages):
        homes = dict(line.split() for line in HOMES.strip().splitlines())
        self.homes = {
            old: new for old, new in homes.items() if new.split("/")[0] in packages and old != new
        }
        self.names = {dotted(old): dotted(new) for old, new in self.homes.items()}
        # `fewbit.qarray` stays what others import from: its face is where the module was.
        self.kept = {name for name in self.names if self.names[name].startswith(f"{name}.")}
        found = sorted(self.names, key=len, reverse=True)
        self.pattern = re.compile(rf"(?<![\w./])({'|'.join(map(re.escape, found))})(?!\w)")
        paths = {f"fewbit/{old}.py": f"fewbit/{new}.py" for old, new in self.homes.items()}
        self.paths = paths
        self.offered = {}  # by package: a name that it offers is no module of the same name
        self.path_pattern = re.compile("|".join(sorted(map(re.escape, paths), key=len)[::-1]))

    def files(self):
        for old, new in self.homes.items():
            target = PACKAGE / f"{new}.py"
            target.parent.mkdir(parents=True, exist_ok=True)
            git("mv", f"fewbit/{old}.py", f"fewbit/{new}.py")
        for new in self.homes.values():
            for folder in (PACKAGE / new).parents:
                if folder == PACKAGE:
                    break
                (folder / "__init__.py").touch()

    def home(self, module, inside):
        """The module's new name, for the library itself (`inside`) or for others."""
        if module in self.kept and not inside:
            return module
        return self.names.get(module, module)

    def offers(self, package, name):
        """Whether a package's face gives a name to something that is not its module."""
        if package not in self.offered:
            face = ROOT.joinpath(*package.split("."), "__init__.py")
            tree = ast.parse(face.read_text(encoding="utf-8")) if face.exists() else None
            nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)] if tree else []
            self.offered[package] = {
                alias.asname or alias.name
                for n in nodes
                if n.module != package
                for alias in n.names
            }
        return name in self.offered[package]

    def statement(self, node, inside):
        """An import as it has to be now, or None if it may stay."""
        groups, changed = {}, False
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            is_module = full in self.names and not self.offers(node.module, alias.name)
            if is_module and not (full in self.kept and not inside):
                home, _, name = self.names[full].rpartition(".")
                entry = (name, alias.asname or alias.name)
            else:
                home, entry = self.home(node.module, inside), (alias.name, alias.asname)
            changed |= (home, entry) != (node.module, (alias.name, alias.asname))
            groups.setdefault(home, []).append(entry)
        if not changed:
            return None
        space = " " * node.col_offset
        return [
            f"{space}from {home} import "
            + ", ".join(name if other is None else f"{name} as {other}" for name, other in entries)
            for home, entries in groups.items()
        ]

    def imports(self, text, inside):
        lines, edits = text.split("\n"), []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "fewbit":
                if new := self.statement(node, inside):
                    edits.append((node, new))
        for node, new in sorted(edits, key=lambda edit: -edit[0].lineno):
            new[-1] += lines[node.end_lineno - 1][node.end_col_offset :]  # a comment
            lines[node.lineno - 1 : node.end_lineno] = new
        return "\n".join(lines)

    def text(self, text):
        text = self.path_pattern.sub(lambda found: self.paths[found.group()], text)
        return self.pattern.sub(lambda found: self.home(found.group(1), inside=False), text)

    def everywhere(self):
        for name in git("ls-files", "-co", "--exclude-standard"):
            path = ROOT / name
            if name.startswith(PAST) or not path.is_file():
                continue
            if not name.endswith((".py", *TEXTS)):
                continue
            before = path.read_text(encoding="utf-8")
            after = before
            if name.endswith(".py"):
                after = self.imports(after, inside=name.startswith("fewbit/"))
            after = self.text(after)
            if after != before:
                path.write_text(after, encoding="utf-8")

    def table(self):
        """HOMES of tests/house.py, without what has moved."""
        path = ROOT / "tests" / "house.py"
        lines = path.read_text(encoding="utf-8").split("\n")
        done = {f"    {old} {new}" for old, new in self.homes.items()}
        left = [line for line in lines if line not in done]
        path.write_text("\n".join(left), encoding="utf-8")


def main(packages):
    """Moves all that belongs into these packages."""
    move = Move(packages)
    if not move.homes:
        sys.exit(f"nothing is left to move into {', '.join(packages)}")
    move.files()
    move.everywhere()
    move.table()


if __name__ == "__main__":
    main(sys.argv[1:])
