"""The quantized class of a Linen module: same name, same fields, other `apply` and `init`.

`apply` and `init` run the float twin's program with quantized products. The methods it was
quantized for do so too when it is bound: by `bind`, by `nn.apply`, or as a submodule of somebody's
float model; so do its author's other public methods when its parameters are stored quantized.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList, FrozenDict, freeze, unfreeze
from flax.core.scope import in_filter, subtract_filters
from flax.errors import ScopeCollectionNotFound, ScopeParamShapeError

from fewbit._util import nearest
from fewbit.adapters import init as init_adapters
from fewbit.calibration import is_fixed
from fewbit.interpreter import (
    current,
    empty_histories_of,
    empty_statistics_of,
    given_back,
    plan_runs,
)
from fewbit.kernels import unpack
from fewbit.models import _flax_files
from fewbit.models._convert import with_learned
from fewbit.models._pairs import Pair
from fewbit.models.linen._module import (
    ALL_BUT_PARAMS,
    OURS,
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
    unquantized_type,
    with_scales,
    without_scales,
)
from fewbit.params import quantize_params
from fewbit.planning import empty_scales, insert
from fewbit.training import COLLECTION

_flax_files.register()  # models that are unpickled come by no other way
_setting_up: ContextVar[bool] = ContextVar("fewbit_setting_up", default=False)
_NOT_INTERMEDIATES = DenyList("intermediates")  # what Linen's own `init` returns


def quantize(
    module: nn.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    **kwargs: Any,
) -> nn.Module:
    """A module of a quantized class with the same fields; parameters are quantized separately."""
    if inputs or kwargs:
        raise ValueError(
            "Model inputs must not be provided for linen models. The inputs come with init and "
            "apply: quantize_model(model, provider), then quantize_params(params, "
            "jax.eval_shape(model.init, key, x)['params'])."
        )
    original = unquantized_type(module)
    for name in methods:
        if not callable(getattr(original, name, None)):
            raise ValueError(_no_method(original, name))
    return quantized_class(original, provider, tuple(methods))(**fields(module), name=module.name)


def _no_method(original: type[nn.Module], name: str) -> str:
    settings = {field.name for field in dataclasses.fields(original)}
    names = {n for n in dir(original) if not n.startswith("_")} - {*dir(nn.Module)} - settings
    own = ["__call__", *sorted(n for n in names if callable(getattr(original, n)))]
    near = nearest(name, own, " The nearest are {}.", 3, 0.6, show=str, or_first=True)
    return f"{original.__name__} has no method {name!r}.{near}"


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
    seen = mutable
    if provider.trains and mutable is not False:  # the twin knows nothing of these
        seen = subtract_filters(mutable, OURS if provider.delays else OURS[:1])
    options = Options.of(method, seen, capture_intermediates)
    runner, dynamic = make_run(float_twin(self), provider, variables, rngs, args, kwargs, options)
    stats = None
    if provider.collects and in_filter(mutable, STATISTICS):
        out, stats = runner.collecting(dynamic)
        out = given_back(out)
    else:
        out = given_back(runner(dynamic))
    out = boxes_inside(out)
    if mutable is not False:
        out = out[0], _whole(out[1], variables, provider, mutable, stats)
    return provider.process_model_output(options.method_name, out)


def _whole(updated: Any, variables: Any, provider: Any, mutable: Any, stats: Any) -> Any:
    """The mutable collections as Flax gives them back, with what the float twin knows nothing of.

    A mutable collection comes back whole, whether a call changed it or not, and thawed.
    """
    result = {**with_scales(updated, without_scales(variables, provider)[1])}
    for name in OURS:
        if name in variables and name not in result and in_filter(mutable, name):
            result[name] = unfreeze(variables[name])
    if stats:
        result[STATISTICS] = insert_all(result.get(STATISTICS, {}), stats)
    return freeze(result) if isinstance(updated, FrozenDict) else result


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
        params = init_adapters(made, params, keys.get("params", next(iter(keys.values()))))
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
    run = functools.partial(self.apply, variables, *args, rngs=keys, method=method, **kwargs)
    try:
        out, _ = run(mutable=ALL_BUT_PARAMS)
    except (ScopeCollectionNotFound, ScopeParamShapeError):
        out = run()  # `nn.map_variables(init=True)` makes its variables anew if anything is mutable
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


# --- A Linen module and its quantized twin, ready to run on one batch -----------------------------


def pair(
    module: nn.Module,
    quantized: nn.Module,
    provider: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: Any,
    rngs: Any,
    *,
    params: Any,
    qparams: Any,
) -> Pair:
    """`params` and `qparams` are whole variables; the collections beside 'params' may differ."""
    options = Options.of(method, False)
    runs = [
        make_run(float_twin(m), provider, variables, rngs, args, kwargs, options)
        for m, variables in ((quantized, qparams), (module, params))
    ]
    return Pair("linen", *runs[0], *runs[1])
