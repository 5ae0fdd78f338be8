"""Adapters in parameter trees: `<w>_lora_a` and `<w>_lora_b` beside the weight `<w>`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from fewbit._plan_adapter import LORA_A, LORA_B
from fewbit.adapter_params import LoraParams
from fewbit.beside import owner_of, put_beside, split_beside
from fewbit.calls import key_name
from fewbit.engine import is_stored
from fewbit.params import is_box
from fewbit.static_scales import QuantizedParams

SUFFIXES = (LORA_A, LORA_B)


def weight_of(name: str) -> str | None:
    """The parameter whose adapter has this name; None for a name that is no adapter's.

    >>> weight_of('up/kernel_lora_a'), weight_of('up/kernel')
    ('up/kernel', None)
    """
    return owner_of(name, SUFFIXES)


def split_adapters(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A tree without its adapters, and these by full name.

    >>> split_adapters({'up': {'w': 1, 'w_lora_a': 2, 'w_lora_b': 3}})
    ({'up': {'w': 1}}, {'up/w_lora_a': 2, 'up/w_lora_b': 3})
    """
    if isinstance(tree, LoraParams) and isinstance(tree.params, QuantizedParams):
        rest, found = split_adapters(tree.params)
        return split_beside(LoraParams(rest, {**tree.adapters, **found}), SUFFIXES)
    if isinstance(tree, QuantizedParams):
        rest, found = split_adapters(tree.params)
        return QuantizedParams(rest, tree.act_scales), found
    return split_beside(tree, SUFFIXES)


def put_adapters(tree: Any, adapters: Mapping[str, Any]) -> Any:
    """A tree with these adapters in it, in the place of those of the same names.

    >>> put_adapters({'up': {'w': 1}}, {'up/w_lora_a': 2})
    {'up': {'w': 1, 'w_lora_a': 2}}
    """
    if isinstance(tree, QuantizedParams) and adapters:
        inner = put_adapters(tree.params, adapters)
        if isinstance(inner, LoraParams):
            return LoraParams(QuantizedParams(inner.params, tree.act_scales), inner.adapters)
        return QuantizedParams(inner, tree.act_scales)
    return put_beside(tree, adapters, SUFFIXES)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Every leaf of a tree by its path; a quantized or boxed one is one leaf."""
    while isinstance(tree, LoraParams | QuantizedParams):
        tree = tree.params
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: is_stored(x) or is_box(x)
    )
    return {key_name(key): value for key, value in flat}


def map_leaves(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """A tree with `function(path, leaf)` for each leaf."""
    if isinstance(tree, LoraParams):
        return LoraParams(map_leaves(function, tree.params), tree.adapters)
    if isinstance(tree, QuantizedParams):
        return QuantizedParams(map_leaves(function, tree.params), tree.act_scales)
    return jax.tree_util.tree_map_with_path(
        lambda key, value: function(key_name(key), value),
        tree,
        is_leaf=lambda x: is_stored(x) or is_box(x),
    )


def adapter_names(paths: Iterable[str]) -> set[str]:
    """Those of some paths that are adapters of a weight that is there too."""
    there = set(paths)
    return {path for path in there if weight_of(path) in there}
