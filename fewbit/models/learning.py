"""Learned scales for parameters that are there: QAT that begins with a float checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from fewbit._errors import describe
from fewbit.adapter_trees import leaves_by_path
from fewbit.boxes import is_box, kept_names, unboxed
from fewbit.decisions import Request
from fewbit.learned_scales import is_learned, put_learned, started
from fewbit.models import front_end, is_keras
from fewbit.models.planning import plan_runs
from fewbit.training.learned import QSCALE

_MSG_NOT_TRAINED = (
    "add_learned_scales takes a model that quantize_model(model, QtProvider(rules)) made, got "
    "{found}. Write model = fewbit.quantize_model(model, fewbit.QtProvider(rules)) first."
)
_MSG_NO_RULE = (
    "No rule of this model learns scales. Write weight_calibration_method='learned' in a QtRule; "
    "its rules are {rules!r}."
)
_MSG_INPUTS = (
    "add_learned_scales needs to know on what {name} is called: add_learned_scales(model, params, "
    "*inputs). Abstract inputs do."
)


def add_learned_scales(
    model: Any,
    params: Any = None,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    **kwargs: Any,
) -> Any:
    """The parameters with a scale `<w>_qscale` beside each weight whose rule learns it.

    `model` is one of `QtProvider`, `params` are float parameters (for Linen those alone, or all
    variables), `inputs` the model's own; abstract ones do. Scales start from the weights as the
    rule says ('learned,<start>'); any that are there are replaced. An NNX model holds its
    parameters: `add_learned_scales(model, None, *inputs)` starts its scales anew, in place, for
    weights that were loaded after `quantize_model`.

    >>> import fewbit, jax.numpy as jnp
    >>> rules = [fewbit.QtRule(weight_qtype='int2', weight_calibration_method='learned')]
    >>> f = fewbit.quantize_model(lambda p, x: x @ p['w'], fewbit.QtProvider(rules))
    >>> params, x = {'w': jnp.linspace(-1, 1, 12).reshape(4, 3)}, jnp.ones((2, 4))
    >>> params = add_learned_scales(f, params, x)
    >>> params['w_qscale'].shape, f(params, x).shape
    ((1, 3), (2, 3))
    """
    kind = None if is_keras(model) else front_end(model)
    trained = None if kind is None else kind.trained(model)
    if trained is None or kind is None:
        raise TypeError(_MSG_NOT_TRAINED.format(found=describe(model)))
    provider, source = trained
    if not provider.learns:
        raise ValueError(_MSG_NO_RULE.format(rules=list(provider.rules)))
    if not inputs and not kwargs:
        raise ValueError(_MSG_INPUTS.format(name=type(source).__name__))
    if getattr(kind, "HOLDS_PARAMS", False):
        return kind.restart_learned(model, provider, inputs, methods, kwargs)
    whole = isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)
    linen = kind.__name__.endswith(".linen")
    run = kind.float_runs(source, provider, params)
    _, requests = plan_runs(
        [run(method, inputs, kwargs) for method in methods],
        kind="linen" if linen else "function",
        strict=provider.strict,
    )
    if linen and whole:
        return {**params, "params": with_learned(params["params"], requests)}
    return with_learned(params, requests)


def with_learned(params: Any, requests: Mapping[str, Request]) -> Any:
    """A tree with fresh scales beside the weights that are to learn them."""
    wanted = {leaf: request.how for leaf, request in requests.items() if is_learned(request.how)}
    if not wanted:
        return params
    leaves = leaves_by_path(params)
    made = {leaf + QSCALE: _fresh(leaves[leaf], how) for leaf, how in wanted.items()}
    return put_learned(params, made)


def _fresh(value: Any, how: Any) -> Any:
    """A scale as its weight's value begins it, in a box like the weight's."""
    if not is_box(value):
        return started(value, how)
    array = unboxed(value)
    scale = started(array, how)
    box = value.replace_boxed(scale)
    names = getattr(value, "names", None)
    if names is None:
        return box
    return box.replace(names=kept_names(names, scale.shape, array.shape))
