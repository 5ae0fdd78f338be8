"""Adapters in a parameter tree: merged into their base, told apart from it, put over another.

Merging gives W + (alpha / rank) * A B, float or stored as W was. Requantizing rounds again, so what
was trained is not exactly what is stored: the report says by how much, leaf by leaf.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import describe, table, terminal_width
from fewbit.adapters import check_adapters, check_leaf, check_plan
from fewbit.kernels import for_kernels
from fewbit.models import front_end, is_nnx
from fewbit.numerics import qtype_name
from fewbit.planning import (
    AdapterPlan,
    LoraParams,
    QuantizedParams,
    adapter_names,
    leaves_by_path,
    map_leaves,
    put_adapters,
    split_adapters,
    weight_of,
)
from fewbit.providers import PtqProvider
from fewbit.qarray import (
    QArray,
    WithAux,
    box_parts,
    dequantize,
    is_box,
    is_stored,
    quantize_with,
    unbox_parts,
    unboxed,
)
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
        return table(rows, header, "mlrr", terminal_width())


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
    every = (field.name for field in fields(QuantizationRule))
    names = every if quantized else ("module_path", "op_names")
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
        return _merge_nnx(model_or_params, change, requantize), MergeReport(tuple(report))
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
    nnx = front_end(model)
    if not nnx.plans(model):
        raise ValueError(_MSG_NO_ADAPTERS.format(name=type(model).__name__))
    rules = base_rules(type(model)._fewbit_provider.rules, quantized=requantize)
    stored = any(rule.weight_qtype is not None for rule in rules)
    provider = PtqProvider(rules) if stored else None
    return nnx.merged(model, change, lambda clone: nnx.with_provider(clone, provider))


def _merged(
    adapter: AdapterPlan, weight: Any, a: Any, b: Any, requantize: bool
) -> tuple[Any, MergedLeaf]:
    """A weight with its adapter in it, stored as it was, and how well."""
    how = weight.how if isinstance(weight, WithAux) else None
    array = weight.array if isinstance(weight, WithAux) else weight
    box = next((part for part in (array, getattr(array, "qvalue", None)) if is_box(part)), None)
    if isinstance(array, QArray):
        array = unbox_parts(array)
        base = dequantize(array, jnp.float32)
    else:
        array = unboxed(array) if is_box(array) else array
        base = jnp.asarray(array, jnp.float32)
    a, b = (factor.astype(jnp.float32) for factor in (a, b))
    update = adapter.product(a, b) * jnp.float32(adapter.scale)
    exact = base + update
    made: Any = exact.astype(array.dtype)
    read, stored = made.astype(jnp.float32), str(array.dtype)
    if isinstance(array, QArray) and how is not None and requantize:
        q = quantize_with(made, how.replace(rule=None))
        read, stored = dequantize(q, jnp.float32), qtype_name(q.qtype)
        if array.layout == "panels":
            q = for_kernels(q, how)
        if isinstance(how.rule, LoraRule):
            how = how.replace(rule=_base_rule(how.rule, True))
        made = WithAux(q if box is None else box_parts(q, box), how)
    elif box is not None:
        made = box.replace_boxed(made)
    error, size = _relative(read - exact, exact), _relative(update, base)
    return made, MergedLeaf(adapter.leaf, stored, error, size)


def _relative(part: jax.Array, whole: jax.Array) -> Any:
    """A number; inside a transformation of JAX one that is still to be computed."""
    error, size = (jnp.linalg.norm(x.reshape(-1)) for x in (part, whole))
    if isinstance(size, jax.core.Tracer):
        return jnp.where(size > 0, error / size, jnp.inf)
    return float(error) / float(size) if float(size) else math.inf


# --- Which leaves are adapters: for gradients, optimizers, and other adapters over one base -------

_MSG_NONE = (
    "fewbit.lora.mask found no adapters in {found}. They are entries '<w>_lora_a' and "
    "'<w>_lora_b' beside a weight; make them with fewbit.lora.init(plan, params, key)."
)
_MSG_NAMES = (
    "'{name}' is no adapter's name. with_adapters takes what fewbit.lora.adapters(params) gives: "
    "a mapping from '<w>_lora_a' and '<w>_lora_b' to arrays."
)
_MSG_NO_WEIGHT = (
    "'{name}' is the adapter of '{leaf}', which these parameters do not have. Give adapters of the "
    "same model."
)
_MSG_NNX = (
    "An NNX model keeps its parameters itself. Take the gradient of its adapters alone with the "
    "filter nnx.LoRAParam: nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)), "
    "nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)."
)


def adapters(params: Any) -> dict[str, Any]:
    """The adapters of a parameter tree or an NNX model, by their full names.

    >>> adapters({'up': {'w': 1, 'w_lora_a': 2, 'w_lora_b': 3}})
    {'up/w_lora_a': 2, 'up/w_lora_b': 3}
    """
    return front_end(params).adapters(params) if is_nnx(params) else split_adapters(params)[1]


def with_adapters(params: Any, new: Mapping[str, Any]) -> Any:
    """The same base with other adapters: several over one base share its arrays.

    An NNX model is cloned; the clone shares the base's arrays.

    >>> base = {'w': 1}
    >>> with_adapters(base, {'w_lora_a': 2, 'w_lora_b': 3})
    {'w': 1, 'w_lora_a': 2, 'w_lora_b': 3}
    """
    for name in new:
        if weight_of(name) is None:
            raise ValueError(_MSG_NAMES.format(name=name))
    if is_nnx(params):
        return front_end(params).with_adapters(params, new)
    there = leaves_by_path(params)
    for name in new:
        if weight_of(name) not in there:
            raise ValueError(_MSG_NO_WEIGHT.format(name=name, leaf=weight_of(name)))
    return put_adapters(params, new)


def without_adapters(params: Any) -> Any:
    """The parameters of the base alone.

    >>> without_adapters({'w': 1, 'w_lora_a': 2, 'w_lora_b': 3})
    {'w': 1}
    """
    return split_adapters(params)[0]


def mask(params: Any) -> Any:
    """A tree of bools, True for adapters: the mask for `optax.masked`.

    >>> mask({'w': 1.0, 'w_lora_a': 2.0, 'w_lora_b': 3.0, 'bias': 4.0})
    {'bias': False, 'w': False, 'w_lora_a': True, 'w_lora_b': True}
    """
    if is_nnx(params):
        raise TypeError(_MSG_NNX)
    mine = adapter_names(leaves_by_path(params))
    beside = params.adapters if isinstance(params, LoraParams) else {}
    if not mine and not beside:
        raise ValueError(_MSG_NONE.format(found=describe(params)))
    made = _without_scales(map_leaves(lambda path, value: path in mine, params))
    return LoraParams(made.params, {name: True for name in beside}) if beside else made


def _without_scales(made: Any) -> Any:
    """Static scales are no adapters."""
    if isinstance(made, LoraParams):
        return LoraParams(_without_scales(made.params), made.adapters)
    if isinstance(made, QuantizedParams):
        scales = jax.tree.map(lambda _: False, dict(made.act_scales), is_leaf=is_stored)
        return QuantizedParams(made.params, scales)
    return made


def split(params: Any) -> tuple[Any, Any]:
    """The adapters and the frozen rest: two trees like `params`, None where the other has a leaf.

    `fewbit.merge_trainable(trained, frozen)` puts them together again inside the loss.

    >>> split({'w': 1.0, 'w_lora_a': 2.0, 'w_lora_b': 3.0})[0]
    {'w': None, 'w_lora_a': 2.0, 'w_lora_b': 3.0}
    """
    chosen = mask(params)
    pick = lambda want: jax.tree.map(  # noqa: E731
        lambda mine, value: value if mine is want else None, chosen, params, is_leaf=is_stored
    )
    return pick(True), pick(False)
