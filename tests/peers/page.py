"""The blocks of docs/from-qwix.md, run as they stand, by fewbit or by Qwix. Imports neither.

A block is known by its heading. `WIDE` runs it on layers so wide that fewbit's kernels pack them.
"""

import contextlib
import dataclasses
import io
import pathlib
import re
import warnings

import jax
import numpy as np
from flax import nnx

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "from-qwix.md"
SECTION = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
# What the page says that its reader changes.
OURS, THEIRS = "import fewbit as qwix\n", "import qwix\n"
CONTINUES = "# Continues the block above.\n"
NARROW, WIDE = "width, hidden = 16, 64\n", "width, hidden = 64, 128\n"
# Changes of what a block says, by which the table at the end of the page is tested.
STATIC = "act_static_scale=True"
MEAN = (STATIC, STATIC + ", act_static_reduction='mean'")
PARTS = '{"qvalue": qvalue, "scale": scale}'
BARE = (f'{{"array": {PARTS}}}', PARTS)


@dataclasses.dataclass(frozen=True)
class Block:
    heading: str
    code: str
    printed: str | None
    before: "Block | None"

    @property
    def sized(self):
        """Whether it runs on layers of other sizes; what it prints is of the sizes of the page."""
        return "width" in self.code or "MLP" in self.code


def read():
    """(the block that all others stand after, {heading: block})."""
    parts = SECTION.split(PAGE.read_text(encoding="utf-8"))[1:]
    setup, blocks = None, {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        for code, printed in BLOCK.findall(text):
            if setup is None:
                setup = code
                continue
            assert heading not in blocks, f"two blocks under {heading!r}"
            before = list(blocks.values())[-1] if code.startswith(CONTINUES) else None
            blocks[heading] = Block(heading, code, printed or None, before)
    return setup, blocks


SETUP, BLOCKS = read()
assert SETUP.count(OURS) == SETUP.count(NARROW) == 1


@dataclasses.dataclass(frozen=True)
class Ran:
    """All names that there are after a block, those that it bound, and what it printed."""

    names: dict
    bound: dict
    printed: str


def run(heading, library, wide=False, change=None):
    """The block after all that stands before it; `change` is what to write in it, and instead."""
    setup = SETUP.replace(OURS, THEIRS) if library == "qwix" else SETUP
    block, names = BLOCKS[heading], {"__name__": "__main__"}
    _execute(setup.replace(NARROW, WIDE) if wide else setup, "the models", names)
    if block.before is not None:
        _execute(block.before.code, block.before.heading, names)
    before, printed, code = dict(names), io.StringIO(), block.code
    if change is not None:
        assert change[0] in code
        code = code.replace(*change)
    with contextlib.redirect_stdout(printed):
        _execute(code, heading, names)
    bound = {name: value for name, value in names.items() if before.get(name) is not value}
    return Ran(names, bound, printed.getvalue())


def _execute(code, heading, names):
    exec(compile(code, f"<{heading}>", "exec"), names)


def arrays(bound, plain=lambda tree: tree):
    """{'name/path': array} of everything numeric among the names that a block has bound.

    `plain` takes a tree apart from how the library holds it in memory.
    """
    found = {}
    for name, value in bound.items():
        if isinstance(value, nnx.Optimizer | nnx.Variable):
            continue
        value = plain(value)
        if isinstance(value, nnx.Module):
            value = nnx.state(value, nnx.Not(nnx.RngState))
        if isinstance(value, nnx.State):
            value = nnx.to_pure_dict(value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            leaves, _ = jax.tree_util.tree_flatten_with_path(value)
        for path, leaf in leaves:
            if isinstance(leaf, jax.Array | np.ndarray):
                found["/".join([name, *map(_step, path)])] = leaf
    return found


def _step(key):
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def every_run():
    """(heading, wide) of every run that both libraries answer."""
    for heading, block in BLOCKS.items():
        yield heading, False
        if block.sized:
            yield heading, True
