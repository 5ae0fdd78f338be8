"""Plain functions `f(params, *args)`, params any pytree: Equinox, Haiku or hand-written models."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from fewbit._plan import Plan
from fewbit.adapter_run import DROPOUT
from fewbit.adapter_trees import split_adapters
from fewbit.calls import Cache, Call, is_array, key_name, split_call
from fewbit.engine import Runner
from fewbit.models.planning import FloatRun, plan_runs
from fewbit.static_scales import QuantizedParams, ScaleName, name_of_site

_ENTRIES = tuple(f"{side}_{part}" for side in ("lhs", "rhs") for part in ("scale", "zero_point"))
_MSG_ENTRY = (
    "act_scales[{site!r}] has the entry {entry!r}. QuantizedParams(params, act_scales) takes "
    "{{'<site id>': {{'lhs_scale': array, 'lhs_zero_point': array}}}}, or rhs for the other side."
)

_NOTE_ONE_ARRAY = (
    "the parameters are one array, and a later argument is a tree: if that tree holds the "
    "parameters, write the function as f(params, x) and pass them first"
)


def _name(keypath: tuple[Any, ...]) -> str | None:
    """Parameters are the leaves of the first argument; scales and adapters come last."""
    if keypath[0].idx == 4:
        return ScaleName(keypath[1].key)
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


def _without_adapters(provider: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    """Parameters as the function knows them, and the adapters among them."""
    return split_adapters(params) if provider.adapts else (params, {})


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
        kwargs, key = self.dropout(kwargs)
        runner, dynamic = call_runner(self, params, args, kwargs, key)
        return self.provider.process_model_output("__call__", runner(dynamic))

    def dropout(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The key for the adapters' dropout, given as `rngs={'dropout': key}`; without: none."""
        rngs = kwargs.get("rngs")
        wanted = self.provider.adapts and self.provider.has_dropout
        if not wanted or not isinstance(rngs, Mapping) or "dropout" not in rngs:
            return kwargs, {}
        if "rngs" not in inspect.signature(self.function).parameters:
            kwargs = {name: value for name, value in kwargs.items() if name != "rngs"}
        return kwargs, {DROPOUT: rngs["dropout"]}

    def runner(self, call: Call) -> Runner:
        def pure(dynamic):
            params, args, kwargs, _, _ = call.merge(dynamic)
            return self.function(params, *args, **kwargs)

        what = f"function {getattr(self.function, '__name__', type(self.function).__name__)}"
        return Runner(
            pure, self.provider, lambda key: call.names[key[0].idx], site_path="leaf", what=what
        )

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
    beside: Mapping[str, Any] = {},
) -> tuple[Runner, list[Any]]:
    """The runner for one way of calling a function, and the leaves to call it with."""
    params, adapters = _without_adapters(quantized.provider, params)
    params, scales = _split(params)
    tree = (params, args, kwargs, scales, {**adapters, **beside})
    dynamic, call = split_call(tree, _name)
    runner = quantized._runners.get(lambda: call.key, lambda: quantized.runner(call))
    return runner, dynamic


def float_runs(function: Any, provider: Any, params: Any) -> FloatRun:
    """Runners of the float function: `(method, args, kwargs)` to one and its leaves."""
    if isinstance(function, QuantizedFunction):
        function = function.function
    params = _split(_without_adapters(provider, params)[0])[0]
    twin = QuantizedFunction(function, provider)

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
    params = _split(_without_adapters(provider, params)[0])[0]
    dynamic, call = split_call((params, tuple(args), kwargs, {}, {}), _name)
    runner = QuantizedFunction(function, provider).runner(call)
    made = plan_runs([(runner, dynamic)], kind="function", strict=strict)[0]
    if is_array(params) and any(isinstance(a, Mapping) and jax.tree.leaves(a) for a in args):
        made = replace(made, notes=(*made.notes, _NOTE_ONE_ARRAY))
    return made
