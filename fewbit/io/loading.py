"""Load a checkpoint: lazily, leaf by leaf, each checked, into any tree, sharding and layout."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from jax.sharding import Sharding

from fewbit._errors import describe
from fewbit._plan import Plan
from fewbit.boxes import is_box, unbox_parts, unboxed
from fewbit.io._folder import manifest_bytes
from fewbit.io._manifest import FILE, Manifest, from_bytes
from fewbit.io._read_leaf import LeafReader, Placement
from fewbit.io._tree import flax_trees, map_leaves
from fewbit.io._tree_decoding import TreeDecoder
from fewbit.io.errors import CheckpointError
from fewbit.io.inspecting import CheckpointInfo, info_of
from fewbit.io.safetensors_file import SafetensorsFile
from fewbit.numerics import qtype_name
from fewbit.qarray import QArray, WithAux

_MSG_LAYOUT = (
    "layout={found!r} is not known: 'native' (what this machine's kernels read) or 'plain'."
)
_MSG_SHARDING = (
    "sharding takes a jax.sharding.Sharding, or a function from a parameter's path to one (or to "
    "None), got {found}."
)
_MSG_NO_LEAF = "has no parameter {path!r}.{near}"
_MSG_MISSING = (
    "lacks {count} of the template's parameters: {paths}.{near} Make the template as the saved "
    "model was made; strict=False keeps the template's own"
)
_MSG_EXTRA = (
    "holds {count} parameters that the template does not have: {paths}.{near} Make the template as "
    "the saved model was made; strict=False leaves them out"
)
_MSG_OTHER = "does not fit the template"


class Loaded:
    """A checkpoint that was opened: its plan at once, its parameters when they are asked for.

    `params` reads all of them, the first time; `leaf(path)` and `leaves()` read one at a time. The
    files stay open until this object goes away, so that a save to the same path changes nothing
    here.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        files: list[SafetensorsFile],
        placement: Placement,
        into: Any,
        strict: bool,
    ):
        self.path = path
        self.plan: Plan | None = manifest.plan
        self.info: CheckpointInfo = info_of(path, manifest)
        self._decoder = TreeDecoder(path, manifest)
        self._reader = LeafReader(path, manifest, files, placement)
        self._into, self._strict = into, strict

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters, in the order of the file."""
        return tuple(self._decoder.leaves)

    def leaf(self, path: str) -> Any:
        """One parameter, read now."""
        nodes = self._decoder.leaves
        if path not in nodes:
            near = _near(path, nodes)
            raise CheckpointError(self.path, _MSG_NO_LEAF.format(path=path, near=near).rstrip("."))
        return self._reader.read(path, nodes[path])

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(path, parameter) one after another; none is kept here."""
        for path in self._decoder.leaves:
            yield path, self.leaf(path)

    @functools.cached_property
    def params(self) -> Any:
        """All parameters, as the tree that was saved, or in the template's."""
        if self._into is None:
            return self._decoder.build(self.leaf)
        flax = flax_trees()
        if flax is not None and flax.is_nnx(self._into):
            return flax.filled(self._into, self._fill)
        return self._fill(self._into)

    def _fill(self, template: Any) -> Any:
        nodes, wanted = self._decoder.leaves, dict[str, Any]()
        map_leaves(template, lambda path, leaf: wanted.setdefault(path, leaf))
        opaque = {path for path, node in nodes.items() if node is not None and "opaque" in node}
        missing = [p for p, leaf in wanted.items() if p not in nodes and hasattr(leaf, "shape")]
        extra = [path for path in nodes if path not in wanted and path not in opaque]
        self._complain(_MSG_MISSING, missing, extra)
        self._complain(_MSG_EXTRA, extra, missing)

        def fill(path: str, old: Any) -> Any:
            if path not in nodes or path in opaque:
                return old
            new = self.leaf(path)
            _compare(self.path, path, old, new)
            return new

        return map_leaves(template, fill)

    def _complain(self, message: str, paths: list[str], others: list[str]) -> None:
        if not paths:
            return
        near = _near(paths[0], others)
        shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
        text = message.format(count=len(paths), paths=shown, near=near)
        if self._strict:
            raise CheckpointError(self.path, text)
        warnings.warn(f"{self.path} {text}.", stacklevel=5)

    def __repr__(self) -> str:
        plan = "no plan" if self.plan is None else f"a plan of {len(self.plan.sites)} sites"
        return f"Loaded({self.path!r}: {len(self.paths)} parameters, {plan})"


def load(
    path: str | os.PathLike[str],
    *,
    into: Any = None,
    sharding: Sharding | Callable[[str], Sharding | None] | None = None,
    layout: str = "native",
    strict: bool = True,
    lazy: bool = True,
) -> Loaded:
    """Open a checkpoint that `save` wrote; `.params` and `.plan` are what was saved.

    Parameters are read when `.params` is first used (now with `lazy=False`), one leaf at a time,
    each compared with its checksum. Those that a native kernel will read come packed for it
    (`layout='plain'`: none). `sharding` is a sharding for all, or a function of a parameter's path;
    a device is given its part alone, and a quantized weight's scales follow its codes.

    `into` is a tree, or an NNX model, like the one that was saved; its leaves may be abstract. The
    result is that tree with the checkpoint's leaves, which classes of your own need. A parameter
    missing there or here is an error (`strict=False`: a warning).

    >>> import fewbit, tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = fewbit.save(f'{folder}/model', {'up': {'w': jnp.ones(3)}, 'steps': [1, None]})
    ...     loaded = load(f'{folder}/model')
    ...     loaded
    ...     loaded.params
    Loaded('.../model': 2 parameters, no plan)
    {'steps': [1, None], 'up': {'w': Array([1., 1., 1.], dtype=float32)}}
    """
    if layout not in ("native", "plain"):
        raise ValueError(_MSG_LAYOUT.format(found=layout))
    if sharding is not None and not isinstance(sharding, Sharding) and not callable(sharding):
        raise TypeError(_MSG_SHARDING.format(found=describe(sharding)))
    path = os.fspath(path)
    manifest, files = _open(path)
    loaded = Loaded(path, manifest, files, Placement(sharding, layout), into, strict)
    if not lazy:
        loaded.params  # noqa: B018
    return loaded


def _open(path: str) -> tuple[Manifest, list[SafetensorsFile]]:
    """The manifest and its shards. A save that ends in between is seen and followed."""
    while True:
        before = manifest_bytes(path)
        manifest = from_bytes(os.path.join(path, FILE), before)
        try:
            return manifest, [SafetensorsFile(os.path.join(path, n)) for n, _ in manifest.shards]
        except CheckpointError:
            if manifest_bytes(path) == before:
                raise


def _near(path: str, others: Any) -> str:
    close = get_close_matches(path, list(others), 1)
    return f" The nearest is {close[0]!r}." if close else ""


def _bare(value: Any) -> Any:
    value = unboxed(value) if is_box(value) else value
    value = value.array if isinstance(value, WithAux) else value
    return unbox_parts(value) if isinstance(value, QArray) and is_box(value.data) else value


def _compare(checkpoint: str, path: str, old: Any, new: Any) -> None:
    """Raise if a leaf differs from the template's; a float template takes a quantized leaf."""
    old, new = _bare(old), _bare(new)
    quantized = [
        qtype_name(x.qtype) if isinstance(x, QArray) and x.qtype is not None else None
        for x in (old, new)
    ]
    shapes = [tuple(getattr(x, "shape", ())) for x in (old, new)]
    if isinstance(new, bool | int | float | str):  # a number takes the place of a number
        same = not shapes[0] and quantized[0] is None
    elif not isinstance(old, QArray) and not hasattr(old, "shape"):
        same = False
    elif quantized[0] is not None or quantized[1] is None:
        same = quantized[0] == quantized[1] and shapes[0] == shapes[1] and old.dtype == new.dtype
    else:
        same = shapes[0] == shapes[1]
    if same:
        return
    texts = [
        f"{qtype + ' codes of ' if qtype else ''}{describe(x)}"
        for x, qtype in zip((old, new), quantized, strict=True)
    ]
    raise CheckpointError(checkpoint, _MSG_OTHER, tensor=path, expected=texts[0], found=texts[1])
