"""Plain functions `f(params, *args)`, params any pytree: Equinox, Haiku or hand-written models."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from fewbit import trained_statistics
from fewbit._plan import Plan
from fewbit.calls import Cache, Call, is_array, key_name, split_call
from fewbit.engine import Runner
from fewbit.models.planning import FloatRun, plan_runs
from fewbit.static_scales import NOISE, STREAM, QuantizedParams, ScaleName, name_of_site

_ENTRIES = tuple(f"{side}_{part}" for side in ("lhs", "rhs") for part in ("scale", "zero_point"))
_MSG_ENTRY = (
    "act_scales[{site!r}] has the entry {entry!r}. QuantizedParams(params, act_scales) takes "
    "{{'<site id>': {{'lhs_scale': array, 'lhs_zero_point': array}}}}, or rhs for the other side."
)

_MSG_COLLECTS = (
    "{provider} collects no activation ranges: none of its rules has act_static_scale=True under a "
    "QtProvider. Call the function itself, or fewbit.calibrate for ranges after training."
)

_NOTE_ONE_ARRAY = (
    "the parameters are one array, and a later argument is a tree: if that tree holds the "
    "parameters, write the function as f(params, x) and pass them first"
)


def _name(keypath: tuple[Any, ...]) -> str | None:
    """Parameters are the leaves of the first argument; their static scales come last."""
    if keypath[0].idx == 4:
        return NOISE
    if keypath[0].idx == 5:
        site, side, key = (k.key for k in keypath[1:])
        return ScaleName(trained_statistics.entry(name_of_site(site, side), key))
    if keypath[0].idx == 3:
        side, _, end = str(keypath[2].key).partition("_")
        return ScaleName(f"{name_of_site(keypath[1].key, side)}_{end}")
    return key_name(keypath[1:]) if keypath[0].idx == 0 else None


def _split(params: Any) -> tuple[Any, dict[str, Any]]:
    """Parameters and static scales."""
    if not isinstance(params, QuantizedParams):
        return params, {}
    for site, entries in params.act_scales.items():
        for entry in entries if isinstance(entries, Mapping) else (entries,):
            if entry not in _ENTRIES:
                raise ValueError(_MSG_ENTRY.format(site=site, entry=entry))
    return params.params, {site: dict(entries) for site, entries in params.act_scales.items()}


def trained(model: Any) -> tuple[Any, Any] | None:
    """The provider and the float function of one that trains; None for any other."""
    if not isinstance(model, QuantizedFunction) or not model.provider.trains:
        return None
    return model.provider, model.function


def last_call(model: Any) -> tuple[tuple, dict] | None:
    """The abstract arguments, without the parameters, that the function was last called on."""
    entry = model._runners.latest(lambda key: True)
    if entry is None or entry.example is None:
        return None
    _, args, kwargs, *_ = entry.call.merge(entry.example)
    return args, kwargs


class QuantizedFunction:
    """A function whose first argument is a parameter tree with quantized leaves.

    Calls like the original; composes with `jit`, `grad`, `vmap`; pickles when the original does.
    """

    def __init__(self, function: Callable[..., Any], provider: Any):
        functools.update_wrapper(self, function, updated=())
        self.function, self.provider = function, provider
        self._runners: Cache[Runner] = Cache()

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        _, args, kwargs = self.provider.process_model_inputs(self, args, kwargs)
        runner, dynamic = call_runner(self, params, args, kwargs)
        return self.provider.process_model_output("__call__", runner(dynamic))

    def collecting(
        self, params: Any, quant_stats: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The result, and `quant_stats` with the activation ranges of this call.

        For rules with `act_static_scale=True` under a `QtProvider`. Start with `{}`; what comes
        out goes in at the next step, and to `quantize_params` after training.
        """
        if not self.provider.collects:
            raise ValueError(_MSG_COLLECTS.format(provider=type(self.provider).__name__))
        runner, dynamic = call_runner(self, params, args, kwargs, quant_stats)
        out, found = runner.collecting(dynamic)
        stats: dict[str, dict[str, Any]] = {}
        for name, stat in found.items():
            path, _, op_id = name[:-4].rpartition("/")
            stats.setdefault(f"{path}:{op_id}", {})[name[-3:]] = stat
        return out, {**quant_stats, **stats}

    def runner(self, call: Call) -> Runner:
        def pure(dynamic):
            params, args, kwargs, *_ = call.merge(dynamic)
            return self.function(params, *args, **kwargs)

        what = f"function {getattr(self.function, '__name__', type(self.function).__name__)}"
        runner = Runner(
            pure, self.provider, lambda key: call.names[key[0].idx], site_path="leaf", what=what
        )
        runner.call = call
        return runner

    def __reduce__(self):
        return QuantizedFunction, (self.function, self.provider)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"QuantizedFunction({name}, {type(self.provider).__name__})"


def call_runner(
    quantized: QuantizedFunction,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stats: Any = None,
) -> tuple[Runner, list[Any]]:
    """The runner for one way of calling a function, and the leaves to call it with.

    A function that trains takes the key of its stochastic rounding as an argument of its own.
    """
    params, scales = _split(params)
    key = None
    if quantized.provider.trains and STREAM in kwargs:
        kwargs = dict(kwargs)
        key = kwargs.pop(STREAM)
    dynamic, call = split_call((params, args, kwargs, scales, key, stats or {}), _name)
    runner = quantized._runners.get(lambda: call.key, lambda: quantized.runner(call))
    return runner, dynamic


def float_runs(function: Any, provider: Any, params: Any) -> FloatRun:
    """Runners of the float function: `(method, args, kwargs)` to one and its leaves."""
    if isinstance(function, QuantizedFunction):
        function = function.function
    twin, params = QuantizedFunction(function, provider), _split(params)[0]

    def run(method: str, args: tuple, kwargs: dict) -> tuple[Runner, list[Any]]:
        return call_runner(twin, params, args, kwargs)

    return run


def quantize(
    function: Any,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    **kwargs: Any,
) -> QuantizedFunction:
    """A quantized twin of `function`; given example inputs, also checks the rules against them."""
    if isinstance(function, QuantizedFunction):
        function = function.function
    if inputs:
        plan(function, provider, *inputs, strict=provider.strict, **kwargs)
    return QuantizedFunction(function, provider)


def plan(
    function: Any,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    strict: bool = True,
    **kwargs: Any,
) -> Plan:
    """The plan of `function(params, *args)`; abstract values do."""
    if isinstance(function, QuantizedFunction):
        function = function.function
    if not inputs:
        raise ValueError(
            "fewbit.plan(f, rules, params, *args) needs the arguments of the function, the "
            "parameters first and by position; abstract ones (jax.eval_shape, "
            "jax.ShapeDtypeStruct) do."
        )
    params, *args = inputs
    twin = QuantizedFunction(function, provider)
    runner, dynamic = call_runner(twin, _split(params)[0], tuple(args), kwargs)
    made = plan_runs([(runner, dynamic)], kind="function", strict=strict)[0]
    if is_array(params) and any(isinstance(a, Mapping) and jax.tree.leaves(a) for a in args):
        made = replace(made, notes=(*made.notes, _NOTE_ONE_ARRAY))
    return made
