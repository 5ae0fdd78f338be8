"""Flax Linen: a quantized module is the user's module with another class.

The new class (same name, same fields) overrides `apply` and `init`, which trace a *float twin* of the
original class, and the module's methods, for the case that it is bound inside another module. Module
paths come from Linen's public `intercept_methods`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList

from fewbit import current
from fewbit._plan import Plan
from fewbit.calls import Cache, Call, key_name, split_call
from fewbit.engine import Runner
from fewbit.jaxprs import scope_name
from fewbit.models.planning import plan_runs
from fewbit.params import box_parts, is_box, quantize_params, unbox_parts
from fewbit.qarray import QArray, WithAux

_KEEP_PARAMS = DenyList(("params",))
_runners: Cache[Runner] = Cache(256)


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
            "Model inputs must not be provided for linen models. The inputs come with init and apply: "
            "quantize_model(model, provider), then quantize_params(params, "
            "jax.eval_shape(model.init, key, x)['params'])."
        )
    original = getattr(module, "_unquantized_type", type(module))
    for name in methods:
        if not callable(getattr(original, name, None)):
            raise ValueError(f"{original.__name__} has no method {name!r}.")
    return quantized_class(original, provider, tuple(methods))(**_fields(module), name=module.name)


def plan(
    module: nn.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    strict: bool = True,
    **kwargs: Any,
) -> Plan:
    """The plan of a Linen module on these inputs; no parameters needed."""
    twin = float_twin(module)
    dynamic, call = split_call((inputs, kwargs), lambda key: None)

    def init(key, dynamic):
        args, kwargs = call.merge(dynamic)
        return twin.init(key, *args, method=methods[0], **kwargs)

    key = jax.eval_shape(lambda: jax.random.key(0))
    with current.tracing(provider), scopes():
        variables = jax.eval_shape(init, key, dynamic)
    runs = [
        make_run(twin, provider, variables, {"params": key}, inputs, kwargs, Options(name, _KEEP_PARAMS))
        for name in methods
    ]
    return plan_runs(runs, kind="linen", strict=strict)[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `apply` that are not data."""

    method: Any = None
    mutable: Any = False
    capture_intermediates: Any = False

    @property
    def method_name(self) -> str:
        name = self.method if isinstance(self.method, str) else getattr(self.method, "__name__", None)
        return name or "__call__"


def make_run(
    twin: nn.Module,
    provider: Any,
    variables: Any,
    rngs: Any,
    args: tuple,
    kwargs: dict,
    options: Options,
) -> tuple[Runner, list[Any]]:
    """The runner for one way of calling `apply`, and the leaves to call it with."""
    tree = (jax.tree.map(_box_outside, variables, is_leaf=_is_aux), rngs, args, kwargs)
    dynamic, call = split_call(tree, _name)

    def make() -> Runner:
        return Runner(
            functools.partial(_pure, twin, call, options),
            provider,
            lambda key: call.names[key[0].idx],
            method=options.method_name,
            what=f"Linen module {type(twin).__name__}",
        )

    return _runners.get(lambda: (type(twin), twin, provider, options, call.key), make), dynamic


def _pure(twin: nn.Module, call: Call, options: Options, dynamic: list[Any]) -> Any:
    variables, rngs, args, kwargs = call.merge(dynamic)
    with scopes():
        return twin.apply(
            variables,
            *args,
            rngs=rngs,
            method=options.method,
            mutable=options.mutable,
            capture_intermediates=options.capture_intermediates,
            **kwargs,
        )


def scopes() -> Any:
    """Open fewbit's scope around every module method while tracing."""

    def intercept(next_method, args, kwargs, context):
        path = "/".join(context.module.path)
        scope = scope_name(path, type(context.module).__name__)
        with jax.named_scope(scope), current.in_module(path):
            return next_method(*args, **kwargs)

    return nn.intercept_methods(intercept)


def _name(keypath: tuple[Any, ...]) -> str | None:
    """Parameters are the leaves of the collection 'params'; boxes add nothing to the path."""
    if keypath[0].idx != 0 or len(keypath) < 2 or keypath[1].key != "params":
        return None
    return key_name(tuple(k for k in keypath[2:] if not isinstance(k, jax.tree_util.GetAttrKey)))


def _is_aux(value: Any) -> bool:
    return isinstance(value, WithAux)


def _box_outside(value: Any) -> Any:
    """`WithAux(QArray(Box(qvalue), Box(scale)))` as `Box(WithAux(QArray))`, which a trace can unbox."""
    if _is_aux(value) and isinstance(value.array, QArray) and is_box(value.array.qvalue):
        box = value.array.qvalue
        return box.replace_boxed(WithAux(unbox_parts(value.array), value.how))
    return value


def float_twin(module: nn.Module) -> nn.Module:
    """The module as its author wrote it, bound to nothing."""
    original = getattr(module, "_unquantized_type", type(module))
    return original(**_fields(module), parent=None, name=module.name)


def _fields(module: nn.Module) -> dict[str, Any]:
    skip = ("parent", "name")
    names = [f.name for f in dataclasses.fields(module) if f.init and f.name not in skip]  # type: ignore[arg-type]
    return {name: getattr(module, name) for name in names}


# --- the quantized class ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def quantized_class(
    original: type[nn.Module], provider: Any, methods: tuple[str, ...]
) -> type[nn.Module]:
    """One class per original, provider and methods, so that modules quantized alike compare equal."""
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
        namespace[name] = _inside_another_module(getattr(original, name), name)
    return type(original)(original.__name__, (original,), namespace)


def _reduce(self: Any) -> tuple[Any, ...]:
    args = (self._unquantized_type, self._fewbit_provider, self._fewbit_methods)
    return _rebuild, (*args, _fields(self), self.name)


def _rebuild(original: Any, provider: Any, methods: Any, fields: dict[str, Any], name: Any) -> Any:
    return quantized_class(original, provider, methods)(**fields, name=name)


def _method(self: Any, method: Any) -> Any:
    """`method=` may be a name, a function of the module, or a bound method of the quantized module."""
    return getattr(method, "__name__", method) if getattr(method, "__self__", None) is self else method


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
    mutable = tuple(mutable) if isinstance(mutable, list | set) else mutable
    options = Options(_method(self, method), mutable, capture_intermediates)
    runner, dynamic = make_run(float_twin(self), provider, variables, rngs, args, kwargs, options)
    out = jax.tree.map(_box_inside, runner(dynamic), is_leaf=_holds_aux)
    return provider.process_model_output(options.method_name, out)


def _holds_aux(value: Any) -> bool:
    return _is_aux(value) or (is_box(value) and _is_aux(value.unbox()))


def _box_inside(value: Any) -> Any:
    """The inverse of `_box_outside`, for parameters that a call hands back."""
    if is_box(value) and _is_aux(value.unbox()):
        aux = value.unbox()
        return WithAux(box_parts(aux.array, value), aux.how)
    return value


def _init(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _init_variables(self, args, kwargs)[0]


def _init_with_output(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    variables, (rngs, inputs, kwargs) = _init_variables(self, args, kwargs)
    kwargs = {"mutable": _KEEP_PARAMS, **{k: v for k, v in kwargs.items() if k != "mutable"}}
    rngs = rngs if isinstance(rngs, dict) else {"params": rngs}
    return self.apply(variables, *inputs, rngs=rngs, **kwargs)[0], variables


def _init_variables(self: Any, args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """The float twin's variables, with planned parameters quantized: the template under `eval_shape`."""
    rngs = kwargs.pop("rngs") if "rngs" in kwargs else args[0]
    inputs = args if "rngs" in kwargs or not args else args[1:]
    provider, twin = self._fewbit_provider, float_twin(self)
    options = Options(_method(self, kwargs.get("method")), _KEEP_PARAMS)
    with scopes(), current.tracing(provider):
        variables = twin.init(rngs, *inputs, **{**kwargs, "method": options.method})
    if not variables.get("params"):
        return variables, (rngs, inputs, kwargs)
    call_kwargs = {
        k: v for k, v in kwargs.items() if k not in ("method", "mutable", "capture_intermediates")
    }
    keys = rngs if isinstance(rngs, dict) else {"params": rngs}
    run = make_run(twin, provider, variables, keys, inputs, call_kwargs, options)
    judge = provider.strict and len(self._fewbit_methods) == 1
    made, _ = plan_runs([run], kind="linen", strict=judge) if judge else _quiet_plan(run)
    if provider.quantizes_params:
        quantized = quantize_params(variables["params"], made)
        variables = {**variables, "params": quantized}
    return variables, (rngs, inputs, kwargs)


def _quiet_plan(run: Any) -> Any:
    """A plan of one method among several: a rule that matches nothing here may match in another."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_runs([run], kind="linen", strict=False)


def _inside_another_module(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A method for a module that is bound: by `bind`, or as a submodule of somebody's model."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if self.scope is None:
            return original(self, *args, **kwargs)
        scope = self.scope
        rngs = {stream: self.make_rng(stream) for stream in scope.rngs}
        if self.is_initializing() and not self.scope.variables().get("params"):
            variables = self.init(rngs, *args, method=name, **kwargs)
            for collection, entries in variables.items():
                for key, value in entries.items():
                    scope.put_variable(collection, key, value)
        out, changed = self.apply(
            self.variables,
            *args,
            rngs=rngs,
            method=name,
            mutable=DenyList(("params",)) if scope.mutable is True else scope.mutable,
            **kwargs,
        ) if scope.mutable else (self.apply(self.variables, *args, rngs=rngs, method=name, **kwargs), {})
        for collection, entries in changed.items():
            if collection != "params":
                for key, value in entries.items():
                    scope.put_variable(collection, key, value)
        return out

    return method
