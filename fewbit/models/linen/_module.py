"""Flax Linen: a module becomes a pure function of its variables, its inputs and its rngs.

What is traced is a *float twin*: the module as its author wrote it, bound to nothing. Module paths
come from Linen's public `intercept_methods`. The quantized class is in `_quantized.py`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList

from fewbit._util import key_name
from fewbit.adapters import DROPOUT
from fewbit.interpreter import (
    Cache,
    Call,
    FloatRun,
    Runner,
    current,
    kept,
    key_of,
    plan_runs,
    split_call,
    untraceable,
)
from fewbit.planning import (
    NOISE,
    STREAM,
    Plan,
    ScaleName,
    insert,
    put_adapters,
    split_adapters,
    split_scales,
    weight_of,
)
from fewbit.qarray import QArray, WithAux, box_parts, is_box, unbox_parts, unboxed
from fewbit.tracing import scope_name
from fewbit.training import COLLECTION, split_learned

ALL_BUT_PARAMS = DenyList(("params",))
STATISTICS = "quant_stats"  # the collection of activation ranges that training fills
OURS = (STATISTICS, COLLECTION)  # collections that no module of the twin knows
_runners: Cache[Runner] = Cache(256)


def plan(
    module: nn.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    strict: bool = True,
    rngs: Any = None,
    **kwargs: Any,
) -> Plan:
    """The plan of a Linen module on these inputs; no parameters needed.

    `rngs` are those of `apply`, where the module draws more than its parameters.
    """
    if inputs and isinstance(inputs[0], Mapping) and "params" in inputs[0]:
        raise ValueError(
            "A Linen model is planned without its variables: fewbit.plan(model, rules, x). Only a "
            "plain function takes its parameters first."
        )
    twin = float_twin(module)
    dynamic, call = split_call((inputs, kwargs), lambda key: None)

    def init(keys, dynamic):
        args, kwargs = call.merge(dynamic)
        return twin.init(keys, *args, method=methods[0], **kwargs)

    keys = {"params": jax.eval_shape(lambda: jax.random.key(0)), **streams(rngs)}
    with initializing(twin, provider):
        variables = jax.eval_shape(init, keys, dynamic)
    runs = [
        planning_run(
            twin,
            provider,
            variables,
            keys,
            inputs,
            kwargs,
            Options(name, ALL_BUT_PARAMS),
        )
        for name in methods
    ]
    return plan_runs(runs, kind="linen", strict=strict)[0]


def float_runs(module: nn.Module, provider: Any, params: Any) -> FloatRun:
    """Runners of the float module; `params` may be all variables. What a call changes is dropped.

    `rngs` among the keyword arguments are those of `apply`.
    """
    whole = isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)
    variables, twin = params if whole else {"params": params}, float_twin(module)

    def run(method: str, args: tuple, kwargs: dict) -> tuple[Runner, list[Any]]:
        rngs = kwargs.get("rngs")
        rest = {key: value for key, value in kwargs.items() if key != "rngs"}
        options = Options(method, ALL_BUT_PARAMS)
        return _bearable(twin, provider, variables, rngs, args, rest, options)

    return run


def streams(rngs: Any) -> Mapping[str, Any]:
    """The keys that `init` and `apply` are given, by stream; a single one is for parameters."""
    if rngs is None:
        return {}
    return rngs if isinstance(rngs, Mapping) else {"params": rngs}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `apply` that are not data."""

    method: Any = None
    mutable: Any = False
    capture_intermediates: Any = False

    @classmethod
    def of(cls, method: Any, mutable: Any, capture_intermediates: Any = False) -> "Options":
        """`method` is a name, a function of the module, or a method bound to any such module."""
        name = getattr(method, "_fewbit_name", None)  # a method of a quantized class
        function = method.__func__ if inspect.ismethod(method) else method
        mutable = tuple(sorted(mutable)) if isinstance(mutable, list | set | tuple) else mutable
        return cls(name or function, mutable, capture_intermediates)

    @property
    def method_name(self) -> str:
        name = (
            self.method if isinstance(self.method, str) else getattr(self.method, "__name__", None)
        )
        return name or "__call__"


def planning_run(
    twin: nn.Module,
    provider: Any,
    variables: Mapping[str, Any],
    *rest: Any,
) -> tuple[Runner, list[Any]]:
    """`make_run` with the variables that `init` made, for looking at.

    A module may make something at its first call and want other inputs from then on, as Flax's
    attention does with `decode=True`: its cache is as long as what `init` sees, then it takes one
    token. It is looked at as it was while it made it.
    """
    run = _bearable(twin, provider, variables, *rest)
    if set(variables) <= {"params"} or _traces(run):
        return run
    first = _bearable(twin, provider, {"params": variables.get("params", {})}, *rest)
    return first if _traces(first) else run


def _bearable(
    twin: nn.Module,
    provider: Any,
    variables: Any,
    rngs: Any,
    args: tuple,
    kwargs: dict,
    options: Options,
) -> tuple[Runner, list[Any]]:
    """`make_run`, with nothing mutable if the module cannot bear that anything is.

    `nn.map_variables(init=True)` makes its variables anew then, unless 'params' is mutable too.
    """
    call = functools.partial(make_run, twin, provider, variables, rngs, args, kwargs)
    run = call(options)
    if options.mutable is False or run[0].example is not None or _traces(run):
        return run  # with an example it was traced before
    still = call(dataclasses.replace(options, mutable=False))
    return still if _traces(still) else run


def _traces(run: tuple[Runner, list[Any]]) -> bool:
    try:
        run[0].trace(run[1])
    except Exception:  # whatever the author's module raises
        return False
    return True


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
    variables, scales = without_scales(variables, provider)
    scales = {name: unboxed(v) if is_box(v) else v for name, v in scales.items()}
    if provider.adapts and provider.has_dropout and isinstance(rngs, Mapping) and "dropout" in rngs:
        scales[DROPOUT] = rngs["dropout"]
    stats: Any = {}
    histories: Any = {}
    if provider.trains and isinstance(variables, Mapping):  # no module of the twin knows them
        stats = variables.get(STATISTICS, {})
        histories = variables.get(COLLECTION, {}) if provider.delays else {}
        ours = OURS if provider.delays else OURS[:1]
        variables = {name: part for name, part in variables.items() if name not in ours}
    variables = jax.tree.map(box_outside, variables, is_leaf=is_aux)
    tree = (variables, rngs, args, kwargs, scales, stats, histories)
    dynamic, call = split_call(tree, _name)

    def make() -> Runner:
        runner = Runner(
            functools.partial(_pure, twin, call, options),
            provider,
            lambda key: call.names[key[0].idx],
            method=options.method_name,
            what=_what(twin),
        )
        runner.call = call
        return runner

    return _runners.get(lambda: (_key(twin, {}), provider, options, call.key), make), dynamic


def trained(module: nn.Module) -> tuple[Any, nn.Module] | None:
    """The provider and the float module of one that trains; None for any other."""
    provider = getattr(module, "_fewbit_provider", None)
    return (provider, float_twin(module)) if provider is not None and provider.trains else None


def last_call(module: Any) -> tuple[tuple, dict] | None:
    """The abstract arguments that such a module was last called on, `rngs` among them."""
    wanted = _key(float_twin(module), {}), module._fewbit_provider
    runner = _runners.latest(lambda key: key[:2] == wanted)
    if runner is None or runner.example is None:
        return None
    _, rngs, args, kwargs, *_ = runner.call.merge(runner.example)
    return args, {**kwargs, **({} if rngs is None else {"rngs": rngs})}


def _pure(twin: nn.Module, call: Call, options: Options, dynamic: list[Any]) -> Any:
    variables, rngs, args, kwargs, *_ = call.merge(dynamic)
    with scopes():
        out = twin.apply(
            variables,
            *args,
            rngs=rngs,
            method=options.method,
            mutable=options.mutable,
            capture_intermediates=options.capture_intermediates,
            **kwargs,
        )
    return kept(out)


def _key(value: Any, seen: dict[int, int]) -> Any:
    """A module as a dictionary key. Its own hash fails on configs, and 1 and True are one to it."""
    if isinstance(value, nn.Module):
        if (
            id(value) in seen
        ):  # one submodule in two fields shares parameters; two equal ones do not
            return "seen", seen[id(value)]
        seen[id(value)] = len(seen)
        return type(value), value.name, _key(fields(value), seen)
    if isinstance(value, list | dict) and not _has_modules(value):
        return key_of(value)
    if isinstance(value, Mapping):
        return type(value), tuple((k, _key(v, seen)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_key(v, seen) for v in value)
    return key_of(value)


def _has_modules(value: Any) -> bool:
    if isinstance(value, list | tuple | Mapping):
        return any(map(_has_modules, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, nn.Module)


def scopes(top: str = "") -> Any:
    """Open fewbit's scope around every module method while tracing.

    `top` is where the outermost module stands: an NNX model may hold it.
    """

    def intercept(next_method, args, kwargs, context):
        path = "/".join((top, *context.module.path) if top else context.module.path)
        scope = scope_name(path, type(context.module).__name__)
        with jax.named_scope(scope), current.in_module(path):
            return next_method(*args, **kwargs)

    return nn.intercept_methods(intercept)


@contextmanager
def initializing(twin: nn.Module, provider: Any) -> Iterator[None]:
    """While the twin's own `init` runs, abstractly or not."""
    with current.tracing(provider) as failed, scopes():
        try:
            yield
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise untraceable(_what(twin), failed, error) from error


def _what(twin: nn.Module) -> str:
    return f"Linen module {type(twin).__name__}"


def _name(keypath: tuple[Any, ...]) -> str | None:
    """Parameters are the leaves of the collection 'params'; boxes add nothing to the path."""
    if keypath[0].idx == 4:
        return ScaleName(keypath[1].key)
    if keypath[0].idx in (5, 6):
        return ScaleName(key_name(keypath[1:]))
    if keypath[0].idx == 1 and len(keypath) > 1 and keypath[1].key == STREAM:
        return NOISE
    if keypath[0].idx != 0 or len(keypath) < 2 or keypath[1].key != "params":
        return None
    return key_name(tuple(k for k in keypath[2:] if not isinstance(k, jax.tree_util.GetAttrKey)))


def without_scales(variables: Any, provider: Any) -> tuple[Any, dict[str, Any]]:
    """Variables without what no module of the float twin knows: scales and adapters."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        return variables, {}
    params, scales = split_scales(variables["params"])
    if provider.adapts:
        params, found = split_adapters(params)
        scales |= found
    if provider.learns:
        params, learned = split_learned(params)
        scales |= learned
    return ({**variables, "params": params}, scales) if scales else (variables, {})


def with_scales(variables: Any, scales: Mapping[str, Any]) -> Any:
    """The inverse of `without_scales`."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        return variables
    params = variables["params"]
    for name, value in scales.items():
        if weight_of(name) is None:
            params = insert(params, name, value)
    params = put_adapters(params, {n: v for n, v in scales.items() if weight_of(n) is not None})
    return {**variables, "params": params}


def float_twin(module: nn.Module) -> nn.Module:
    """The module as its author wrote it, bound to nothing."""
    if module.scope is not None:
        module = module.unbind()[0]
    return unquantized_type(module)(**fields(module), parent=None, name=module.name)


def unquantized_type(module: nn.Module) -> Any:
    """The class its author wrote."""
    return getattr(module, "_unquantized_type", type(module))


def fields(module: nn.Module) -> dict[str, Any]:
    """The arguments that make the module again, but for its place in another one."""
    skip = ("parent", "name")
    names = [f.name for f in dataclasses.fields(module) if f.init and f.name not in skip]
    return {name: getattr(module, name) for name in names}


# --- partitioning boxes: people keep them on the parts, a trace needs them around the whole ------


def is_aux(value: Any) -> bool:
    """Whether a tree node is a quantized parameter."""
    return isinstance(value, WithAux)


def box_outside(value: Any) -> Any:
    """`WithAux(QArray(Box(qvalue), ...))` as `Box(WithAux(QArray))`, which a trace can unbox."""
    if is_aux(value) and isinstance(value.array, QArray) and is_box(value.array.qvalue):
        return value.array.qvalue.replace_boxed(WithAux(unbox_parts(value.array), value.how))
    return value


def boxes_inside(tree: Any) -> Any:
    """The inverse of `box_outside` on a whole tree, for parameters that a call hands back."""

    def holds_aux(value):
        return is_aux(value) or (is_box(value) and is_aux(unboxed(value)))

    def inside(value):
        if not is_aux(value) and holds_aux(value):
            aux = unboxed(value)
            return WithAux(box_parts(aux.array, value), aux.how)
        return value

    return jax.tree.map(inside, tree, is_leaf=holds_aux)
