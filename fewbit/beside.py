"""What lies beside weights in a parameter tree, known by how its name ends.

Dicts, lists and tuples hold it where the weight lies. A tree of another kind (an Equinox module, a
list of arrays) has no room for it: `LoraParams` holds both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.adapter_params import LoraParams
from fewbit.boxes import is_box
from fewbit.qarray import QArray, WithAux


def owner_of(name: str, suffixes: Sequence[str]) -> str | None:
    """The parameter that has something of this name beside it; None for another name.

    >>> owner_of('up/kernel_qscale', ('_qscale',)), owner_of('up/kernel', ('_qscale',))
    ('up/kernel', None)
    """
    ending = next((end for end in suffixes if name.endswith(end)), None)
    return None if ending is None else name.removesuffix(ending)


def split_beside(tree: Any, suffixes: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """A tree without what lies beside its weights, and this by full name.

    >>> split_beside({'up': {'w': 1, 'w_qscale': 2}}, ('_qscale',))
    ({'up': {'w': 1}}, {'up/w_qscale': 2})
    """
    if isinstance(tree, LoraParams):
        rest, found = split_beside(tree.params, suffixes)
        own = {n: v for n, v in tree.adapters.items() if owner_of(n, suffixes) is not None}
        kept = {n: v for n, v in tree.adapters.items() if n not in own}
        return LoraParams(rest, kept) if kept else rest, {**found, **own}
    found = {}

    def without(node: Any, path: str) -> Any:
        if _is_leaf(node):
            return node
        if isinstance(node, Mapping):
            kept = {}
            for key, value in node.items():
                own = owner_of(str(key), suffixes)
                if own is not None and any(str(k) == own for k in node):
                    found[f"{path}{key}"] = value
                else:
                    kept[key] = without(value, f"{path}{key}/")
            same = len(kept) == len(node) and all(kept[key] is node[key] for key in kept)
            return node if same else type(node)(kept)  # type: ignore[call-arg]
        if type(node) in (list, tuple):
            items = [without(value, f"{path}{k}/") for k, value in enumerate(node)]
            same = all(a is b for a, b in zip(items, node, strict=True))
            return node if same else type(node)(items)
        return node

    return without(tree, ""), found


def put_beside(tree: Any, entries: Mapping[str, Any], suffixes: Sequence[str]) -> Any:
    """A tree with these entries in it, in the place of those of the same names.

    >>> put_beside({'up': {'w': 1}}, {'up/w_qscale': 2}, ('_qscale',))
    {'up': {'w': 1, 'w_qscale': 2}}
    """
    if not entries:
        return tree
    if isinstance(tree, LoraParams):
        return LoraParams(tree.params, {**tree.adapters, **entries})
    placed: set[str] = set()

    def place(node: Any, path: str) -> Any:
        if _is_leaf(node):
            return node
        if isinstance(node, Mapping):
            new = {key: place(value, f"{path}{key}/") for key, value in node.items()}
            for key in node:
                for end in suffixes if isinstance(key, str) else ():
                    name = f"{path}{key}{end}"
                    if name in entries:
                        new[f"{key}{end}"] = entries[name]
                        placed.add(name)
            same = len(new) == len(node) and all(new[key] is node[key] for key in node)
            return node if same else type(node)(new)  # type: ignore[call-arg]
        if type(node) in (list, tuple):
            return type(node)(place(value, f"{path}{k}/") for k, value in enumerate(node))
        return node

    made = place(tree, "")
    left = {name: value for name, value in entries.items() if name not in placed}
    return LoraParams(made, left) if left else made


def _is_leaf(node: Any) -> bool:
    """A quantized or boxed parameter is one leaf."""
    return is_box(node) or isinstance(node, WithAux | QArray)
