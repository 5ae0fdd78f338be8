"""From a model that was trained quantized to the model that serves, with the same scales."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fewbit._util import describe
from fewbit.interpreter import histories_of, plan_runs
from fewbit.kernels import unpack
from fewbit.models._front_ends import front_end, is_keras, plan, quantize_model
from fewbit.params import quantize_params
from fewbit.planning import Plan, Request, leaves_by_path
from fewbit.providers import PtqProvider
from fewbit.qarray import box_part, is_box, unboxed
from fewbit.rules import check_bool
from fewbit.training import (
    QSCALE,
    is_learned,
    put_learned,
    remembered_ranges,
    serving_rule,
    started,
)
from fewbit.training import by_name as _by_name

_MSG_NOT_TRAINED = (
    "to_ptq takes a model that quantize_model(model, QtProvider(rules)) made, got {found}. A float "
    "model is quantized by quantize_params(params, fewbit.plan(model, rules, *inputs))."
)
_MSG_INPUTS = (
    "to_ptq needs to know on what {name} is called, and it has not been called in this process: "
    "to_ptq(model, params, stats, *inputs). Abstract inputs do."
)
_MSG_STATS = (
    "The rules of this model make static activation scales, but to_ptq got no statistics. Pass "
    "what training collected: for Linen variables['quant_stats'], for a function the second result "
    "of f.collecting(...)."
)


_MSG_HISTORY = (
    "The rules of this model take scales from the steps before ('delayed'), but to_ptq got no "
    "histories. Pass what training ended with: to_ptq(model, params, amax_history=histories), for "
    "Linen variables['_overwrite_with_gradient']."
)
_MSG_NO_DELAY = (
    "to_ptq got an amax_history, but no rule of this model takes scales from the steps before "
    "('delayed'), so nothing would read it. Leave it out, or convert the model that was trained "
    "with it."
)


class Converted(NamedTuple):
    """A model that serves, its parameters, and the plan that both follow."""

    model: Any
    params: Any
    plan: Plan


def to_ptq(
    model: Any,
    params: Any = None,
    stats: Any = None,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    pack: bool = False,
    amax_history: Any = None,
    **kwargs: Any,
) -> Any:
    """The model that serves what was trained: weights stored as training rounded them.

    Takes a model of `QtProvider`, its float parameters and, for rules with `act_static_scale=True`,
    the statistics that training collected; for rules with 'delayed' scales also its histories
    (Linen: `variables['_overwrite_with_gradient']`), whose scales become static. Returns
    `(model, params, plan)`. An NNX model holds them all and comes back alone, as does a Keras
    model. `inputs` are the model's own (abstract ones do); without them those of its last call are
    used.

    The forward pass is that of training, bit for bit. `pack=True` (or `fewbit.pack(params)` later)
    stores the parameters as this machine's kernels read them: faster, and where floats are summed
    (groups, fp8) in another order, some 1e-6 apart.

    >>> import fewbit, jax.numpy as jnp
    >>> rules = [fewbit.QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')]
    >>> f = fewbit.quantize_model(lambda p, x: x @ p['w'], fewbit.QtProvider(rules))
    >>> params, x = {'w': jnp.linspace(-1, 1, 12).reshape(3, 4)}, jnp.ones((2, 3))
    >>> served = to_ptq(f, params, None, x)
    >>> bool((served.model(served.params, x) == f(params, x)).all())
    True
    """
    check_bool("to_ptq", "pack", pack)
    kind = front_end(model)
    if is_keras(model):
        return kind.to_ptq(model, *((params,) if params is not None else ()), pack=pack, **kwargs)
    trained = kind.trained(model)
    if trained is None:
        raise TypeError(_MSG_NOT_TRAINED.format(found=type(model).__name__))
    provider, source = trained
    if not inputs and not kwargs:
        example = kind.last_call(model)
        if example is None:
            name = getattr(source, "__name__", type(source).__name__)
            raise ValueError(_MSG_INPUTS.format(name=name))
        inputs, kwargs = example
    rules = [serving_rule(rule) for rule in provider.rules]
    serving = PtqProvider(rules, disable_jit=provider.disable_jit, strict=provider.strict)
    if getattr(kind, "HOLDS_PARAMS", False):
        return kind.converted(model, source, serving, inputs, methods, pack, kwargs)
    linen = kind.__name__.endswith(".linen")
    first = () if linen else (params,)
    made = plan(source, serving, *first, *inputs, methods=methods, strict=serving.strict, **kwargs)
    absmax: dict[str, Any] = {}
    if amax_history is not None and not provider.delays:
        raise ValueError(_MSG_NO_DELAY)
    if provider.delays:
        if amax_history is None:
            raise ValueError(_MSG_HISTORY)
        run = kind.float_runs(source, provider, params)
        plans = [histories_of(run(name, inputs, kwargs)) for name in methods]
        merged = {name: one for found in plans for name, one in found.items()}
        served = remembered_ranges(merged, made, _by_name(amax_history, linen))
        absmax = served.weights
        stats = served.statistics(stats, made, by_site=not linen)
    if made.scales and stats is None:
        raise ValueError(_MSG_STATS)
    quantized = quantize_params(params, made, stats, weight_absmax=absmax)
    extra = dict(methods=methods) if linen else {}
    model = quantize_model(source, serving, **extra)
    return Converted(model, quantized if pack else unpack(quantized), made)


# --- Learned scales for parameters that are there: QAT that begins with a float checkpoint --------

_MSG_NOT_LEARNING = (
    "add_learned_scales takes a model that quantize_model(model, QtProvider(rules)) made, got "
    "{found}. Write model = fewbit.quantize_model(model, fewbit.QtProvider(rules)) first."
)
_MSG_NO_RULE = (
    "No rule of this model learns scales. Write weight_calibration_method='learned' in a QtRule; "
    "its rules are {rules!r}."
)
_MSG_LEARNING_INPUTS = (
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
        raise TypeError(_MSG_NOT_LEARNING.format(found=describe(model)))
    provider, source = trained
    if not provider.learns:
        raise ValueError(_MSG_NO_RULE.format(rules=list(provider.rules)))
    if not inputs and not kwargs:
        raise ValueError(_MSG_LEARNING_INPUTS.format(name=type(source).__name__))
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
    return box_part(value, started(array, how), array.shape)


# --- Models with adapters: LoRA and QLoRA through the same front ends as every other mode ---------

_MSG_PROVIDER = (
    "apply_lora_to_model takes a LoraProvider as its second argument, got {found}. Write "
    "apply_lora_to_model(model, fewbit.LoraProvider(rank=8, alpha=16.0), ...)."
)
_MSG_KERAS = (
    "Keras has adapters of its own: quantize the model with fewbit.keras.quantize_model(model, "
    "config), then layer.enable_lora(rank) on its layers or backbone.enable_lora(rank)."
)


def apply_lora_to_model(
    model: Any,
    provider: Any,
    *model_inputs: Any,
    methods: Sequence[str] = ("__call__",),
    **kwargs: Any,
) -> Any:
    """A model with low-rank adapters over a frozen base, which its rules may also quantize.

    Linen modules take no inputs: their `init` makes the adapters as entries `<w>_lora_a` and
    `<w>_lora_b` of 'params'. For a plain function, or over parameters that are there already,
    `fewbit.lora.init(plan, params, key)` makes them. An NNX model takes example inputs and
    `rngs=nnx.Rngs(seed)`, and gets `nnx.LoRAParam` attributes beside its weights.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(64)}, jnp.ones((1, 64))
    >>> provider = fewbit.LoraProvider(rank=8, alpha=16.0, weight_qtype='nf4', tile_size=64)
    >>> plan = fewbit.plan(f, provider, params, x)
    >>> params = fewbit.lora.init(plan, fewbit.quantize_params(params, plan), jax.random.key(0))
    >>> lora = apply_lora_to_model(f, provider)
    >>> trained, frozen = fewbit.lora.split(params)
    >>> loss = lambda trained: lora(fewbit.merge_trainable(trained, frozen), x).sum()
    >>> {name: g.shape for name, g in jax.grad(loss)(trained).items() if g is not None}
    {'w_lora_a': (64, 8), 'w_lora_b': (8, 64)}
    """
    if is_keras(model):
        raise TypeError(_MSG_KERAS)
    if not getattr(provider, "adapts", False):
        raise TypeError(_MSG_PROVIDER.format(found=describe(provider)))
    return quantize_model(model, provider, *model_inputs, methods=methods, **kwargs)
