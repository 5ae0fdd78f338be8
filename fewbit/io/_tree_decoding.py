"""Nodes of a manifest back to a tree: every node checked before anything is built of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from fewbit.io._manifest import Manifest
from fewbit.io._tree import MOST_DEPTH, flax_trees
from fewbit.io.errors import CheckpointError, cut
from fewbit.static_scales import QuantizedParams

_MSG_CUSTOM = (
    "holds a {kind} at {path!r}, a class of its own program. Give a tree like the one that was "
    "saved: fewbit.load(path, into=template)"
)
_MSG_OPAQUE = (
    "holds {what} at {path!r}, which is no data and was not saved. Give a tree like the one that "
    "was saved: fewbit.load(path, into=template)"
)
_MSG_FLAX = "holds a {kind} of Flax, which is not installed here: pip install flax"
CONTAINERS: dict[str, type] = {
    "dict": dict,
    "int_dict": dict,
    "frozen_dict": dict,
    "list": list,
    "tuple": list,
}
LEAVES = ("array", "key", "number", "text", "opaque", "qarray", "with_aux", "box")


class TreeDecoder:
    """The tree of a manifest: `leaves` are its leaf nodes by path, `build` makes the tree."""

    def __init__(self, path: str, manifest: Manifest):
        self.path = path
        self._tree = manifest.tree
        self.leaves: dict[str, Any] = {}
        self._walk(manifest.tree, "", self._collect, 0, checking=True)

    def build(self, read: Callable[[str], Any]) -> Any:
        """The tree, each leaf by `read(path)`."""

        def leaf(path: str, node: Any) -> Any:
            if "opaque" in node:
                what = str(node["opaque"])[:100]
                raise CheckpointError(self.path, _MSG_OPAQUE.format(what=what, path=path[:200]))
            return read(path)

        return self._walk(self._tree, "", leaf, 0, checking=False)

    def _collect(self, path: str, node: Any) -> None:
        if path in self.leaves:  # 'a/b' beside {'a': {'b'}}
            raise self._bad(path, "one leaf of this path", "two")
        self.leaves[path] = node

    def _walk(
        self, node: Any, path: str, leaf: Callable[[str, Any], Any], depth: int, checking: bool
    ) -> Any:
        if depth > MOST_DEPTH + 1:
            raise self._bad(path[:60], f"at most {MOST_DEPTH} levels", "more")
        if node is None:
            return None
        if not isinstance(node, dict) or len(node) != 1:
            raise self._bad(path, "a node of one kind", node)
        ((kind, value),) = node.items()

        def inside(child: Any, key: Any) -> Any:
            where = f"{path}/{key}" if path else str(key)
            return self._walk(child, where, leaf, depth + 1, checking)

        if kind in LEAVES:
            return leaf(path, node)
        if kind in CONTAINERS:
            if not isinstance(value, CONTAINERS[kind]):
                raise self._bad(path, f"a {CONTAINERS[kind].__name__}", value)
            if isinstance(value, list):
                listed = [inside(child, i) for i, child in enumerate(value)]
                return listed if kind == "list" else tuple(listed)
            items = cast(dict[str, Any], value).items()
            made = {self._key(kind, key, path): inside(child, key) for key, child in items}
            return made if kind != "frozen_dict" or checking else self._flax().frozen_dict(made)
        if kind == "quantized_params":
            if not isinstance(value, dict) or set(value) != {"params", "act_scales"}:
                raise self._bad(path, "params and act_scales", value)
            return QuantizedParams(**{key: inside(child, key) for key, child in value.items()})
        if kind == "custom":
            ok = isinstance(value, dict) and isinstance(value.get("children"), dict)
            if not ok or set(value) != {"class", "children"}:
                raise self._bad(path, "class and children", value)
            if not checking:
                name = cut(str(value["class"])).strip("'")
                raise CheckpointError(self.path, _MSG_CUSTOM.format(kind=name, path=path[:200]))
            for key, child in value["children"].items():
                inside(child, key)
            return None
        raise self._bad(path, "a known kind of node", kind)

    def _key(self, kind: str, key: str, path: str) -> Any:
        if kind != "int_dict":
            return key
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            raise self._bad(path, "integer keys", key)
        return int(key)

    def _flax(self) -> Any:
        try:
            import_flax()
        except ImportError:
            raise CheckpointError(self.path, _MSG_FLAX.format(kind="FrozenDict")) from None
        return flax_trees()

    def _bad(self, path: str, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(
            self.path, f"has a bad tree at {cut(path)}", expected=expected, found=cut(found)
        )


def import_flax() -> Any:
    """What knows Flax's containers, loaded for a file that has some."""
    import importlib

    return importlib.import_module("fewbit.models.flax_trees")
