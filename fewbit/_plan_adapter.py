"""The plan of one low-rank adapter: which parameter it adds to, and how its two factors lie.

A parameter W has the adapter (alpha / rank) * A B. The leaf's axes are cut into atoms (`split`);
each axis of A and B is a group of atoms, so that the update of the leaf can be said whatever
reshaping and transposing stands between the leaf and its product.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from fewbit.rules import LoraRule

LORA_A, LORA_B = "_lora_a", "_lora_b"

Groups = tuple[tuple[int, ...], ...]  # axes of a factor: the atoms that each is made of


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter of the parameter `leaf`, shaped for the Site `site`.

    A has the axes `stack`, `batch`, `inner`, rank; B has `stack`, `batch`, rank, `outer`. `stack`
    are layers of a scan, `batch` the experts of a ragged product or batch axes of a product.

    >>> rule = LoraRule(rank=2, alpha=4.0)
    >>> plan = AdapterPlan('up/kernel', 'up:dot_general0', 'dot_general', (6, 8), (6, 8), (), (),
    ...                    ((0,),), ((1,),), 'float32', rule)
    >>> plan.a_shape, plan.b_shape, plan.scale, plan.names
    ((6, 2), (2, 8), 2.0, ('up/kernel_lora_a', 'up/kernel_lora_b'))
    """

    leaf: str
    site: str
    op: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    stack: Groups
    batch: Groups
    inner: Groups
    outer: Groups
    dtype: str
    rule: LoraRule

    def __post_init__(self) -> None:
        for name in ("shape", "split"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("stack", "batch", "inner", "outer"):
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))

    @property
    def names(self) -> tuple[str, str]:
        return self.leaf + LORA_A, self.leaf + LORA_B

    @property
    def rank(self) -> int:
        return self.rule.rank

    @property
    def scale(self) -> float:
        return self.rule.alpha / self.rule.rank

    @property
    def a_shape(self) -> tuple[int, ...]:
        return (*self._sizes(self.stack + self.batch + self.inner), self.rank)

    @property
    def b_shape(self) -> tuple[int, ...]:
        front, back = self._sizes(self.stack + self.batch), self._sizes(self.outer)
        return (*front, self.rank, *back)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each factor, by its name."""
        return dict(zip(self.names, (self.a_shape, self.b_shape), strict=True))

    @property
    def bytes(self) -> int:
        return (prod(self.a_shape) + prod(self.b_shape)) * jnp.dtype(self.dtype).itemsize

    @property
    def geometry(self) -> tuple[Any, ...]:
        """How the factors lie: Sites with the same one can use them as they are."""
        return self.split, self.stack, self.batch, self.inner, self.outer

    def _sizes(self, groups: Groups) -> tuple[int, ...]:
        return tuple(prod(self.split[i] for i in group) for group in groups)

    def leaf_axes(self, group: Sequence[int]) -> tuple[int, ...]:
        """The axes of the leaf that an axis of a factor is made of."""
        ends, axis, left = [], 0, 1
        for size in self.split:
            while left == 1:
                left, axis = self.shape[axis], axis + 1
            left //= size
            ends.append(axis - 1)
        return tuple(dict.fromkeys(ends[i] for i in group))

    def product(self, a: Any, b: Any, *, one_layer: bool = False) -> jax.Array:
        """A B in the shape of the leaf, or of one layer of it; without the factor alpha / rank.

        >>> rule = LoraRule(rank=1, alpha=1.0)
        >>> plan = AdapterPlan('w', 'w:dot_general0', 'dot_general', (2, 2, 3), (2, 2, 3), (), (),
        ...                    ((0, 1),), ((2,),), 'float32', rule)
        >>> plan.product(jnp.ones((4, 1)), jnp.ones((1, 3))).shape
        (2, 2, 3)
        """
        atoms = lambda groups: [i for group in groups for i in group]  # noqa: E731
        stack = [] if one_layer else atoms(self.stack)
        front = stack + atoms(self.batch)
        left, right = front + atoms(self.inner), atoms(self.outer)
        size = self.split.__getitem__
        a = a.reshape(*map(size, left), self.rank)
        b = b.reshape(*map(size, front), self.rank, *map(size, right))
        name = string.ascii_letters.__getitem__
        word = lambda numbers: "".join(map(name, numbers))  # noqa: E731
        r = name(len(self.split))
        out = sorted({*left, *right})
        spec = f"{word(left)}{r},{word(front)}{r}{word(right)}->{word(out)}"
        whole = jnp.einsum(spec, a, b, preferred_element_type=a.dtype)
        return whole.reshape(self.layer_shape if one_layer else self.shape)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The leaf's shape without the axes of the stack."""
        gone = {axis for group in self.stack for axis in self.leaf_axes(group)}
        return tuple(n for axis, n in enumerate(self.shape) if axis not in gone)
