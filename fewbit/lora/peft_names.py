"""Adapters under the names and in the shapes that PEFT gives them.

`base_model.model.<module>.lora_A.weight` is (rank, in), `lora_B.weight` (out, rank); those of a
convolution are convolutions (rank, in, *window) and (out, rank, 1, ...); a table that is only
looked up in has `lora_embedding_A` (rank, rows) and `lora_embedding_B` (width, rank). Layers of a
stack and experts are modules of their own there: a name has a `{}` for each such axis.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from fewbit._plan_adapter import AdapterPlan

PREFIX = "base_model.model."
_WEIGHTS = ("kernel", "weight", "embedding")  # a module's one weight: named after the module

Names = Mapping[str, str] | Callable[[str], str] | None

_MSG_UNKNOWN = (
    "names has an entry for {leaf!r}, and no adapter has that weight. The weights with adapters "
    "are {known}."
)
_MSG_PLACES = (
    "The name {name!r} for '{leaf}' needs {count} '{{}}', one for each axis of {axes}, got "
    "{found}: write for example {example!r}."
)
_MSG_TWICE = (
    "'{first}' and '{second}' both have the name {name!r}. Give each weight a name of its own."
)


def module_names(adapters: Sequence[AdapterPlan], names: Names = None) -> dict[str, str]:
    """The module of each weight in PEFT's files, by parameter path."""
    plain = {plan.leaf: _default(plan, adapters) for plan in adapters}
    if isinstance(names, Mapping):
        for leaf in names:
            if leaf not in plain:
                raise ValueError(_MSG_UNKNOWN.format(leaf=leaf, known=", ".join(plain)))
        found = {leaf: names.get(leaf, name) for leaf, name in plain.items()}
    else:
        found = {leaf: names(leaf) if names else name for leaf, name in plain.items()}
    taken: dict[str, str] = {}
    for plan in adapters:
        name, count = found[plan.leaf], len(plan.stack + plan.batch)
        if name.count("{}") != count:
            axes = "the stack" if plan.stack else "the experts"
            text = dict(name=name, leaf=plan.leaf, count=count, found=name.count("{}"), axes=axes)
            raise ValueError(_MSG_PLACES.format(**text, example=plain[plan.leaf]))
        if taken.setdefault(name, plan.leaf) != plan.leaf:
            text = dict(first=taken[name], second=plan.leaf, name=name)
            raise ValueError(_MSG_TWICE.format(**text))
    return found


def _default(plan: AdapterPlan, adapters: Sequence[AdapterPlan]) -> str:
    path, _, last = plan.leaf.rpartition("/")
    others = [a for a in adapters if a.leaf.rpartition("/")[0] == path]
    parts = (path if path and last in _WEIGHTS and len(others) == 1 else plan.leaf).split("/")
    numbered = [parts[0], *["{}"] * len(plan.stack), *parts[1:], *["{}"] * len(plan.batch)]
    return ".".join(numbered)


def entries(plan: AdapterPlan, name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """Each layer and expert of an adapter, and its module's name."""
    lead = plan.a_shape[: len(plan.stack + plan.batch)]
    for index in product(*map(range, lead)):
        yield index, name.format(*index)


def tensor_names(plan: AdapterPlan, module: str) -> tuple[str, str]:
    """What the two factors of one module are called.

    >>> from fewbit.rules import LoraRule
    >>> plan = AdapterPlan('w', 'w:take0', 'take', (9, 4), (9, 4), (), (), ((0,),), ((1,),),
    ...                    'float32', LoraRule(rank=2, alpha=4.0))
    >>> tensor_names(plan, 'wte')
    ('base_model.model.wte.lora_embedding_A', 'base_model.model.wte.lora_embedding_B')
    """
    if plan.op == "take":
        return f"{PREFIX}{module}.lora_embedding_A", f"{PREFIX}{module}.lora_embedding_B"
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def shapes(plan: AdapterPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the two tensors of one module."""
    a, b = _one(plan)
    if plan.op == "conv_general_dilated":
        *window, channels, rank = a
        return (rank, channels, *window), (b[-1], rank, *[1] * len(window))
    return (plan.rank, prod(a[:-1])), (prod(b[1:]), plan.rank)


def _one(plan: AdapterPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    many = len(plan.stack + plan.batch)
    return plan.a_shape[many:], plan.b_shape[many:]


def to_peft(plan: AdapterPlan, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """The factors of one module as PEFT keeps them."""
    a, b = np.asarray(a), np.asarray(b)
    if plan.op == "conv_general_dilated":
        wanted = shapes(plan)
        return np.moveaxis(a, (-1, -2), (0, 1)), b.T.reshape(wanted[1])
    return a.reshape(-1, plan.rank).T, b.reshape(plan.rank, -1).T


def from_peft(plan: AdapterPlan, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `to_peft`."""
    own = _one(plan)
    if plan.op == "conv_general_dilated":
        return np.moveaxis(a, (0, 1), (-1, -2)), b.reshape(b.shape[:2]).T
    return a.T.reshape(own[0]), b.T.reshape(own[1])
