"""A machine of our own making: which programs are on its PATH, and what its Pythons answer."""

import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
# Where a process of its own finds the helpers, and the tests that call kernels.
PATHS = f"{ROOT}:{ROOT}/tests/support:{ROOT}/tests/kernels"
PROGRAMS = ("sh", "bash", "awk", "cut", "dirname", "rm", "rmdir", "sed", "sort", "tr")
SHIM = "echo 'pyenv: {0}: command not found' >&2; echo >&2; echo 'It exists in: ...' >&2; exit 127"


class Machine:
    """Has nothing on its PATH but what a shell needs; Pythons are put there one by one."""

    def __init__(self, root):
        self.root = root
        self.path = [root / "bin"]
        self.settings = {"HOME": str(root / "home")}
        for name in PROGRAMS:
            if found := shutil.which(name):
                self.place(root / "bin" / name).symlink_to(found)

    def place(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def program(self, path, text):
        path = self.place(self.root / path)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def shim(self, path):
        """What a version manager leaves on the PATH for a Python that is not switched on."""
        return self.program(path, SHIM.format(pathlib.Path(path).name))

    def python(self, path, version):
        """A Python that runs and makes folders with itself in them instead of environments."""
        answer = f'case "$*" in *ensurepip*) echo "{version} $0";; '
        answer += f'*version_info*) echo "{version.rpartition(".")[0]}";; '
        answer += (
            '*venv*) shift 2; mkdir -p "$1/bin"; cp "$0" "$1/bin/python"; touch "$1/pyvenv.cfg";; '
        )
        return self.program(path, f"PATH=/usr/bin:/bin; {answer} esac")

    def shell(self, *words, **settings):
        environment = {"PATH": ":".join(map(str, self.path)), **self.settings, **settings}
        return subprocess.run(
            [self.root / "bin" / words[0], *words[1:]],
            env=environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, script, *arguments, **settings):
        return self.shell("sh", ROOT / "tools" / script, *arguments, **settings)

    def find(self, *versions, **settings):
        return self.run("find_python.sh", *versions, **settings)
