"""States of NNX models have the parts of a weight as nested dicts: together again, by a plan.

{'kernel': {'array': {'qvalue': ..., 'scale': ...}}}  ->  {'kernel': WithAux(QArray(...), how)}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._util import key_name
from fewbit.io.checkpoint._tree import flax_trees
from fewbit.planning import SCALE, Plan
from fewbit.qarray import (
    HowToQuantize,
    QArray,
    WithAux,
    abstract_quantized,
    pack,
    parts_of,
    to_panels,
    unpack,
    why_no_panels,
)


def parts_together(tree: Any, plan: Plan) -> Any:
    """A tree, or an NNX state, whose quantized weights are whole; other trees are as they were.

    >>> parts_together({'w': 1.5}, Plan((), (), (), kind='nnx'))
    {'w': 1.5}
    """
    if plan.kind != "nnx":
        return tree
    leaves = {leaf.path: (leaf, leaf.how) for leaf in plan.leaves if leaf.how is not None}
    scales = {scale.name + SCALE: scale.how for scale in plan.scales}

    def one(key: Any, value: Any) -> Any:
        path = key_name(key)
        if not is_wrapped(value) or not {path} & {*leaves, *scales}:
            return value
        if path in scales:
            return WithAux(value["array"], scales[path])
        leaf, how = leaves[path]
        how = how.replace(rule=leaf.rule)
        wanted = abstract_quantized(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), how)
        q = weight_of_parts(value["array"], wanted, how)
        return value if q is None else WithAux(q, how)

    flax = flax_trees()
    pure = tree if flax is None else flax.pure(tree)
    return jax.tree_util.tree_map_with_path(
        one, pure, is_leaf=lambda x: is_wrapped(x) or isinstance(x, WithAux)
    )


def is_wrapped(value: Any) -> bool:
    """Whether a node is a dict of one entry, `array`."""
    return isinstance(value, Mapping) and set(value) == {"array"}


def weight_of_parts(parts: Any, wanted: QArray, how: HowToQuantize) -> QArray | None:
    """The plain array that parts are of, which may lie packed for kernels; None if they do not."""
    if not isinstance(parts, Mapping):
        return None
    given = {name: part for name, part in parts.items() if part is not None}
    parts = {n: jnp.asarray(p) if isinstance(p, np.ndarray) else p for n, p in given.items()}
    for like in _forms(wanted, how):
        shapes = {name: tuple(part.shape) for name, part in parts_of(like).items()}
        if shapes == {name: tuple(getattr(part, "shape", ())) for name, part in parts.items()}:
            return unpack(like.of_parts(like._static, parts))
    return None


def _forms(wanted: QArray, how: HowToQuantize) -> Any:
    """How the array may lie: plain, in bytes, in panels."""
    yield wanted
    yield pack(wanted)
    if how.roles is not None and why_no_panels(wanted, how.roles) is None:
        yield to_panels(wanted, how.roles)
