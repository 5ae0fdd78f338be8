"""Front ends: how each kind of model becomes a pure function and back.

A front end is loaded when a model of its kind is first seen; `import fewbit` loads none.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from fewbit._util import describe, is_array_like
from fewbit.interpreter import UntraceableModelError
from fewbit.planning import Plan
from fewbit.providers import PtqProvider, QuantizationProvider
from fewbit.rules import QuantizationRule

# --- Arguments in the wrong order, told before JAX trips over them --------------------------------

_MSG_PLAN = (
    "fewbit.plan takes the model first, its rules second and the inputs after them; here the rules "
    "are argument {place}, and argument 2 is {found}. Write {fixed}."
)
_MSG_PROVIDER = "quantize_model takes a provider as its second argument, got {found}. {fix}"
_MSG_PARAMS_FIRST = (
    "The first input of a function is its parameters, here {first}; input {place} is {other}. If "
    "that one is the parameters, write {fixed}, with a function that takes them first (make one "
    "by lambda params, x: ...)."
)
_MSG_NO_PARAMS = (
    "{kind} brings its own parameters, and input {place} is {other}. If those are its parameters, "
    "leave them out: {fixed}."
)
_MSG_FAILED = "{what} could not be run on these inputs: {kind}: {error} {hint}"


def is_rules(value: Any) -> bool:
    """Whether a value can only be meant as rules: a rule, some rules, or a provider.

    >>> is_rules([QuantizationRule()]), is_rules([]), is_rules({'w': 1.0})
    (True, False, False)
    """
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, QuantizationRule) for item in value)
    return isinstance(value, QuantizationRule | QuantizationProvider)


def check_rules(model: Any, rules: Any, inputs: Sequence[Any]) -> None:
    """Raise if the rules stand somewhere else among the arguments of `plan`."""
    if is_rules(rules):
        return
    for place, value in ((1, model), *enumerate(inputs, start=3)):
        if is_rules(value):
            fixed = "fewbit.plan(model, rules, *inputs)"
            if place > 2 and _is_function(model):
                fixed = f"fewbit.plan({_name(model)}, rules, params, *inputs)"
            raise TypeError(_MSG_PLAN.format(place=place, found=describe(rules), fixed=fixed))


def check_provider(model: Any, provider: Any, inputs: Sequence[Any]) -> None:
    """Raise if the second argument of `quantize_model` is not a provider."""
    if isinstance(provider, QuantizationProvider):
        return
    fix = "Write quantize_model(model, PtqProvider(rules), ...)."
    if isinstance(model, QuantizationProvider):
        fix = "The model comes first: quantize_model(model, provider, ...)."
    elif is_rules(model):
        fix = f"The model comes first: {fix[6:]}"
    elif any(isinstance(value, QuantizationProvider) for value in inputs):
        fix = "The inputs come after it: quantize_model(model, provider, *inputs)."
    elif isinstance(provider, type) and issubclass(provider, QuantizationProvider):
        fix = f"Make one of it: quantize_model(model, {provider.__name__}(rules), ...)."
    elif isinstance(provider, Plan):
        fix = "Write quantize_model(model, PtqProvider(plan.rules), ...)."
    found = f"a {type(provider).__name__}" if is_rules(provider) else describe(provider)
    raise TypeError(_MSG_PROVIDER.format(found=found, fix=fix))


@contextmanager
def suspect_order(call: str, model: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Where a call fails on inputs that look exchanged, say so beside the error."""
    try:
        yield
    except Exception as error:
        hint = _hint(call, model, inputs)
        # What Python and JAX say to a wrong kind of value; any other error speaks for itself.
        bare = isinstance(error, TypeError | LookupError | AttributeError)
        if hint is None or not (bare or _is_function(model)):
            raise
        if isinstance(error, UntraceableModelError) or not (bare and _is_function(model)):
            error.add_note(hint)  # it may be caught by its type, which therefore stays
            raise
        first_line = str(error).strip().split("\n")[0][:200].rstrip(".") + "."
        text = _MSG_FAILED.format(
            what=_name(model), kind=type(error).__name__, error=first_line, hint=hint
        )
        raise TypeError(text) from error


def _hint(call: str, model: Any, inputs: Sequence[Any]) -> str | None:
    second = "rules" if call == "plan" else "provider"
    trees = [place for place, value in enumerate(inputs, start=1) if _is_tree_of_arrays(value)]
    if not trees:
        return None
    place = trees[0]
    other = describe(inputs[place - 1])
    if not _is_function(model):
        rest = "x" if call == "plan" or "nnx" in _framework(model) else ""
        fixed = f"fewbit.{call}(model, {second}{', ' * bool(rest)}{rest})"
        kind = f"{type(model).__name__} (a Flax module)"
        return _MSG_NO_PARAMS.format(kind=kind, place=place, other=other, fixed=fixed)
    if place == 1 or not is_array_like(inputs[0]):
        return None
    fixed = f"fewbit.{call}({_name(model)}, {second}, params, x)"
    first = describe(inputs[0])
    return _MSG_PARAMS_FIRST.format(first=first, place=place, other=other, fixed=fixed)


def _is_tree_of_arrays(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    leaves = jax.tree.leaves(value)
    return bool(leaves) and any(is_array_like(leaf) for leaf in leaves)


def _is_function(model: Any) -> bool:
    return callable(model) and not _framework(model)


def _framework(model: Any) -> str:
    """The module of Flax that a model's class comes from, if any; Flax is not imported here."""
    homes = (cls.__module__ for cls in type(model).__mro__)
    return next((home for home in homes if home.startswith("flax.")), "")


def _name(model: Any) -> str:
    name = getattr(model, "__name__", type(model).__name__)
    return "f" if name == "<lambda>" else name


# --- Front ends: how each kind of model becomes a pure function and back --------------------------

_MSG_TYPE = (
    "Unsupported model type: {found}. fewbit takes a Flax Linen module, a Flax NNX module, a Keras "
    "model or a function f(params, *args).{fix}"
)

_MSG_HOLDS_PARAMS = (
    "This {name} holds its parameters itself, as a pytree. Make it the first argument of a "
    "function and pass it as the parameters: f = lambda model, x: model(x), then "
    "fewbit.plan(f, rules, model, x) and fewbit.quantize_params(model, plan)."
)

_MSG_STATS = (
    "quantize_model of a {kind} makes no parameters, so it has no place for quant_stats. They go "
    "with the parameters: quantize_params(params, fewbit.plan(model, rules, ...), quant_stats). "
    "Only an NNX model holds its own."
)
_MSG_STATS_KERAS = (
    "A Keras model takes no quant_stats: it is calibrated as it is quantized, "
    "fewbit.quantize_model(model, config, calib_function)."
)

_KINDS = (("flax.linen", "Module", "linen"), ("flax.nnx", "Module", "nnx"))


def is_keras(model: Any) -> bool:
    """Whether this is a Keras model or layer."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Layer)


def is_nnx(model: Any) -> bool:
    """Whether this is a Flax NNX module."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def front_end(model: Any) -> Any:
    """The module of `fewbit.models` that handles this model."""
    if "flax.serialization" in sys.modules:
        importlib.import_module("fewbit.models._flax_files").register()
    for framework, base, name in _KINDS:
        loaded = sys.modules.get(framework)
        if loaded is not None and isinstance(model, getattr(loaded, base)):
            return importlib.import_module(f"fewbit.models.{name}")
    if is_keras(model):
        return importlib.import_module("fewbit.keras")  # under the name that its users import
    if callable(model) and not isinstance(model, type):
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model)):
            raise ValueError(_MSG_HOLDS_PARAMS.format(name=type(model).__name__))
        return importlib.import_module("fewbit.models.function")
    if isinstance(model, type):
        fix = f" Pass an instance: {model.__name__}(...)."
    elif is_rules(model):
        fix = " The model comes first: fewbit.plan(model, rules, *inputs)."
    elif isinstance(model, Mapping | list | tuple):
        fix = " Parameters are quantized by quantize_params(params, plan)."
    else:
        fix = ""
    raise ValueError(_MSG_TYPE.format(found=type(model), fix=fix))


def quantize_model(
    model: Any,
    provider: QuantizationProvider,
    *model_inputs: Any,
    methods: Sequence[str] = ("__call__",),
    quant_stats: Any = None,
    **model_inputs_kwargs: Any,
) -> Any:
    """A quantized model from a float one, which stays usable.

    Linen modules and plain functions take no inputs (their parameters are quantized by
    `quantize_params`); an NNX module holds its parameters, so example inputs (abstract ones are
    enough) are needed to find them: `quantize_model(model, provider, x)`, and `quant_stats=stats`
    with the statistics of `fewbit.calibrate` for rules with `act_static_scale=True`. A Keras model
    takes `(model, config, calib_function, inplace)`, see `fewbit.keras.quantize_model`.

    >>> import fewbit, jax.numpy as jnp
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8')]
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(3)}, jnp.ones((2, 3))
    >>> qparams = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    >>> qf = quantize_model(f, fewbit.PtqProvider(rules))
    >>> print(qf(qparams, x)[0].round(2))
    [1. 1. 1.]
    """
    if is_keras(model):
        if quant_stats is not None:
            raise TypeError(_MSG_STATS_KERAS)
        return front_end(model).quantize_model(
            model, provider, *model_inputs, **model_inputs_kwargs
        )
    check_provider(model, provider, model_inputs)
    kind = front_end(model)
    if quant_stats is not None:
        if not hasattr(kind, "HOLDS_PARAMS"):
            name = "Linen module" if kind.__name__.endswith(".linen") else "function"
            raise TypeError(_MSG_STATS.format(kind=name))
        model_inputs_kwargs["quant_stats"] = quant_stats
    with suspect_order("quantize_model", model, model_inputs):
        return kind.quantize(
            model, provider, *model_inputs, methods=tuple(methods), **model_inputs_kwargs
        )


def plan(
    model: Any,
    rules: Iterable[QuantizationRule] | QuantizationProvider | None = None,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    strict: bool = True,
    **kwargs: Any,
) -> Plan:
    """What would happen to `model` under `rules`, before anything does. Needs no weights.

    Inputs are the model's own; for a plain function the parameter tree comes first. Abstract values
    (`jax.ShapeDtypeStruct`, `jax.eval_shape`, `nnx.eval_shape`) are enough. `rngs` are an NNX
    method's own argument, and those of `apply` for Linen. `rules` may be a provider, and for a
    Keras model a config; it was built for its inputs and needs none here. Of a quantized Keras
    model, `plan(model)` tells what was done to it.

    >>> import fewbit, jax
    >>> f = lambda params, x: x @ params['w']
    >>> w, x = jax.ShapeDtypeStruct((64, 32), 'float32'), jax.ShapeDtypeStruct((8, 64), 'float32')
    >>> p = plan(f, [fewbit.QuantizationRule(weight_qtype='int8')], {'w': w}, x)
    >>> [(row.site.id, row.weight_qtype, row.granularity) for row in p.sites]
    [('w:dot_general0', 'int8', 'per-channel')]
    >>> p.totals.bytes_before, p.totals.bytes_after
    (8192, 2176)
    """
    if is_keras(model):
        return front_end(model).plan(model, rules)
    check_rules(model, rules, inputs)
    given: Any = rules  # PtqProvider itself says what is wrong with None
    provider = rules if isinstance(rules, QuantizationProvider) else PtqProvider(given)
    kind = front_end(model)
    with suspect_order("plan", model, inputs):
        return kind.plan(model, provider, *inputs, methods=tuple(methods), strict=strict, **kwargs)
