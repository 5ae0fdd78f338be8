"""The Plan: what will happen to every Site and every parameter of a model, as a value.

Tracing finds the Sites, the planner decides, and everything after that only executes a Plan. So a
Plan holds no arrays and no functions: it prints, compares, hashes, and goes to JSON and back.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from fewbit._scales import scale_type
from fewbit._text import human_bytes, human_count
from fewbit.calibration import parse_method
from fewbit.numerics import format_of
from fewbit.qarray import HowToQuantize, get_scale_shape

if TYPE_CHECKING:
    from fewbit._plan_adapter import AdapterPlan
    from fewbit._plan_diff import PlanDiff
    from fewbit.rules import QuantizationRule


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype of an operand.

    >>> str(ArrayInfo((32, 64), "float32"))
    'float32[32,64]'
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(_size(size) for size in self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def _size(size: Any) -> Any:
    """A plain int; a symbolic size of `jax.export` stays what it is."""
    return int(size) if isinstance(size, int | np.integer) else size


@dataclass(frozen=True)
class Site:
    """One product or look-up in the traced model: where it stands and what it works on.

    `index` counts the ops of that name within the module, in call order. `macs` is multiply-adds,
    with loop trip counts multiplied in.

    >>> info = ArrayInfo((4, 4), "float32")
    >>> site = Site("mlp/up", "dot_general", 0, lhs=info, rhs=info, out=info, macs=64)
    >>> site.op_id, site.id
    ('dot_general0', 'mlp/up:dot_general0')
    """

    path: str
    op: str
    index: int
    method: str = "__call__"
    class_name: str = ""
    _: KW_ONLY
    lhs: ArrayInfo
    rhs: ArrayInfo
    out: ArrayInfo
    macs: int
    trips: int = 1
    weight: str | None = None
    weight_side: str | None = None
    spec: str = ""

    @property
    def op_id(self) -> str:
        """Op name and number: the name that statistics and static scales carry in checkpoints."""
        return f"{self.op}{self.index}"

    @property
    def id(self) -> str:
        """The Site's name, unique in a Plan; methods other than `__call__` come first."""
        prefix = "" if self.method == "__call__" else f"{self.method}."
        return f"{prefix}{self.path}:{self.op_id}"


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
        object.__setattr__(self, "shape", tuple(_size(size) for size in self.shape))
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
        object.__setattr__(self, "shape", tuple(_size(size) for size in self.shape))

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
    total = math.prod(shape[:-1]) * _bytes_of(last, row.bits)
    scale_dtype = row.scale_dtype or scale_type(dtype, how.scale_dtype)
    scales = math.prod(get_scale_shape(tuple(shape), how))
    total += scales * jnp.dtype(scale_dtype).itemsize
    if parse_method(how.calibration_method).asymmetric:
        total += _bytes_of(scales, _storage_bits(row.storage))
    if row.name == "nvfp4":
        total += 4  # the second-level scale, one float32
    return total


def _bytes_of(count: int, bits: int) -> int:
    return -(-count * bits // 8)


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


@dataclass(frozen=True)
class Plan:
    """Everything that will be done to a model. Print it, save it, compare it, then execute it.

    >>> plan = Plan(rules=(), sites=(), leaves=(), kind="function")
    >>> plan.totals.sites, Plan.from_json(plan.to_json()) == plan
    (0, True)
    """

    rules: tuple[QuantizationRule, ...]
    sites: tuple[SitePlan, ...]
    leaves: tuple[LeafPlan, ...]
    notes: tuple[str, ...] = ()
    unmatched_rules: tuple[int, ...] = ()
    kind: str = "function"
    methods: tuple[str, ...] = ("__call__",)
    scales: tuple[ScalePlan, ...] = ()
    adapters: tuple[AdapterPlan, ...] = ()

    def __post_init__(self) -> None:
        lists = ("rules", "sites", "leaves", "notes", "unmatched_rules", "methods", "scales")
        for name in (*lists, "adapters"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    # Plans travel as static arguments of jit, which hashes them at every call.
    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rules, self.sites, self.leaves, self.kind, self.methods))

    def __hash__(self) -> int:
        return self._hash

    @property
    def trains(self) -> bool:
        """Whether it is of a model that trains: gradients are planned, parameters stay float."""
        return any(site.dlhs is not None or site.drhs is not None for site in self.sites)

    @functools.cached_property
    def _leaf_by_path(self) -> dict[str, LeafPlan]:
        return {leaf.path: leaf for leaf in self.leaves}

    def leaf(self, path: str) -> LeafPlan:
        """The plan of the parameter at `path`; an unknown path raises and names the nearest."""
        if path in self._leaf_by_path:
            return self._leaf_by_path[path]
        close = difflib.get_close_matches(path, list(self._leaf_by_path), n=3, cutoff=0.4)
        near = f" The nearest are {', '.join(map(repr, close))}." if close else ""
        raise KeyError(
            f"The plan has no parameter {path!r} among its {len(self.leaves)}.{near} "
            "plan.leaves lists them all."
        )

    def how(self, path: str) -> HowToQuantize | None:
        """How the parameter at `path` is quantized, None when it stays as it is."""
        return self.leaf(path).how

    @functools.cached_property
    def totals(self) -> Totals:
        quantized = [leaf for leaf in self.leaves if leaf.how is not None]
        weights = sum(leaf.size for leaf in quantized)
        bits = 8 * sum(leaf.bytes_after for leaf in quantized)
        macs = sum(plan.site.macs for plan in self.sites)
        quantized_macs = sum(plan.site.macs for plan in self.sites if plan.quantized)
        return Totals(
            parameters=sum(leaf.size for leaf in self.leaves),
            quantized_parameters=weights,
            bytes_before=sum(leaf.bytes_before for leaf in self.leaves),
            bytes_after=sum(leaf.bytes_after for leaf in self.leaves),
            bits_per_weight=bits / weights if weights else 0.0,
            share_of_macs=quantized_macs / macs if macs else 0.0,
            sites=len(self.sites),
            quantized_sites=sum(plan.quantized for plan in self.sites),
        )

    def to_json(self) -> str:
        """The Plan as a JSON document that `Plan.from_json` reads back to an equal Plan."""
        from fewbit._plan_json import plan_to_json

        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The Plan that `to_json` wrote."""
        from fewbit._plan_json import plan_from_json

        return plan_from_json(text)

    def table(self, *, fold: bool = True, width: int | None = None) -> str:
        """The Plan as text of the terminal's width; `fold=False` gives every layer its own row."""
        from fewbit._plan_table import render

        return render(self, fold=fold, width=width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        from fewbit._plan_table import render_html

        return render_html(self)

    def diff(self, other: Plan) -> PlanDiff:
        """What `other` does differently."""
        from fewbit._plan_diff import diff_plans

        if not isinstance(other, Plan):
            raise TypeError(
                f"plan.diff compares with another plan, not a {type(other).__name__}: "
                "plan.diff(fewbit.plan(model, other_rules, *inputs)), or Plan.from_json(text)."
            )
        return diff_plans(self, other)
