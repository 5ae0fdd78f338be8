"""Flax NNX: a quantized model is a clone whose Params hold QArrays, its modules with other classes.

Each public method of such a class is traced on a private float twin and interpreted (`nnx_calls`).
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from fewbit._plan import Plan
from fewbit._plan_messages import PlanError
from fewbit.decisions import Request
from fewbit.engine import Runner, UntraceableModelError, is_stored
from fewbit.layouts import unpack
from fewbit.models import flax_serialization, nnx_adapters, nnx_calls, nnx_learned
from fewbit.models.delayed import by_name, remembered_ranges
from fewbit.models.nnx_scopes import (
    forget_place,
    methods_of,
    modules,
    original_class,
    remember_call,
    set_class,
    set_place,
    subclass,
)
from fewbit.models.planning import (
    FloatRun,
    empty_histories_of,
    empty_statistics_of,
    histories_of,
    plan_runs,
)
from fewbit.params import quantize_leaf, quantize_params, static_scales
from fewbit.qarray import PanelArray, QArray, WithAux
from fewbit.static_scales import empty_scales

flax_serialization.register()  # models that are unpickled come by no other way
nnx.register_data_type(QArray)
nnx.register_data_type(PanelArray)
nnx.register_data_type(WithAux)

HOLDS_PARAMS = True

_MSG_NO_INPUTS = (
    "Model inputs must be provided for nnx models. Only their shapes and types matter, so "
    "abstract ones are enough: quantize_model(model, provider, jax.ShapeDtypeStruct((1, 28, 28), "
    "'float32'))."
)
_MSG_RNGS = (
    "Rngs must be an nnx.Rngs instance. Got {found}; write rngs=nnx.Rngs(0). Adapters "
    "start from it; a method that has an argument rngs of its own is called with it."
)
_MSG_STATS = (
    "quant_stats are for models that are stored with static scales, and {why}. Write "
    "quantize_model(model, fewbit.PtqProvider(rules), *inputs, quant_stats=stats), with "
    "act_static_scale=True in the rules; got {provider}."
)
_NO_SCALES_YET = "one that trains collects its own ranges"
_MSG_TWICE = (
    "{what} is quantized already. Quantize the float model it came from, with one list of rules: "
    "the first that matches a module path wins."
)
_MSG_PLAIN = (
    "{what} cannot be traced (its Python code asks for the value of an array), so it runs as plain "
    "Python: the modules it calls are quantized each on its own, products written in it are float."
)
_MSG_REWRITTEN = (
    "Parameter '{leaf}' would be stored as {qtype}, but {method} of {model} assigns to it. A "
    "stored weight is only read. Make it an nnx.Variable of another type than nnx.Param, or leave "
    "it float: QuantizationRule(module_path={path!r}) before the other rules."
)

_MSG_HOLDS_PARAMS = (
    "{name} is an NNX model, which holds its parameters itself: write "
    "fewbit.calibrate(model, rules, batches=batches), or nnx.update(model, params) first."
)

_MSG_NO_MODULE = (
    "The static scale '{name}' belongs to a module at '{path}', and the model has none there. Use "
    "a dynamic range for this path: act_static_scale=None in a rule of its own."
)


def quantize(
    model: nnx.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    rngs: Any = None,
    skip_nnx_init: bool = False,
    quant_stats: Any = None,
    **kwargs: Any,
) -> nnx.Module:
    """A quantized clone of `model`. Float buffers are shared; weights convert one by one.

    `quant_stats` are those of `fewbit.calibrate`: static scales are made from them.
    """
    own = rngs is not None and _takes_rngs(model, methods[0])
    if own:
        kwargs["rngs"] = rngs
    if rngs is not None and not isinstance(rngs, nnx.Rngs) and (provider.adapts or not own):
        raise ValueError(_MSG_RNGS.format(found=type(rngs).__name__))
    if quant_stats is not None and (skip_nnx_init or not provider.quantizes_params):
        why = "skip_nnx_init=True makes no scales" if skip_nnx_init else _NO_SCALES_YET
        raise ValueError(_MSG_STATS.format(provider=type(provider).__name__, why=why))
    _check_is_float(model)
    made: Plan | None = None
    requests: dict[str, Request] = {}
    planned: Runner | None = None
    if not skip_nnx_init:
        made, requests, planned = _plan(model, provider, inputs, methods, provider.strict, kwargs)
    new = nnx.clone(model)
    if made is not None and provider.quantizes_params:
        learned = nnx_learned.take_scales(new)
        leaves = {leaf.path: leaf for leaf in made.leaves}
        for path, variable in nnx.to_flat_state(nnx.state(new, nnx.Param)):
            leaf = leaves.get("/".join(map(str, path)))
            if leaf is not None and leaf.how is not None:
                value = quantize_leaf(leaf.path, variable.get_value(), leaf, learned=learned)
                variable.set_value(value)
        _add_scales(new, made, quant_stats)
        nnx_adapters.add_adapters(new, made, rngs, provider.adapts and provider.has_dropout)
    if provider.trains:
        nnx_learned.add_scales(new, requests)
    if made is not None and (provider.collects or provider.delays):
        ready = nnx_calls.prepare(new, provider, methods[0], inputs, kwargs)
        run = ready.runner, ready.dynamic
        _put_on_modules(new, empty_statistics_of(run), nnx_calls.QuantStat)
        _put_on_modules(new, empty_histories_of(run), nnx_calls.AmaxHistory)
    if provider.trains and provider.draws_noise:
        for _, module in modules(new):
            setattr(module, nnx_calls.RNGS, nnx.data(None))
    for place, module in modules(new):
        set_place(module, place)
    if planned is not None and methods[0] == "__call__":
        remember_call(new, planned)
    return _with_classes(new, provider)


def _takes_rngs(model: nnx.Module, method: str) -> bool:
    """Whether a method has an argument `rngs` of its own."""
    function = getattr(model, method, None)
    return callable(function) and "rngs" in inspect.signature(function).parameters


def _add_scales(model: nnx.Module, made: Plan, quant_stats: Any) -> None:
    """Params for static scales; those that no statistics fill wait for calibration."""
    values = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    entries = empty_scales(made.scales, abstract)
    if quant_stats is not None or not abstract:
        entries |= static_scales(made, quant_stats)
    _put_on_modules(model, entries, nnx.Param)


def _put_on_modules(
    model: nnx.Module, entries: Mapping[str, Any], kind: Callable[[Any], Any]
) -> None:
    """A Variable of this kind for each entry, on the module of its Site."""
    places = dict(modules(model))
    for name, value in entries.items():
        path, _, attribute = name.rpartition("/")
        if path not in places:
            raise PlanError(_MSG_NO_MODULE.format(name=name, path=path))
        setattr(places[path], attribute, kind(value))


def plan(
    model: nnx.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    strict: bool = True,
    **kwargs: Any,
) -> Plan:
    """The plan of an NNX model on these inputs; the model may be abstract (`nnx.eval_shape`)."""
    return _plan(model, provider, inputs, methods, strict, kwargs)[0]


def _plan(
    model: nnx.Module,
    provider: Any,
    inputs: tuple,
    methods: Sequence[str],
    strict: bool,
    kwargs: dict,
) -> tuple[Plan, dict[str, Request], Runner]:
    """The plan, the storage that it asks of each parameter, and what was looked at."""
    if len(methods) != 1:
        raise ValueError("Only one method is supported for nnx models.")
    if not inputs and not kwargs:
        raise ValueError(_MSG_NO_INPUTS)
    ready = nnx_calls.prepare(model, provider, methods[0], inputs, kwargs)
    made, requests = plan_runs([(ready.runner, ready.dynamic)], kind="nnx", strict=strict)
    for leaf in ready.runner.rewritten(ready.dynamic):
        if leaf in requests:
            raise PlanError(
                _MSG_REWRITTEN.format(
                    leaf=leaf,
                    qtype=requests[leaf].how.qtype,
                    method=methods[0],
                    model=type(model).__name__,
                    path=requests[leaf].site.site.path,
                )
            )
    return made, requests, ready.runner


def restart_learned(
    model: nnx.Module, provider: Any, inputs: tuple, methods: Sequence[str], kwargs: dict
) -> nnx.Module:
    """The model itself, its learned scales as its weights now begin them."""
    requests = _plan(model, provider, inputs, methods, provider.strict, kwargs)[1]
    return nnx_learned.add_scales(model, requests, replace=True)


def float_runs(model: nnx.Module, provider: Any, params: Any) -> FloatRun:
    """Runners of the float model, which holds its parameters. What a call changes is dropped."""
    if params is not None:
        raise ValueError(_MSG_HOLDS_PARAMS.format(name=type(model).__name__))
    _check_is_float(model)

    def run(method: str, args: tuple, kwargs: dict) -> tuple[Runner, list[Any]]:
        ready = nnx_calls.prepare(model, provider, method, args, kwargs)
        return ready.runner, ready.dynamic

    return run


def is_quantized(model: Any) -> bool:
    """Whether `quantize_model` made this NNX module."""
    return getattr(type(model), "_fewbit_provider", None) is not None


def _check_is_float(model: nnx.Module) -> None:
    for path, module in [("", model), *modules(model)]:
        if is_quantized(module):
            what = f"This {type(model).__name__}" + (f"'s submodule '{path}'" if path else "")
            raise ValueError(_MSG_TWICE.format(what=what))


def trained(model: Any) -> tuple[Any, Any] | None:
    """The provider of a model that trains, and a float model of its own; None for any other."""
    provider = getattr(type(model), "_fewbit_provider", None)
    if provider is None or not provider.trains:
        return None
    source = nnx.clone(model)
    for _, module in modules(source):
        set_class(module, original_class(type(module)))
        if nnx_calls.RNGS in vars(module):
            delattr(module, nnx_calls.RNGS)
    return provider, source


def last_call(model: Any) -> tuple[tuple, dict] | None:
    """The abstract arguments that the model was last called on, or quantized with."""
    return nnx_calls.last_call(model)


def converted(
    model: Any,
    source: nnx.Module,
    provider: Any,
    inputs: tuple,
    methods: Sequence[str],
    pack: bool,
    kwargs: dict,
) -> nnx.Module:
    """The model that serves, of a float model that still holds the statistics of its training."""
    stats = nnx.to_pure_dict(nnx.state(source, nnx_calls.QuantStat))
    histories = nnx.to_pure_dict(nnx.state(source, nnx_calls.AmaxHistory))
    for _, module in modules(source):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx_calls.QuantStat | nnx_calls.AmaxHistory):
                delattr(module, name)
    made = plan(source, provider, *inputs, methods=methods, strict=provider.strict, **kwargs)
    new = quantize(source, provider, *inputs, methods=methods, **kwargs)
    params = nnx.to_pure_dict(nnx.state(source, nnx.Param))
    absmax: dict[str, Any] = {}
    trainer = type(model)._fewbit_provider
    if trainer.delays:
        ready = nnx_calls.prepare(source, trainer, methods[0], inputs, kwargs)
        plans = histories_of((ready.runner, ready.dynamic))
        served = remembered_ranges(plans, made, by_name(histories))
        absmax = served.weights
        stats = served.statistics(stats, made)
    quantized = quantize_params(params, made, stats if made.scales else None, weight_absmax=absmax)
    nnx.update(new, quantized if pack else unpack(quantized))
    return new


def float_params(*filters: Any) -> Any:
    """A filter for `nnx.grad(wrt=...)` and `nnx.Optimizer`: the Params that are not quantized.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> len(nnx.to_flat_state(nnx.state(model, float_params())))
    2
    """
    return nnx.All(*(filters or (nnx.Param,)), lambda path, v: not is_stored(v.get_value()))


# --- classes -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def quantized_class(original: type, provider: Any) -> type:
    """The class of a quantized module: each public method is interpreted.

    One class per original and provider, so that structures of models quantized alike compare equal.
    """

    plain: set[str] = set()  # methods found untraceable

    def wrap(name: str, method: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def quantized(self, *args, **kwargs):
            if name in plain:
                return method.__get__(self, type(self))(*args, **kwargs)
            _, args, kwargs = provider.process_model_inputs(self, args, kwargs)
            try:
                out = nnx_calls.call(self, provider, name, args, kwargs)
            except UntraceableModelError:
                if name == "__call__":
                    raise
                plain.add(name)
                warnings.warn(_MSG_PLAIN.format(what=f"{original.__name__}.{name}"), stacklevel=2)
                return method.__get__(self, type(self))(*args, **kwargs)
            return provider.process_model_output(name, out)

        return quantized

    namespace: dict[str, Any] = {name: wrap(name, m) for name, m in methods_of(original).items()}
    namespace |= {"_fewbit_provider": provider, "__reduce__": _reduce}
    namespace["_fewbit_pure_dict"] = lambda self: nnx.to_pure_dict(nnx.state(self))
    return subclass(original, namespace)


def _with_classes(model: nnx.Module, provider: Any) -> nnx.Module:
    for _, module in modules(model):
        set_class(module, quantized_class(original_class(type(module)), provider))
    return model


def with_provider(model: nnx.Module, provider: Any) -> nnx.Module:
    """The model run by another provider; by none: as its author wrote it."""
    if provider is not None:
        return _with_classes(model, provider)
    for _, module in modules(model):
        set_class(module, original_class(type(module)))
        forget_place(module)
    return model


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickled as the original classes with quantized Params, and the provider."""
    original = nnx.clone(self)
    for _, module in modules(original):
        set_class(module, original_class(type(module)))
    return _with_classes, (original, type(self)._fewbit_provider)
