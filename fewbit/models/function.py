"""Plain functions `f(params, *args)`, params any pytree: Equinox, Haiku or hand-written models."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fewbit._plan import Plan
from fewbit.calls import Cache, Call, key_name, split_call
from fewbit.engine import Runner
from fewbit.models.planning import plan_runs


def _name(keypath: tuple[Any, ...]) -> str | None:
    """Parameters are the leaves of the first argument."""
    return key_name(keypath[1:]) if keypath[0].idx == 0 else None


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
        dynamic, call = split_call((params, args, kwargs), _name)
        runner = self._runners.get(lambda: call.key, lambda: self.runner(call))
        return self.provider.process_model_output("__call__", runner(dynamic))

    def runner(self, call: Call) -> Runner:
        def pure(dynamic):
            params, args, kwargs = call.merge(dynamic)
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
            "fewbit.plan(f, rules, params, *args) needs the arguments of the function; "
            "abstract ones (jax.eval_shape, jax.ShapeDtypeStruct) do."
        )
    params, *args = inputs
    dynamic, call = split_call((params, tuple(args), kwargs), _name)
    runner = QuantizedFunction(function, provider).runner(call)
    return plan_runs([(runner, dynamic)], kind="function", strict=strict)[0]
