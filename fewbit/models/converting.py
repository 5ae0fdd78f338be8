"""From a model that was trained quantized to the model that serves, with the same scales."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fewbit._plan import Plan
from fewbit._rule_checks import check_bool
from fewbit.layouts import unpack
from fewbit.models import front_end, is_keras, plan, quantize_model
from fewbit.models.delayed import by_name as _by_name
from fewbit.models.delayed import remembered_ranges, serving_rule
from fewbit.models.planning import histories_of
from fewbit.modes.ptq import PtqProvider
from fewbit.params import quantize_params

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
