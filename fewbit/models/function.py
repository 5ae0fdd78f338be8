"""Plain functions `f(params, *args)`, params any pytree: Equinox, Haiku or hand-written models."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from fewbit._util import key_name
from fewbit.adapters import DROPOUT
from fewbit.interpreter import (
    Cache,
    Call,
    FloatRun,
    Runner,
    empty_histories_of,
    given_back,
    is_array,
    kept,
    plan_runs,
    split_call,
)
from fewbit.planning import (
    NOISE,
    STREAM,
    Plan,
    QuantizedParams,
    ScaleName,
    holder_cure,
    name_of_site,
    split_adapters,
)
from fewbit.training import SUFFIX, split_learned
from fewbit.training import entry as statistics_entry

_ENTRIES = tuple(f"{side}_{part}" for side in ("lhs", "rhs") for part in ("scale", "zero_point"))
_MSG_ENTRY = (
    "act_scales[{site!r}] has the entry {entry!r}. QuantizedParams(params, act_scales) takes "
    "{{'<site id>': {{'lhs_scale': array, 'lhs_zero_point': array}}}}, or rhs for the other side."
)

_MSG_STATS = (
    "quant_stats must be the mapping that the step before gave, {{}} at the first; got {found}."
)
_MSG_COLLECTS = (
    "{provider} collects no activation ranges: none of its rules has act_static_scale=True under a "
    "QtProvider. Call the function itself, or fewbit.calibrate for ranges after training."
)

_MSG_DELAYS = (
    "{provider} has no amax histories: none of its rules has a 'delayed' calibration method under "
    "a QtProvider. Call the function without amax_history."
)
AMAX_HISTORY = "amax_history"

_NOTE_ONE_ARRAY = (
    "the parameters are one array, and a later argument is a tree: if that tree holds the "
    "parameters, write the function as f(params, x) and pass them first"
)


def _name(keypath: tuple[Any, ...]) -> str | None:
    """Parameters are the leaves of the first argument; what rides beside them comes last."""
    if keypath[0].idx == 6:
        site, name = (k.key for k in keypath[1:])
        return ScaleName(name_of_site(site, name))
    if keypath[0].idx == 5:
        site, side, key = (k.key for k in keypath[1:])
        return ScaleName(statistics_entry(name_of_site(site, side), key))
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


def _without_adapters(provider: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    """Parameters as the function knows them, and the adapters and learned scales among them."""
    params, found = split_adapters(params) if provider.adapts else (params, {})
    if not provider.learns:
        return params, found
    params, scales = split_learned(params)
    return params, {**found, **scales}


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
        kwargs, keys = self.keys(kwargs)
        kwargs, histories = self.histories(kwargs)
        runner, dynamic = call_runner(self, params, args, kwargs, keys, None, histories)
        return self.provider.process_model_output("__call__", given_back(runner(dynamic)))

    def keys(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keys that are not the function's own arguments, taken out of them.

        The adapters' dropout has its key in `rngs={'dropout': key}` (without one there is none),
        stochastic rounding in `stochastic_rounding=key`.
        """
        if self.provider.draws_noise and STREAM in kwargs:
            kwargs = dict(kwargs)
            return kwargs, {NOISE: kwargs.pop(STREAM)}
        rngs = kwargs.get("rngs")
        wanted = self.provider.adapts and self.provider.has_dropout
        if not wanted or not isinstance(rngs, Mapping) or "dropout" not in rngs:
            return kwargs, {}
        if "rngs" not in inspect.signature(self.function).parameters:
            kwargs = {name: value for name, value in kwargs.items() if name != "rngs"}
        return kwargs, {DROPOUT: rngs["dropout"]}

    def histories(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The histories of delayed scales, `amax_history=...`, taken out of the arguments."""
        if not self.provider.delays or AMAX_HISTORY not in kwargs:
            return kwargs, {}
        kwargs = dict(kwargs)
        return kwargs, kwargs.pop(AMAX_HISTORY)

    def init_amax_history(self, params: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The histories that rules with 'delayed' begin with; the arguments may be abstract.

        They go in as `f(params, *args, amax_history=histories)`, and their gradient is what they
        are after the step: `{'<site id>': {'lhs_amax_history': array, ...}}`.
        """
        if not self.provider.delays:
            raise ValueError(_MSG_DELAYS.format(provider=type(self.provider).__name__))
        kwargs, keys = self.keys(self.histories(kwargs)[0])
        found = empty_histories_of(call_runner(self, params, args, kwargs, keys))
        return by_site(found, SUFFIX)

    def collecting(
        self, params: Any, quant_stats: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The result, and `quant_stats` with the activation ranges of this call.

        For rules with `act_static_scale=True` under a `QtProvider`. Start with `{}`; what comes
        out goes in at the next step, and to `quantize_params` after training.
        """
        if not self.provider.collects:
            raise ValueError(_MSG_COLLECTS.format(provider=type(self.provider).__name__))
        if not isinstance(quant_stats, Mapping):
            raise TypeError(_MSG_STATS.format(found=type(quant_stats).__name__))
        kwargs, keys = self.keys(kwargs)
        kwargs, histories = self.histories(kwargs)
        runner, dynamic = call_runner(self, params, args, kwargs, keys, quant_stats, histories)
        out, found = runner.collecting(dynamic)
        return given_back(out), {**quant_stats, **by_site(found)}

    def runner(self, call: Call) -> Runner:
        def pure(dynamic):
            params, args, kwargs, *_ = call.merge(dynamic)
            return kept(self.function(params, *args, **kwargs))

        what = f"function {getattr(self.function, '__name__', type(self.function).__name__)}"
        runner = Runner(
            pure, self.provider, lambda key: call.names[key[0].idx], site_path="leaf", what=what
        )
        runner.call, runner.cure = call, holder_cure(self.function)
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
    beside: Mapping[str, Any] = {},
    stats: Any = None,
    histories: Any = None,
) -> tuple[Runner, list[Any]]:
    """The runner for one way of calling a function, and the leaves to call it with."""
    params, adapters = _without_adapters(quantized.provider, params)
    params, scales = _split(params)
    tree = (params, args, kwargs, scales, {**adapters, **beside}, stats or {}, histories or {})
    dynamic, call = split_call(tree, _name)
    runner = quantized._runners.get(lambda: call.key, lambda: quantized.runner(call))
    return runner, dynamic


def by_site(entries: Mapping[str, Any], suffix: str = "") -> dict[str, dict[str, Any]]:
    """Entries `<path>/<op_id>_<side>` as people see them: by Site, then by side.

    >>> by_site({'up/dot_general0_lhs': 1, 'up/dot_general0_grad': 2})
    {'up:dot_general0': {'lhs': 1, 'grad': 2}}
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in entries.items():
        place, _, side = name.removesuffix(suffix).rpartition("_")
        path, _, op_id = place.rpartition("/")
        found.setdefault(f"{path}:{op_id}", {})[side + suffix] = value
    return found


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
    quantized = QuantizedFunction(function, provider)
    if inputs:  # which the new function remembers, as those of a call
        _plan(quantized, inputs, kwargs, provider.strict)
    return quantized


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
    return _plan(QuantizedFunction(function, provider), inputs, kwargs, strict)


def _plan(twin: QuantizedFunction, inputs: Sequence[Any], kwargs: dict, strict: bool) -> Plan:
    params, *args = inputs
    params = _split(_without_adapters(twin.provider, params)[0])[0]
    kwargs, _ = twin.keys(twin.histories(kwargs)[0])
    runner, dynamic = call_runner(twin, params, tuple(args), kwargs)
    made = plan_runs([(runner, dynamic)], kind="function", strict=strict)[0]
    if is_array(params) and any(isinstance(a, Mapping) and jax.tree.leaves(a) for a in args):
        made = replace(made, notes=(*made.notes, _NOTE_ONE_ARRAY))
    return made
