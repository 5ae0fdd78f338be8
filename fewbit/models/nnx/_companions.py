"""Adapters of NNX models: `nnx.LoRAParam` attributes beside the weight, on its own module."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from fewbit.adapters import DROPOUT, check_shape, factor_names, place
from fewbit.adapters import fresh as fresh_adapter
from fewbit.models._flax_parts import joined, put, whole_variable
from fewbit.models.nnx._scopes import modules
from fewbit.planning import AdapterPlan, Plan, PlanError, Request, weight_of
from fewbit.qarray import devices_of, kept_names, weight_axes
from fewbit.training import QSCALE, is_learned, started

DROPOUT_ATTRIBUTE = "lora_dropout"
_HELD = "_fewbit_adapters"

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
        weight = whole_variable(getattr(places[path], name))
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
    make = lambda key: fresh_adapter(adapter, key)  # noqa: E731
    leaves = jax.tree.leaves(value)
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    arrays = jax.eval_shape(make, key) if abstract else make(key)
    metadata = weight.get_metadata()
    made: dict[str, nnx.Variable] = {}
    for name, array in arrays.items():
        variable = nnx.LoRAParam(place(array, name, adapter, value))
        for axes, names in weight_axes(metadata).items():
            variable.set_metadata(**{axes: factor_names(names, name, adapter)})
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
    weights = dict(nnx.to_flat_state(nnx.state(joined(model))))
    mine = {path: v for path, v in flat.items() if is_adapter(path, v, weights)}
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
        weight = whole_variable(getattr(module, name)).get_value()
        put(module, name, change(plan, weight, a.get_value(), b.get_value()))
        for full in plan.names:
            delattr(module, full.rpartition("/")[2])
    for attribute in (_HELD, DROPOUT_ATTRIBUTE):
        if hasattr(clone, attribute):
            delattr(clone, attribute)
    return finish(clone)


# --- Learned scales of NNX models: `nnx.Param` attributes beside the weight, on its own module ----

_MSG_NO_MODULE_FOR_SCALE = (
    "The learned scale of '{leaf}' belongs beside it, and '{path}' is no module of the model. Keep "
    "the parameter as an attribute of a module, or give it another weight_calibration_method in a "
    "rule before this one."
)


class LearnedScale(nnx.Param):
    """The scale of the weight beside it, which training fits."""


def add_scales(
    model: nnx.Module, requests: Mapping[str, Request], *, replace: bool = False
) -> nnx.Module:
    """A scale beside each weight that is to learn it; those that are there stay, unless told."""
    places = dict(modules(model))
    for leaf, request in requests.items():
        if not is_learned(request.how):
            continue
        path, _, name = leaf.rpartition("/")
        if path not in places:
            raise PlanError(_MSG_NO_MODULE_FOR_SCALE.format(leaf=leaf, path=path))
        module = places[path]
        old = getattr(module, name + QSCALE, None)
        if isinstance(old, LearnedScale) and not replace:
            continue
        fresh = _fresh(getattr(module, name), request.how)
        if isinstance(old, LearnedScale):
            old.set_value(fresh.get_value())
        else:
            setattr(module, name + QSCALE, fresh)
    return model


def _fresh(weight: nnx.Variable, how: Any) -> LearnedScale:
    value = weight.get_value()
    scale = started(value, how)
    variable = LearnedScale(scale)
    metadata = weight.get_metadata()
    for axes, names in weight_axes(metadata).items():
        own = kept_names(names, scale.shape, value.shape, devices_of(metadata))
        variable.set_metadata(**{axes: own})
    return variable


def take_scales(model: nnx.Module) -> dict[str, Any]:
    """The learned scales of a model by name, taken out of it."""
    found = {}
    for path, module in modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, LearnedScale):
                found[f"{path}/{name}" if path else name] = value.get_value()
                delattr(module, name)
    return found
