"""Adapters merged into their base: W + (alpha / rank) * A B, float or stored as W was.

Requantizing rounds again, so what was trained is not exactly what is stored: the report says by how
much, leaf by leaf.
"""

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import _text
from fewbit._plan_adapter import AdapterPlan
from fewbit.adapter_init import check_leaf, check_plan
from fewbit.adapter_run import check_adapters
from fewbit.adapter_trees import leaves_by_path, map_leaves, split_adapters
from fewbit.boxes import box_parts, is_box, unbox_parts, unboxed
from fewbit.layouts import for_kernels
from fewbit.models import is_nnx
from fewbit.modes.ptq import PtqProvider
from fewbit.numerics import qtype_name
from fewbit.qarray import QArray, WithAux, dequantize, quantize_with
from fewbit.rules import LoraRule, QuantizationRule

_MSG_NO_PLAN = (
    "merge_lora of a parameter tree needs the plan that says how each adapter lies: "
    "merge_lora(params, plan) with plan = fewbit.plan(model, provider, *inputs)."
)
_MSG_NO_ADAPTERS = (
    "This {name} has no adapters to merge. merge_lora takes a model that "
    "fewbit.apply_lora_to_model(model, provider, x, rngs=...) made."
)


@dataclass(frozen=True)
class MergedLeaf:
    """One merged weight: `error` is that of storing it, `update` the adapter's size, relative."""

    path: str
    stored: str
    error: float
    update: float


@dataclass(frozen=True)
class MergeReport:
    """What merging did, leaf by leaf. Errors are relative: |stored - exact| / |exact|.

    >>> report = MergeReport((MergedLeaf('up/kernel', 'int8', 0.0042, 0.1),))
    >>> report.worst.path, report.worst.error
    ('up/kernel', 0.0042)
    >>> print(report)
    weight     stored as  adapter/weight     error
    ──────────────────────────────────────────────
    up/kernel  int8             1.00e-01  4.20e-03
    """

    leaves: tuple[MergedLeaf, ...]

    @property
    def worst(self) -> MergedLeaf:
        """The leaf with the largest error."""
        return max(self.leaves, key=lambda leaf: leaf.error)

    def __str__(self) -> str:
        rows = [(m.path, m.stored, f"{m.update:.2e}", f"{m.error:.2e}") for m in self.leaves]
        header = ("weight", "stored as", "adapter/weight", "error")
        return _text.table(rows, header, "mlrr", _text.terminal_width())


def base_rules(
    rules: Iterable[QuantizationRule], *, quantized: bool = True
) -> list[QuantizationRule]:
    """The rules of the base alone, for the model after merging or without adapters.

    With `quantized=False` weights that had an adapter are float.

    >>> base_rules([LoraRule(rank=8, alpha=16.0, weight_qtype='nf4', tile_size=64)])
    [QuantizationRule(weight_qtype='nf4', tile_size=64)]
    """
    return [_base_rule(rule, quantized) if isinstance(rule, LoraRule) else rule for rule in rules]


def _base_rule(rule: LoraRule, quantized: bool) -> QuantizationRule:
    names = {field.name for field in fields(QuantizationRule)}
    if not quantized:
        names = {"module_path", "op_names"}
    return QuantizationRule(**{name: getattr(rule, name) for name in names})


def merge_lora(model_or_params: Any, plan: Any = None, *, requantize: bool = True) -> Any:
    """The base with its adapters merged in, and a `MergeReport` of the error.

    A quantized weight is stored again as it was (`requantize=False`: as a float array); a float one
    stays float. Parameters come back without adapters, for the float model or
    `PtqProvider(fewbit.lora.base_rules(rules))`; an NNX model as one that needs no adapters.

    >>> import fewbit
    >>> f = lambda params, x: x @ params['w']
    >>> provider = fewbit.LoraProvider(rank=2, alpha=4.0, lora_b_initializer='ones')
    >>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
    >>> plan = fewbit.plan(f, provider, params, x)
    >>> params = fewbit.lora.init(plan, params, jax.random.key(0))
    >>> merged, report = merge_lora(params, plan)
    >>> bool(jnp.allclose(f(merged, x), fewbit.apply_lora_to_model(f, provider)(params, x)))
    True
    >>> report.worst.error < 1e-6
    True
    """
    report: list[MergedLeaf] = []

    def change(adapter: AdapterPlan, weight: Any, a: Any, b: Any) -> Any:
        merged, entry = _merged(adapter, weight, a, b, requantize)
        report.append(entry)
        return merged

    if is_nnx(model_or_params):
        made = _merge_nnx(model_or_params, change, requantize)
        return made, MergeReport(tuple(report))
    if plan is None:
        raise TypeError(_MSG_NO_PLAN)
    check_plan("merge_lora", plan)
    rest, factors = split_adapters(model_or_params)
    values = {name: unboxed(v) if is_box(v) else v for name, v in factors.items()}
    plans = {adapter.leaf: adapter for adapter in plan.adapters}
    check_adapters(plans, values, strict=True)
    there = leaves_by_path(rest)
    for adapter in plan.adapters:
        check_leaf(adapter, there)

    def leaf(path: str, value: Any) -> Any:
        if path not in plans:
            return value
        return change(plans[path], value, *(values[name] for name in plans[path].names))

    return map_leaves(leaf, rest), MergeReport(tuple(report))


def _merge_nnx(model: Any, change: Any, requantize: bool) -> Any:
    adapters, home = (
        importlib.import_module(f"fewbit.models.{m}") for m in ("nnx_adapters", "nnx")
    )
    if not adapters.plans(model):
        raise ValueError(_MSG_NO_ADAPTERS.format(name=type(model).__name__))
    rules = base_rules(type(model)._fewbit_provider.rules, quantized=requantize)
    stored = any(rule.weight_qtype is not None for rule in rules)
    provider = PtqProvider(rules) if stored else None
    return adapters.merged(model, change, lambda clone: home.with_provider(clone, provider))


def _merged(
    adapter: AdapterPlan, weight: Any, a: Any, b: Any, requantize: bool
) -> tuple[Any, MergedLeaf]:
    """A weight with its adapter in it, stored as it was, and how well."""
    how = weight.how if isinstance(weight, WithAux) else None
    array = weight.array if isinstance(weight, WithAux) else weight
    box = next((part for part in (array, getattr(array, "qvalue", None)) if is_box(part)), None)
    if isinstance(array, QArray):
        array = unbox_parts(array)
        base, dtype = dequantize(array, jnp.float32), array.dtype
    else:
        array = unboxed(array) if is_box(array) else array
        base, dtype = jnp.asarray(array, jnp.float32), array.dtype
    update = adapter.product(a.astype(jnp.float32), b.astype(jnp.float32)) * jnp.float32(
        adapter.scale
    )
    exact = base + update
    made: Any = exact.astype(dtype)
    read, stored = made.astype(jnp.float32), str(dtype)
    if isinstance(array, QArray) and how is not None and requantize:
        q = quantize_with(made, how.replace(rule=None))
        read, stored = dequantize(q, jnp.float32), qtype_name(q.qtype)
        if array.layout == "panels":
            q = for_kernels(q, how)
        rule = how.rule
        if isinstance(rule, LoraRule):
            how = how.replace(rule=_base_rule(rule, True))
        made = WithAux(q if box is None else box_parts(q, box), how)
    elif box is not None:
        made = box.replace_boxed(made)
    entry = MergedLeaf(
        adapter.leaf, stored, _relative(read - exact, exact), _relative(update, base)
    )
    return made, entry


def _relative(part: jax.Array, whole: jax.Array) -> Any:
    """A number; inside a transformation of JAX one that is still to be computed."""
    error, size = (jnp.linalg.norm(x.reshape(-1)) for x in (part, whole))
    if isinstance(size, jax.core.Tracer):
        return jnp.where(size > 0, error / size, jnp.inf)
    return float(error) / float(size) if float(size) else math.inf
