"""Flax NNX: a quantized model is a clone whose Params hold QArrays and whose modules have other classes.

A call splits the model, traces the method on a private float twin (original classes, with a scope opened
around every method so that Sites know their module), interprets it, and writes back only what changed.
"""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from fewbit import current
from fewbit._plan import Plan
from fewbit.calls import Cache, Call, is_array, key_name, split_call
from fewbit.engine import Runner, Traced, is_stored
from fewbit.jaxprs import scope_name
from fewbit.models.planning import plan_runs
from fewbit.params import quantize_leaf
from fewbit.qarray import QArray, WithAux
from fewbit.weight import plain

nnx.register_data_type(QArray)
nnx.register_data_type(WithAux)

_PATH = "_fewbit_path"  # static attribute of the twin's modules, only while tracing
_runners: Cache[Runner] = Cache(256)


def quantize(
    model: nnx.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    rngs: nnx.Rngs | None = None,
    skip_nnx_init: bool = False,
    **kwargs: Any,
) -> nnx.Module:
    """A quantized clone of `model`. Buffers that stay float are shared; weights convert one by one."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError("Rngs must be an nnx.Rngs instance.")
    if is_quantized(model):
        raise ValueError(
            f"This {type(model).__name__} is quantized already. Quantize the float model it came from."
        )
    made = None
    if not skip_nnx_init:
        made = plan(model, provider, *inputs, methods=methods, strict=provider.strict, **kwargs)
    new = nnx.clone(model)
    if made is not None and provider.quantizes_params:
        for path, variable in nnx.to_flat_state(nnx.state(new, nnx.Param)):
            leaf = made.leaf("/".join(map(str, path)))
            if leaf.how is not None:
                variable.set_value(quantize_leaf(leaf.path, variable.get_value(), leaf))
    return _set_classes(new, provider)


def plan(
    model: nnx.Module,
    provider: Any,
    *inputs: Any,
    methods: Sequence[str] = ("__call__",),
    strict: bool = True,
    **kwargs: Any,
) -> Plan:
    """The plan of an NNX model on these inputs; the model may be abstract (`nnx.eval_shape`)."""
    if len(methods) != 1:
        raise ValueError("Only one method is supported for nnx models.")
    if not inputs and not kwargs:
        raise ValueError(
            "Model inputs must be provided for nnx models. Their values do not matter; abstract ones "
            "do: quantize_model(model, provider, jax.ShapeDtypeStruct((1, 28, 28), 'float32'))."
        )
    run = make_run(model, provider, methods[0], inputs, kwargs)
    return plan_runs([run[:2]], kind="nnx", strict=strict)[0]


def is_quantized(model: Any) -> bool:
    return getattr(type(model), "_fewbit_provider", None) is not None


def float_params(*filters: Any) -> Any:
    """A filter for `nnx.grad(wrt=...)` and `nnx.Optimizer`: the Params that are not quantized.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> len(nnx.to_flat_state(nnx.state(model, float_params())))
    2
    """
    return nnx.All(*(filters or (nnx.Param,)), lambda path, v: not is_stored(v.get_value()))


# --- one call -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """The place of an NNX object among a call's arguments."""

    index: int


@jax.tree_util.register_pytree_node_class
@dataclass
class _Ending:
    """A twin's state after the call; `graphdef` is None when its structure did not change."""

    state: Any
    graphdef: Any

    def tree_flatten(self):
        return (self.state,), (self.graphdef,)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)


@jax.tree_util.register_pytree_node_class
@dataclass
class _Outcome:
    """What leaves the jit: the output and the state that changed. The rest is static, so that a cached
    call knows it too: places of the changed leaves, and the new structure if there is one."""

    out: Any
    changed: list[Any]
    places: tuple[Any, ...]
    structure: Any  # (graphdef, state treedef, {leaf number: input number}) or None

    def tree_flatten(self):
        return (self.out, self.changed), (self.places, self.structure)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)


class NnxRunner(Runner):
    """A runner that reports changed state instead of returning all of it."""

    def finish(self, traced: Traced, outs: list[Any], values: list[Any]) -> Any:
        numbered = jax.tree.unflatten(traced.out_tree, list(range(len(outs))))
        out_numbers, ending = numbered
        flat, treedef = jax.tree_util.tree_flatten_with_path(ending.state)
        changed, places, same = [], [], []
        for position, (key, number) in enumerate(flat):
            source = traced.forwarded[number]
            if source is not None:
                same.append((position, source))
                if self.state_keys[source] == key:
                    continue
                changed.append(values[source])
            else:
                changed.append(plain(outs[number]))
            places.append(key)
        out = jax.tree.map(lambda number: plain(outs[number]), out_numbers)
        structure = None
        if ending.graphdef is not None:
            structure = (ending.graphdef, treedef, tuple(same))
        return _Outcome(out, changed, tuple(places), structure)


def make_run(
    model: nnx.Module, provider: Any, method: str, args: tuple, kwargs: dict, *, root: bool = True
) -> tuple[Runner, list[Any], tuple[Any, ...]]:
    """The runner for a method on arguments of this form, its traced leaves, and the objects it uses."""
    nodes: list[Any] = [model]

    def mark(value):
        if isinstance(value, nnx.Pytree | nnx.Variable):
            nodes.append(value)
            return _Node(len(nodes) - 1)
        return value

    def is_node(x):
        return isinstance(x, nnx.Pytree | nnx.Variable) or is_stored(x)

    args, kwargs = jax.tree.map(mark, (args, kwargs), is_leaf=is_node)
    graphdef, state = nnx.split(tuple(nodes))
    params = _param_paths(state)

    def name(keypath):
        if keypath[0].idx != 0:
            return None
        path = _state_path(keypath[1:])
        return "/".join(path[1:]) if path in params else None

    dynamic, call = split_call((state, args, kwargs), name)

    def make() -> Runner:
        runner = NnxRunner(
            functools.partial(_pure, graphdef, method, call, True),
            provider,
            lambda key: call.names[key[0].idx],
            method=method,
            root=root,
            what=f"NNX module {type(model).__name__}",
        )
        runner.retry = functools.partial(_pure, graphdef, method, call, False)
        flat, _ = jax.tree_util.tree_flatten_with_path((state, args, kwargs), is_leaf=is_stored)
        runner.state_keys = [key[1:] for key, value in flat if is_array(value)]
        return runner

    key = lambda: (graphdef, provider, method, root, call.key)  # noqa: E731
    return _runners.get(key, make), dynamic, tuple(nodes)


def _param_paths(state: Any) -> set[tuple[str, ...]]:
    return {
        tuple(map(str, path)) for path, v in nnx.to_flat_state(state) if isinstance(v, nnx.Param)
    }


def _state_path(keypath: tuple[Any, ...]) -> tuple[str, ...]:
    """A state's key path without the step from a Variable to its value."""
    if keypath and isinstance(keypath[-1], jax.tree_util.GetAttrKey):
        keypath = keypath[:-1]
    return tuple(key_name((key,)) for key in keypath)


def _pure(graphdef: Any, method: str, call: Call, annotate: bool, dynamic: list[Any]) -> Any:
    state, args, kwargs = call.merge(dynamic)
    nodes = nnx.merge(graphdef, state)
    classes = _open_scopes(nodes[0], annotate)

    def unmark(value):
        return nodes[value.index] if isinstance(value, _Node) else value

    args, kwargs = jax.tree.map(unmark, (args, kwargs), is_leaf=lambda x: isinstance(x, _Node))
    out = getattr(nodes[0], method)(*args, **kwargs)
    _close_scopes(nodes[0], classes)
    after, state = nnx.split(nodes)
    return out, _Ending(state, None if after == graphdef else after)


def _open_scopes(model: nnx.Module, annotate: bool) -> list[tuple[nnx.Module, type]]:
    classes = []
    for path, module in list(nnx.iter_modules(model)):
        classes.append((module, type(module)))
        original = getattr(type(module), "_unquantized_type", type(module))
        _set_class(module, scoped_class(original) if annotate else original)
        if annotate:
            setattr(module, _PATH, "/".join(map(str, path)))
    return classes


def _close_scopes(model: nnx.Module, classes: list[tuple[nnx.Module, type]]) -> None:
    """Back to the classes the model came with. Modules made in the call keep theirs."""
    for module, cls in classes:
        _set_class(module, cls)
        if hasattr(module, _PATH):
            delattr(module, _PATH)


def _run(self: Any, name: str, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A method of a quantized module."""
    provider = type(self)._fewbit_provider
    _, args, kwargs = provider.process_model_inputs(self, args, kwargs)
    root = type(self)._fewbit_root
    runner, dynamic, nodes = make_run(self, provider, name, args, kwargs, root=root)
    outcome = runner(dynamic)
    if outcome.structure is None:
        _write_back(nodes, outcome)
    else:
        _rebuild_structure(nodes, outcome, dynamic)
    return provider.process_model_output(name, outcome.out)


def _write_back(nodes: tuple[Any, ...], outcome: _Outcome) -> None:
    if not outcome.places:
        return
    variables = {
        tuple(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(nodes))
    }
    for key, value in zip(outcome.places, outcome.changed, strict=True):
        variables[_state_path(key)].set_value(value)


def _rebuild_structure(nodes: tuple[Any, ...], outcome: _Outcome, dynamic: list[Any]) -> None:
    """The call made Variables or changed plain attributes: take both over from the twin."""
    graphdef, treedef, same = outcome.structure
    leaves: list[Any] = [None] * treedef.num_leaves
    for position, source in same:
        leaves[position] = dynamic[source]
    rest = iter(outcome.changed)
    forwarded = {position for position, _ in same}
    for position in range(treedef.num_leaves):
        if position not in forwarded:
            leaves[position] = next(rest)
    twin = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
    for mine, new in zip(nodes, twin, strict=True):
        _take_over(mine, new)


def _take_over(mine: Any, new: Any) -> None:
    for name, value in vars(new).items():
        have = vars(mine).get(name)
        if have is value or name.startswith("_pytree__"):
            continue
        if isinstance(value, nnx.Variable) and isinstance(have, nnx.Variable):
            have.set_value(value.get_value())
        elif isinstance(value, nnx.Pytree) and type(value) is type(have):
            _take_over(have, value)
        else:
            setattr(mine, name, value)


# --- classes ------------------------------------------------------------------------------------------


def _set_class(module: nnx.Module, cls: type) -> None:
    object.__setattr__(module, "__class__", cls)


def _set_classes(model: nnx.Module, provider: Any) -> nnx.Module:
    for path, module in list(nnx.iter_modules(model)):
        _set_class(module, quantized_class(type(module), provider, not path))
    return model


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    """`__call__` and the public methods that a module class defines itself."""
    base = set(dir(nnx.Module))
    found = {}
    for name, value in inspect.getmembers_static(cls):
        public = name == "__call__" or (not name.startswith("_") and name not in base)
        if public and isinstance(value, types.FunctionType):
            found[name] = value
    return found


def _subclass(original: type, namespace: dict[str, Any]) -> type:
    namespace |= {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_unquantized_type": original,
    }
    return type(original)(original.__name__, (original,), namespace)


@functools.lru_cache(maxsize=1024)
def quantized_class(original: type, provider: Any, root: bool) -> type:
    """The class of a quantized module: each public method is interpreted."""

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def quantized(self, *args, **kwargs):
            return _run(self, name, method, args, kwargs)

        return quantized

    namespace: dict[str, Any] = {name: wrap(name, m) for name, m in _methods(original).items()}
    namespace |= {"_fewbit_provider": provider, "_fewbit_root": root, "__reduce__": _reduce}
    namespace["_fewbit_pure_dict"] = lambda self: nnx.to_pure_dict(nnx.state(self))
    return _subclass(original, namespace)


@functools.lru_cache(maxsize=1024)
def scoped_class(original: type) -> type:
    """The class of a twin's module while tracing: each public method opens fewbit's scope."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def scoped(self, *args, **kwargs):
            path = getattr(self, _PATH, "")
            with jax.named_scope(scope_name(path, original.__name__)), current.in_module(path):
                return method(self, *args, **kwargs)

        return scoped

    return _subclass(original, {name: wrap(m) for name, m in _methods(original).items()})


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickled as the original classes with quantized Params, and the provider."""
    provider, plain_model = type(self)._fewbit_provider, nnx.clone(self)
    for _, module in list(nnx.iter_modules(plain_model)):
        _set_class(module, type(module)._unquantized_type)
    return _unpickle, (plain_model, provider)


def _unpickle(model: nnx.Module, provider: Any) -> nnx.Module:
    return _set_classes(model, provider)
