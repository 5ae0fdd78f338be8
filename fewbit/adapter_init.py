"""Fresh adapters: their values, and where they lie (boxes and shardings like their weight's)."""

import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fewbit._errors import describe
from fewbit._plan import Plan
from fewbit._plan_adapter import LORA_A, AdapterPlan
from fewbit.adapter_trees import leaves_by_path, put_adapters
from fewbit.boxes import is_box
from fewbit.qarray import QArray, WithAux

_MSG_PLAN = (
    "fewbit.lora.{name} takes a plan with adapters, got {found}. Make one with a LoraProvider: "
    "plan = fewbit.plan(model, fewbit.LoraProvider(rank=8, alpha=16.0), *inputs)."
)
_MSG_LEAF = (
    "The plan has an adapter for '{leaf}', and the parameters have no such leaf.{near} Give the "
    "parameters of the model that was planned."
)


def init(plan: Plan, params: Any, key: jax.Array) -> Any:
    """The parameters with fresh adapters beside their weights; any old ones are replaced.

    A is drawn as its rule's `lora_a_initializer` says, each layer and each expert from its own
    key, B as `lora_b_initializer`: with zeros, the default, the model starts as its base. Boxes and
    shardings follow the weight's.

    >>> import fewbit, jax.numpy as jnp
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
    >>> plan = fewbit.plan(f, fewbit.LoraProvider(rank=2, alpha=4.0), params, x)
    >>> {name: value.shape for name, value in init(plan, params, jax.random.key(0)).items()}
    {'w': (4, 4), 'w_lora_a': (4, 2), 'w_lora_b': (2, 4)}
    """
    check_plan("init", plan)
    leaves = leaves_by_path(params)
    made: dict[str, Any] = {}
    for adapter in plan.adapters:
        check_leaf(adapter, leaves)
        for name, value in fresh(adapter, key).items():
            made[name] = place(value, name, adapter, leaves[adapter.leaf])
    return put_adapters(params, made)


def check_plan(name: str, plan: Any) -> None:
    """A plan of a model with adapters."""
    if not isinstance(plan, Plan) or not plan.adapters:
        found = "a plan without any" if isinstance(plan, Plan) else describe(plan)
        raise TypeError(_MSG_PLAN.format(name=name, found=found))


def check_leaf(adapter: AdapterPlan, leaves: Mapping[str, Any]) -> None:
    """The weight of an adapter is there."""
    if adapter.leaf not in leaves:
        from difflib import get_close_matches

        near = get_close_matches(adapter.leaf, leaves, 2)
        hint = f" The nearest are {', '.join(near)}." if near else ""
        raise ValueError(_MSG_LEAF.format(leaf=adapter.leaf, near=hint))


def fresh(adapter: AdapterPlan, key: jax.Array) -> dict[str, jax.Array]:
    """The two factors, by name. Each name has its own randomness."""
    rule, made = adapter.rule, {}
    many = len(adapter.stack + adapter.batch)
    for name, shape in adapter.shapes.items():
        draw = rule.lora_a_initializer if name.endswith(LORA_A) else rule.lora_b_initializer
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        lead, one = shape[:many], shape[many:]
        if not lead:
            made[name] = draw(own, one, adapter.dtype)  # type: ignore[operator]
            continue
        keys = jax.random.split(own, prod(lead))
        each = jax.vmap(lambda k, one=one, draw=draw: draw(k, one, adapter.dtype))(keys)
        made[name] = each.reshape(shape)
    return made


# --- where they lie -------------------------------------------------------------------------------


def factor_names(names: Sequence[Any], name: str, adapter: AdapterPlan) -> tuple[Any, ...]:
    """The mesh axes of a factor, given those of its weight: each axis like the first it is made of.

    >>> from fewbit.rules import LoraRule
    >>> adapter = AdapterPlan('w', 'w:dot_general0', 'dot_general', (4, 2, 6), (4, 2, 6), (), (),
    ...                       ((0, 1),), ((2,),), 'float32', LoraRule(rank=2, alpha=4.0))
    >>> factor_names(('data', None, 'model'), 'w_lora_a', adapter)
    ('data', None)
    """
    full = (*names, *[None] * (len(adapter.shape) - len(names)))

    def of(groups):
        return [full[adapter.leaf_axes(g)[0]] if g else None for g in groups]

    front = of(adapter.stack + adapter.batch)
    if name.endswith(LORA_A):
        return (*front, *of(adapter.inner), None)
    return (*front, None, *of(adapter.outer))


def place(value: Any, name: str, adapter: AdapterPlan, weight: Any) -> Any:
    """A factor in a box like its weight's, or on the devices that its weight is on."""
    array = weight.array if isinstance(weight, WithAux) else weight
    codes = array.data if isinstance(array, QArray) else array
    if isinstance(array, QArray) and array.layout == "plain":
        codes = array.qvalue
    if is_box(codes):
        names = getattr(codes, "names", None)
        box = codes.replace_boxed(value)
        return box if names is None else box.replace(names=factor_names(names, name, adapter))
    if isinstance(codes, jax.core.Tracer) or isinstance(value, jax.core.Tracer):
        return value
    sharding = getattr(codes, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return value
    whole = tuple(codes.shape) == adapter.shape
    spec = factor_names(tuple(sharding.spec), name, adapter) if whole else ()
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
