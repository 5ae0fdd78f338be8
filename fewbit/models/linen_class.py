"""The quantized class of a Linen module: same name, same fields, other `apply` and `init`.

`apply` and `init` run the float twin's program with quantized products. The methods it was
quantized for do so too when it is bound: by `bind`, by `nn.apply`, or as a submodule of somebody's
float model; so do its author's other public methods when its parameters are stored quantized.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList
from flax.core.scope import in_filter, subtract_filters

from fewbit import adapter_init, current
from fewbit.calls import given_back
from fewbit.layouts import unpack
from fewbit.models import flax_serialization
from fewbit.models.learning import with_learned
from fewbit.models.linen import (
    ALL_BUT_PARAMS,
    STATISTICS,
    Options,
    boxes_inside,
    fields,
    float_twin,
    initializing,
    is_aux,
    make_run,
    planning_run,
    streams,
    with_scales,
    without_scales,
)
from fewbit.models.planning import empty_histories_of, empty_statistics_of, plan_runs
from fewbit.params import quantize_params
from fewbit.static_scales import empty_scales, insert
from fewbit.static_statistics import is_fixed
from fewbit.training.histories import COLLECTION

flax_serialization.register()  # models that are unpickled come by no other way
_setting_up: ContextVar[bool] = ContextVar("fewbit_setting_up", default=False)
_NOT_INTERMEDIATES = DenyList("intermediates")  # what Linen's own `init` returns


@functools.lru_cache(maxsize=256)
def quantized_class(original: Any, provider: Any, methods: tuple[str, ...]) -> Any:
    """One class per original, provider and methods: modules quantized alike compare equal."""
    namespace: dict[str, Any] = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_unquantized_type": original,
        "_fewbit_provider": provider,
        "_fewbit_methods": methods,
        "apply": nn.nowrap(_apply),
        "init": nn.nowrap(_init),
        "init_with_output": nn.nowrap(_init_with_output),
        "__reduce__": nn.nowrap(_reduce),
    }
    for name in methods:
        namespace[name] = _when_bound(getattr(original, name), name)
    for name in _author_s_methods(original).difference(methods):
        namespace[name] = _when_bound(getattr(original, name), name, _is_quantized)
    namespace["setup"] = _setup_of(original.setup)
    return type(original)(original.__name__, (original,), namespace)


# A class made here cannot be found by its name: pickle what it is made from.
def _reduce(self: Any) -> tuple[Any, ...]:
    args = (self._unquantized_type, self._fewbit_provider, self._fewbit_methods)
    return _rebuild, (*args, fields(self), self.name)


def _rebuild(original: Any, provider: Any, methods: Any, values: dict[str, Any], name: Any) -> Any:
    return quantized_class(original, provider, methods)(**values, name=name)


def _apply(
    self: Any,
    variables: Any,
    *args: Any,
    rngs: Any = None,
    method: Any = None,
    mutable: Any = False,
    capture_intermediates: Any = False,
    **kwargs: Any,
) -> Any:
    """`apply` of the quantized module: the float twin's program with quantized products."""
    provider = self._fewbit_provider
    _, args, kwargs = provider.process_model_inputs(self, args, kwargs)
    options = Options.of(method, mutable, capture_intermediates)
    runner, dynamic = make_run(float_twin(self), provider, variables, rngs, args, kwargs, options)
    if provider.collects and in_filter(mutable, STATISTICS):
        found, stats = runner.collecting(dynamic)
        out, updated = given_back(found)
        stats = insert_all(variables.get(STATISTICS, {}), stats)
        return provider.process_model_output(
            options.method_name, (out, {**updated, STATISTICS: stats})
        )
    out = boxes_inside(given_back(runner(dynamic)))
    if mutable is not False:  # a mutable collection 'params' comes back whole
        out = out[0], with_scales(out[1], without_scales(variables, provider)[1])
    return provider.process_model_output(options.method_name, out)


def _init(
    self: Any,
    rngs: Any,
    *args: Any,
    method: Any = None,
    mutable: Any = _NOT_INTERMEDIATES,
    capture_intermediates: Any = False,
    **kwargs: Any,
) -> Any:
    """The float twin's variables, planned parameters quantized: under `eval_shape` the template."""
    provider, twin = self._fewbit_provider, float_twin(self)
    options = Options.of(method, ALL_BUT_PARAMS)
    with initializing(twin, provider):
        variables = twin.init(
            rngs,
            *args,
            method=options.method,
            mutable=mutable,
            capture_intermediates=capture_intermediates,
            **kwargs,
        )
    if not variables.get("params"):
        return variables
    run = planning_run(twin, provider, variables, streams(rngs), args, kwargs, options)
    with warnings.catch_warnings():
        one = len(self._fewbit_methods) == 1
        if not one:  # a rule that matches nothing in this method may match in another
            warnings.simplefilter("ignore")
        made, requests = plan_runs([run], kind="linen", strict=one and provider.strict)
    variables = {**variables, "params": with_learned(variables["params"], requests)}
    if provider.collects and in_filter(mutable, STATISTICS):
        variables = {**variables, STATISTICS: insert_all({}, empty_statistics_of(run))}
    if provider.delays and in_filter(mutable, COLLECTION):
        variables = {**variables, COLLECTION: insert_all({}, empty_histories_of(run))}
    if not provider.quantizes_params:
        return variables
    # Plain, as the template that `eval_shape` makes of this is: one tree, whichever way it is made.
    params = unpack(quantize_params(variables["params"], made, allow_missing_params=True))
    if made.adapters:
        keys = streams(rngs)
        params = adapter_init.init(made, params, keys.get("params", next(iter(keys.values()))))
    quantized = {**variables, "params": params}
    return with_scales(quantized, empty_scales([s for s in made.scales if not is_fixed(s)]))


def _init_with_output(
    self: Any,
    rngs: Any,
    *args: Any,
    method: Any = None,
    mutable: Any = _NOT_INTERMEDIATES,
    capture_intermediates: Any = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    captured = dict(mutable=mutable, capture_intermediates=capture_intermediates)
    variables = self.init(rngs, *args, method=method, **captured, **kwargs)
    keys = streams(rngs)
    out, _ = self.apply(
        variables, *args, rngs=keys, method=method, mutable=ALL_BUT_PARAMS, **kwargs
    )
    return out, variables


def insert_all(tree: Any, entries: Mapping[str, Any]) -> Any:
    """A collection with these entries, each at its path."""
    for name, value in entries.items():
        tree = insert(tree, name, value)
    return tree


def _author_s_methods(original: Any) -> set[str]:
    """Public methods that are not Linen's, not fields, and not kept from Linen by `nn.nowrap`."""
    fields_of = {field.name for field in dataclasses.fields(original)}
    names = {name for name in dir(original) if not name.startswith("_")} - fields_of
    found = {name: inspect.getattr_static(original, name) for name in names - {*dir(nn.Module)}}
    return {n for n, f in found.items() if inspect.isfunction(f) and not hasattr(f, "nowrap")}


def _is_quantized(self: Any) -> bool:
    """Whether the bound module has parameters to run quantized, and is not just being set up."""
    if _setting_up.get() or self.is_initializing():
        return False
    params = jax.tree.leaves(self.variables.get("params", {}), is_leaf=is_aux)
    return bool(params) if self._fewbit_provider.trains else any(map(is_aux, params))


def _setup_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """`setup`, in which the methods that it calls make submodules and are left alone."""

    @functools.wraps(original)
    def setup(self):
        token = _setting_up.set(True)
        try:
            return original(self)
        finally:
            _setting_up.reset(token)

    return setup


def _when_bound(
    original: Callable[..., Any], name: str, wanted: Callable[[Any], bool] = lambda self: True
) -> Callable[..., Any]:
    """A method of the quantized class. Where an outer quantized model is traced, its rules hold."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if self.scope is None or current.is_tracing() or not wanted(self):
            return original(self, *args, **kwargs)
        out = _call_bound(self, name, args, kwargs)
        if any(isinstance(leaf, nn.Module) for leaf in jax.tree.leaves(out)):
            return original(self, *args, **kwargs)  # a submodule, bound as this one is
        return out

    method._fewbit_name = name  # type: ignore[attr-defined]
    return method


def _call_bound(self: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run the module on its part of the outer variables, and write back what changed."""
    module = self.unbind()[0]
    rngs = {stream: self.make_rng(stream) for stream in self.scope.rngs}
    starting = self.is_initializing()
    if starting and not self.variables.get("params"):
        _write(self, module.init(rngs, *args, method=name, **kwargs))
    mutable = subtract_filters(self.scope.mutable, "params")
    out = module.apply(self.variables, *args, rngs=rngs, method=name, mutable=mutable, **kwargs)
    if mutable is False:
        return out
    if not starting:  # `init` leaves running statistics as they begin
        _write(self, out[1])
    return out[0]


def _write(self: Any, variables: Any) -> None:
    for collection, entries in variables.items():
        for key, value in entries.items():
            self.put_variable(collection, key, value)
