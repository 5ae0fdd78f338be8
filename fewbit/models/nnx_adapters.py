"""Adapters of NNX models: `nnx.LoRAParam` attributes beside the weight, on its own module."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from fewbit import adapter_init
from fewbit._plan import Plan
from fewbit._plan_adapter import AdapterPlan
from fewbit._plan_messages import PlanError
from fewbit.adapter_run import DROPOUT, check_shape
from fewbit.adapter_trees import weight_of
from fewbit.models.nnx_scopes import modules

DROPOUT_ATTRIBUTE = "lora_dropout"
_HELD = "_fewbit_adapters"
_AXES = ("out_sharding", "sharding_names", "sharding")  # metadata that names mesh axes

_MSG_NO_RNGS = (
    "rngs must be provided for NNX models to initialize LoRA weights. Using nnx.Rngs(10003), the "
    "same weights in every run; write apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(seed))."
)
_MSG_NO_MODULE = (
    "The adapter of '{leaf}' belongs beside it, and '{path}' is no module of the model. Keep the "
    "parameter as an attribute of a module, or leave it out with a rule before this one."
)
_MSG_TAKEN = (
    "The model has an attribute '{name}' already, under which the dropout of adapters is kept. "
    "Rename it, or use dropout=0.0."
)
_MSG_UNKNOWN = (
    "The model has no adapter '{name}'. It has {names}. Give adapters of the same model and rules: "
    "fewbit.lora.adapters(model) shows their names."
)


class Held:
    """The adapters' plans, on a model's root. All are equal: they are no part of its structure.

    >>> Held(()) == Held((1,))
    True
    """

    def __init__(self, adapters: tuple[AdapterPlan, ...]):
        self.adapters = adapters

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held)

    def __hash__(self) -> int:
        return hash(Held)

    def __repr__(self) -> str:
        return f"{len(self.adapters)} adapters"


def add_adapters(model: nnx.Module, made: Plan, rngs: nnx.Rngs | None, dropout: bool) -> None:
    """Fresh adapters for a quantized model."""
    if not made.adapters:
        return
    if rngs is None:
        warnings.warn(_MSG_NO_RNGS, stacklevel=4)
        rngs = nnx.Rngs(10003)
    places = dict(modules(model))
    key = rngs.params()
    for adapter in made.adapters:
        path, _, name = adapter.leaf.rpartition("/")
        if path not in places:
            raise PlanError(_MSG_NO_MODULE.format(leaf=adapter.leaf, path=path))
        weight = getattr(places[path], name)
        for full, value in fresh(adapter, key, weight).items():
            setattr(places[path], full.rpartition("/")[2], value)
    setattr(model, _HELD, Held(made.adapters))
    if dropout:
        if hasattr(model, DROPOUT_ATTRIBUTE):
            raise PlanError(_MSG_TAKEN.format(name=DROPOUT_ATTRIBUTE))
        rate = max(adapter.rule.dropout for adapter in made.adapters)
        setattr(model, DROPOUT_ATTRIBUTE, nnx.Dropout(rate, rngs=rngs))


def fresh(adapter: AdapterPlan, key: jax.Array, weight: nnx.Variable) -> dict[str, nnx.Variable]:
    """The factors as Variables, with the mesh axes of their weight."""
    value = weight.get_value()
    make = lambda key: adapter_init.fresh(adapter, key)  # noqa: E731
    leaves = jax.tree.leaves(value)
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    arrays = jax.eval_shape(make, key) if abstract else make(key)
    metadata = weight.get_metadata()
    made: dict[str, nnx.Variable] = {}
    for name, array in arrays.items():
        variable = nnx.LoRAParam(adapter_init.place(array, name, adapter, value))
        for axes in _AXES:
            if metadata.get(axes) is not None:
                names = adapter_init.factor_names(tuple(metadata[axes]), name, adapter)
                variable.set_metadata(**{axes: names})
        made[name] = variable
    return made


def is_adapter(path: tuple[Any, ...], variable: Any, there: Mapping[Any, Any]) -> bool:
    """Whether a Variable is the factor of an adapter of another one."""
    own = weight_of(str(path[-1])) if isinstance(variable, nnx.LoRAParam) else None
    return own is not None and (*path[:-1], own) in there


def dropout_key(model: Any, provider: Any) -> dict[str, Any]:
    """A new key of the model's own stream; none after `model.eval()`."""
    if not (provider.adapts and provider.has_dropout):
        return {}
    dropout = getattr(model, DROPOUT_ATTRIBUTE, None)
    if not isinstance(dropout, nnx.Dropout) or dropout.deterministic:
        return {}
    return {DROPOUT: dropout.rngs()}


def plans(model: nnx.Module) -> tuple[AdapterPlan, ...]:
    """The plans of a model's adapters."""
    held = getattr(model, _HELD, None)
    return held.adapters if isinstance(held, Held) else ()


def _variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    mine = {path: v for path, v in flat.items() if is_adapter(path, v, flat)}
    return {"/".join(map(str, path)): variable for path, variable in mine.items()}


def adapters(model: nnx.Module) -> dict[str, Any]:
    """The values of a model's adapters, by name."""
    return {name: variable.get_value() for name, variable in _variables(model).items()}


def with_adapters(model: nnx.Module, new: Mapping[str, Any]) -> nnx.Module:
    """A clone of the model with these adapters."""
    clone = nnx.clone(model)
    there, shapes = _variables(clone), {n: p for p in plans(model) for n in p.names}
    for name, value in new.items():
        if name not in there:
            names = ", ".join(list(there)[:3]) + (", ..." if len(there) > 3 else "") or "none"
            raise ValueError(_MSG_UNKNOWN.format(name=name, names=names))
        if name in shapes:
            check_shape(name, tuple(value.shape), shapes[name])
        there[name].set_value(value)
    return clone


def merged(
    model: nnx.Module, change: Callable[[AdapterPlan, Any, Any, Any], Any], finish: Callable
) -> nnx.Module:
    """A clone without adapters whose weights are `change(plan, weight, a, b)`."""
    clone = nnx.clone(model)
    places = dict(modules(clone))
    for plan in plans(model):
        path, _, name = plan.leaf.rpartition("/")
        module = places[path]
        a, b = (getattr(module, full.rpartition("/")[2]) for full in plan.names)
        weight = getattr(module, name)
        weight.set_value(change(plan, weight.get_value(), a.get_value(), b.get_value()))
        for full in plan.names:
            delattr(module, full.rpartition("/")[2])
    for attribute in (_HELD, DROPOUT_ATTRIBUTE):
        if hasattr(clone, attribute):
            delattr(clone, attribute)
    return finish(clone)
