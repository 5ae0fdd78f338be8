"""Front ends: how each kind of model becomes a pure function and back.

A front end is loaded when a model of its kind is first seen; `import fewbit` loads none.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from fewbit._plan import Plan
from fewbit.models.argument_order import check_provider, check_rules, is_rules, suspect_order
from fewbit.modes.provider import QuantizationProvider
from fewbit.modes.ptq import PtqProvider
from fewbit.rules import QuantizationRule

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


# Its front end is a package of its own, under the name that its users import.
_KERAS = ".".join(("fewbit", "keras"))


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
        importlib.import_module("fewbit.models.flax_serialization").register()
    for framework, base, name in _KINDS:
        loaded = sys.modules.get(framework)
        if loaded is not None and isinstance(model, getattr(loaded, base)):
            return importlib.import_module(f"fewbit.models.{name}")
    if is_keras(model):
        return importlib.import_module(_KERAS)
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
