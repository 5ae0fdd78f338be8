"""Flax NNX: a quantized model is a clone whose Params hold QArrays, its modules with other classes.

Each public method of such a class is traced on a private float twin and interpreted (`_calls.py`).
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from fewbit.interpreter import (
    TRACED,
    FloatRun,
    Runner,
    Traced,
    UntraceableModelError,
    empty_histories_of,
    empty_statistics_of,
    histories_of,
    plan_runs,
)
from fewbit.kernels import unpack, would_be_faster
from fewbit.models import _flax_files
from fewbit.models._flax_parts import (
    join_parts,
    register_parts,
    split_parts,
    whole_values,
)
from fewbit.models._pairs import Pair
from fewbit.models.nnx import _calls, _companions
from fewbit.models.nnx._calls import value_of
from fewbit.models.nnx._scopes import (
    forget_place,
    methods_of,
    modules,
    original_class,
    remember_call,
    set_class,
    set_place,
    subclass,
)
from fewbit.params import quantize_leaf, quantize_params, static_scales
from fewbit.planning import LeafPlan, Plan, PlanError, Request, empty_scales
from fewbit.qarray import abstract_quantized, is_part, is_stored
from fewbit.training import by_name, remembered_ranges

_flax_files.register()  # models that are unpickled come by no other way
register_parts()

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
_MSG_STATS_TWICE = (
    "This model trained quantized and holds the ranges that it saw, which become its static "
    "scales. Leave out quant_stats, or quantize the float model with them."
)
_NO_SCALES_YET = "one that trains collects its own ranges"
_MSG_TWICE = (
    "{what} is quantized already. Quantize the float model it came from, with one list of rules: "
    "the first that matches a module path wins."
)
_NOTE_PACK = (
    "'runs on' is said of weights packed for this machine's kernels: fewbit.pack(model) of the "
    "quantized model"
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

    Codes are stored one by one, as those of other libraries; `fewbit.pack(model)` packs them for
    this machine's kernels.

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
    found = trained(model)
    if found is not None and provider.quantizes_params and not skip_nnx_init:
        if quant_stats is not None:
            raise ValueError(_MSG_STATS_TWICE)
        return converted(model, found[1], provider, inputs, methods, False, kwargs)
    _check_is_float(model)
    made: Plan | None = None
    requests: dict[str, Request] = {}
    planned: Runner | None = None
    if not skip_nnx_init:
        made, requests, planned = _plan(model, provider, inputs, methods, provider.strict, kwargs)
    new = nnx.clone(model)
    if made is not None and provider.quantizes_params:
        learned = _companions.take_scales(new)
        leaves = {leaf.path: leaf for leaf in made.leaves}
        for path, variable in nnx.to_flat_state(nnx.state(new, nnx.Param)):
            leaf = leaves.get("/".join(map(str, path)))
            if leaf is not None and leaf.how is not None:
                # One code per element: the state is the same on every machine, and shards.
                value = variable.get_value()
                value = quantize_leaf(leaf.path, value, leaf, learned=learned, packs=False)
                variable.set_value(value)
        _add_scales(new, made, quant_stats)
        _companions.add_adapters(new, made, rngs, provider.adapts and provider.has_dropout)
        split_parts(new)
    if provider.trains:
        _companions.add_scales(new, requests)
    if made is not None and (provider.collects or provider.delays):
        ready = _calls.prepare(new, provider, methods[0], inputs, kwargs)
        run = ready.runner, ready.dynamic
        _put_on_modules(new, empty_statistics_of(run), _calls.QuantStat)
        _put_on_modules(new, empty_histories_of(run), _calls.AmaxHistory)
    if provider.trains:
        for _, module in modules(new):
            if not isinstance(module, nnx.bridge.ToNNX):  # which hands attributes to its own module
                setattr(module, _calls.UPDATE_OFF, False)
                setattr(module, _calls.RNGS, nnx.data(None))
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
    ready = _calls.prepare(model, provider, methods[0], inputs, kwargs)
    made, requests = plan_runs([(ready.runner, ready.dynamic)], kind="nnx", strict=strict)
    if provider.quantizes_params and any(map(_packs, made.leaves)):
        made = dataclasses.replace(made, notes=(*made.notes, _NOTE_PACK))
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


def _packs(leaf: LeafPlan) -> bool:
    """Whether kernels of this machine would read the parameter if it were packed."""
    if leaf.how is None:
        return False
    array = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return would_be_faster(abstract_quantized(array, leaf.how), leaf.how)


def restart_learned(
    model: nnx.Module, provider: Any, inputs: tuple, methods: Sequence[str], kwargs: dict
) -> nnx.Module:
    """The model itself, its learned scales as its weights now begin them."""
    requests = _plan(model, provider, inputs, methods, provider.strict, kwargs)[1]
    return _companions.add_scales(model, requests, replace=True)


def float_runs(model: nnx.Module, provider: Any, params: Any) -> FloatRun:
    """Runners of the float model, which holds its parameters. What a call changes is dropped."""
    if params is not None:
        raise ValueError(_MSG_HOLDS_PARAMS.format(name=type(model).__name__))
    _check_is_float(model)

    def run(method: str, args: tuple, kwargs: dict) -> tuple[Runner, list[Any]]:
        ready = _calls.prepare(model, provider, method, args, kwargs)
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
        for name in (_calls.RNGS, _calls.UPDATE_OFF):
            if name in vars(module):
                delattr(module, name)
    return provider, source


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
    stats = nnx.to_pure_dict(nnx.state(source, _calls.QuantStat))
    histories = nnx.to_pure_dict(nnx.state(source, _calls.AmaxHistory))
    for _, module in modules(source):
        for name, value in list(vars(module).items()):
            if isinstance(value, _calls.QuantStat | _calls.AmaxHistory):
                delattr(module, name)
    made = plan(source, provider, *inputs, methods=methods, strict=provider.strict, **kwargs)
    new = quantize(source, provider, *inputs, methods=methods, **kwargs)
    params = nnx.to_pure_dict(nnx.state(source, nnx.Param))
    absmax: dict[str, Any] = {}
    trainer = type(model)._fewbit_provider
    if trainer.delays:
        ready = _calls.prepare(source, trainer, methods[0], inputs, kwargs)
        plans = histories_of((ready.runner, ready.dynamic))
        served = remembered_ranges(plans, made, by_name(histories))
        absmax = served.weights
        stats = served.statistics(stats, made)
    quantized = quantize_params(params, made, stats if made.scales else None, weight_absmax=absmax)
    nnx.update(join_parts(new), quantized if pack else unpack(quantized))
    return split_parts(new)


def float_params(*filters: Any) -> Any:
    """A filter for `nnx.grad(wrt=...)` and `nnx.Optimizer`: the Params that are not quantized.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> len(nnx.to_flat_state(nnx.state(model, float_params())))
    2
    """
    return nnx.All(*(filters or (nnx.Param,)), lambda path, v: not is_part(v))


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
                out = _calls.call(self, provider, name, args, kwargs)
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
    namespace["_fewbit_pure_dict"] = whole_values
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


# --- An NNX model and its quantized twin, ready to run on one batch. Neither is changed by it -----

_NOTE_STATE = (
    "Variables other than Params differ between the two models ({names}): both runs use the "
    "quantized model's"
)
_SHOWN = 3


def pair(
    model: nnx.Module,
    quantized: nnx.Module,
    provider: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str,
) -> Pair:
    """Both models, called as `method(*args, **kwargs)`."""
    ready = _calls.prepare(quantized, provider, method, args, kwargs)
    plain = _calls.prepare(model, provider, method, args, kwargs)
    differing = _differing_state(model, quantized)
    notes: tuple[str, ...] = ()
    if differing:
        more = ", ..." if len(differing) > _SHOWN else ""
        notes = (_NOTE_STATE.format(names=", ".join(differing[:_SHOWN]) + more),)
    return Pair(
        "nnx",
        ready.runner,
        ready.dynamic,
        plain.runner,
        plain.dynamic,
        outputs=_outputs,
        notes=notes,
    )


def _outputs(traced: Traced) -> int:
    """A traced NNX call returns the method's own results first, the state after them."""
    after = jax.tree.unflatten(traced.out_tree, list(range(len(traced.forwarded))))
    return sum(static is TRACED for static in after.out.static)


def _differing_state(model: nnx.Module, quantized: nnx.Module) -> list[str]:
    """Variables that are no parameters and have other values in the two models."""

    def others(m: nnx.Module) -> dict[str, Any]:
        flat = nnx.to_flat_state(nnx.state(m, nnx.Not(nnx.Param)))
        return {"/".join(map(str, path)): value_of(variable) for path, variable in flat}

    mine, theirs = others(model), others(quantized)
    return [name for name, value in mine.items() if not _same(value, theirs.get(name))]


def _same(a: Any, b: Any) -> bool:
    leaves, other = (jax.tree.leaves(x, is_leaf=is_stored) for x in (a, b))
    return len(leaves) == len(other) and all(
        x is y or np.array_equal(_bits(x), _bits(y)) for x, y in zip(leaves, other, strict=True)
    )


def _bits(value: Any) -> Any:
    key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if key else value
