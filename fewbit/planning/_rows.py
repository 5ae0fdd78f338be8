"""The rows of a Plan: a Site, a parameter, a static scale, an adapter, and what they add up to."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import human_bytes, human_count
from fewbit.numerics import format_of, packed_length
from fewbit.qarray import HowToQuantize, get_scale_shape, parse_method, scale_type
from fewbit.rules import LoraRule, QuantizationRule
from fewbit.tracing import Site, plain_size


@dataclass(frozen=True)
class SitePlan:
    """What happens at a Site, or why nothing does (`reason`)."""

    site: Site
    rule: int | None
    weight_qtype: str | None
    act_qtype: str | None
    act_mode: str | None
    granularity: str
    runs_on: str
    reason: str | None
    notes: tuple[str, ...] = ()
    dlhs: str | None = None  # in training: what the gradient of lhs is multiplied from
    drhs: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))

    @property
    def quantized(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class LeafPlan:
    """What happens to a parameter: how it is stored, its bytes before and after, who uses it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    how: HowToQuantize | None
    bytes_before: int
    bytes_after: int
    sites: tuple[str, ...]
    rule: QuantizationRule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(plain_size(size) for size in self.shape))
        object.__setattr__(self, "sites", tuple(self.sites))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ScalePlan:
    """A static activation scale: which operand of which Site it serves, and what it looks like.

    `name` is '<module>/<op_id>_lhs' (or `_rhs`); the entries among the parameters add `_scale` and
    `_zero_point`. `how` speaks of the operand's axes, `shape` is the scale's: one on the axes that
    batches differ in, with the lengths of the layer scans around the Site in front.

    >>> scale = ScalePlan("up/dot_general0_lhs", "up:dot_general0", HowToQuantize(qtype="int8"),
    ...                   (1, 1), "float32")
    >>> scale.side
    'lhs'
    """

    name: str
    site: str
    how: HowToQuantize
    shape: tuple[int, ...]
    dtype: str
    rule: QuantizationRule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(plain_size(size) for size in self.shape))

    @property
    def side(self) -> str:
        return self.name[-3:]


def stored_bytes(shape: Sequence[int], how: HowToQuantize | None, dtype: Any = "float32") -> int:
    """Bytes of an array of this shape once stored: codes at true width, scales, zero points.

    `dtype` is the array's own, which is also its scales' unless `how` names another (those of
    float16 are float32). Codes are packed along the last axis, each row starting on a byte; an
    uneven last tile has its scale too.

    >>> from fewbit.qarray import HowToQuantize
    >>> stored_bytes((64, 64), HowToQuantize(qtype="int4", channelwise_axes=(1,)), "float32")
    2304
    >>> stored_bytes((64, 64), None, "bfloat16")
    8192
    """
    if how is None:
        return math.prod(shape) * jnp.dtype(dtype).itemsize
    row = format_of(how.qtype)
    last = shape[-1] if shape else 1
    total = math.prod(shape[:-1]) * packed_length(last, row.bits)
    scale_dtype = row.scale_dtype or scale_type(dtype, how.scale_dtype)
    scales = math.prod(get_scale_shape(tuple(shape), how))
    total += scales * jnp.dtype(scale_dtype).itemsize
    if parse_method(how.calibration_method).asymmetric:
        total += packed_length(scales, _storage_bits(row.storage))
    if row.name == "nvfp4":
        total += 4  # the second-level scale, one float32
    return total


def _storage_bits(dtype: Any) -> int:
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return int(info.bits)


@dataclass(frozen=True)
class Totals:
    """A Plan in eight numbers. `bits_per_weight` counts codes, scales and zero points."""

    parameters: int
    quantized_parameters: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    share_of_macs: float
    sites: int
    quantized_sites: int

    @property
    def ratio(self) -> float:
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    def __str__(self) -> str:
        text = (
            f"{self.quantized_sites} of {self.sites} sites quantized, "
            f"{self.share_of_macs:.1%} of multiply-adds; "
            f"{human_count(self.quantized_parameters)} of {human_count(self.parameters)} parameters"
        )
        if self.quantized_parameters:
            text += f" at {self.bits_per_weight:.2f} bits each"
        sizes = f"{human_bytes(self.bytes_before)} → {human_bytes(self.bytes_after)}"
        return f"{text}; {sizes} ({self.ratio:.2f}x smaller)"


# --- The plan of one low-rank adapter -------------------------------------------------------------
# A parameter W has the adapter (alpha / rank) * A B. The leaf's axes are cut into atoms (`split`);
# each axis of A and B is a group of atoms, so that the update of the leaf can be said whatever
# reshaping and transposing stands between the leaf and its product.

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
