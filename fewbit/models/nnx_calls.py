"""One call of an NNX method: split the objects, trace a private twin, run, write back what changed.

The twin has the original classes and float parameters. Only Variables that the forward really
changed are written, so a model that is closed over inside another trace can be called there.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from fewbit.call_keys import is_hashable, key_of
from fewbit.calls import TRACED, Cache, Call, is_array, key_name, split_call
from fewbit.engine import Runner, Traced, UntraceableModelError, is_stored
from fewbit.models.nnx_adapters import dropout_key, is_adapter
from fewbit.models.nnx_learned import LearnedScale
from fewbit.models.nnx_places import (
    After,
    In,
    New,
    Node,
    Object,
    Outcome,
    Path,
    Slots,
    input_slots,
    refer,
)
from fewbit.models.nnx_scopes import (
    close_scopes,
    last_runner,
    open_scopes,
    place_of,
    remember_call,
)
from fewbit.models.nnx_structure import get_at, is_object, set_at, take_over, value_of
from fewbit.static_scales import NOISE, STREAM, ScaleName, is_static_scale
from fewbit.weight import plain

_runners: Cache["NnxRunner"] = Cache(256)

_NO_SCOPES = (
    "the forward treats its modules as values of one structure (it stacks them), so it was traced "
    "without module scopes: a Site's path is its weight's, products of two activations have none"
)

RNGS = "qwix_rngs"  # the attribute that people set by `model.set_attributes(qwix_rngs=nnx.Rngs(0))`

UPDATE_OFF = "disable_quant_stats_update"  # set by people to evaluate without counting


class QuantStat(nnx.Variable):
    """The activation ranges that training has seen at one operand, for its static scale."""


class AmaxHistory(nnx.Variable):
    """The largest values of past steps at one operand: what a delayed scale is made from.

    Its gradient is the history after the step, so it is differentiated with the parameters:
    `nnx.DiffState(0, nnx.Any(nnx.Param, fewbit.AmaxHistory))`.
    """


@dataclass(frozen=True)
class Prepared:
    """A call made ready: its runner, the traced leaves, the objects it uses, their Variables."""

    runner: "NnxRunner"
    dynamic: list[Any]
    nodes: tuple[Any, ...]
    variables: dict[Path, Any]


def prepare(
    model: nnx.Module, provider: Any, method: str, args: tuple, kwargs: dict, noise: Any = None
) -> Prepared:
    """The runner for a method on arguments of this form; NNX objects among them are state too.

    `noise` is the key of stochastic rounding.
    """
    beside = dropout_key(model, provider)
    if noise is not None:
        beside = {**beside, NOISE: noise}
    nodes: list[Any] = [model]

    def mark(value):
        if not isinstance(value, nnx.Pytree | nnx.Variable):
            return value
        nodes.append(value)
        return Node(len(nodes) - 1)

    args, kwargs = jax.tree.map(mark, (args, kwargs), is_leaf=is_object)
    graphdef, state = nnx.split(tuple(nodes))
    variables = dict(nnx.to_flat_state(state))
    values = [value_of(v) for v in variables.values()]
    dynamic, call = split_call((values, args, kwargs, beside))
    bases = tuple(map(place_of, nodes))

    def make() -> NnxRunner:
        tree = (values, args, kwargs, beside)
        return NnxRunner(model, provider, method, bases, graphdef, call, variables, tree)

    runner = _runners.get(lambda: (graph_key(graphdef), provider, method, bases, call.key), make)
    return Prepared(runner, dynamic, tuple(nodes), variables)


def call(model: nnx.Module, provider: Any, method: str, args: tuple, kwargs: dict) -> Any:
    """Run a method of a quantized module."""
    ready = prepare(model, provider, method, args, kwargs, noise_key(model, provider))
    outcome, stats = _run(ready, provider, model)
    if method == "__call__":
        remember_call(model, ready.runner)

    def leaf(slot):
        if isinstance(slot, In):
            return ready.dynamic[slot.number]
        if isinstance(slot, Object):
            return get_at(ready.nodes, slot.path)
        return outcome.new[slot.number] if isinstance(slot, New) else slot

    def value(slots):
        treedef, leaves = slots
        return jax.tree.unflatten(treedef, map(leaf, leaves))

    for path, stat in stats.items():
        ready.variables[path].set_value(stat)
    for path, slots in outcome.writes:
        old = ready.variables.get(path)
        if isinstance(old, nnx.Variable):
            old.set_value(value(slots))
        elif outcome.structure is None:
            set_at(ready.nodes, path, value(slots))
    if outcome.structure is not None:
        graphdef, contents = outcome.structure
        twin = nnx.merge(graphdef, [value(slots) for _, slots in contents])
        seen: list[Any] = []
        for mine, new in zip(ready.nodes, twin, strict=True):
            take_over(mine, new, seen)
    return value(outcome.out)


def result_of(traced: Traced, outs: list[Any]) -> Any:
    """The method's own result among all that a traced call returns."""
    after = jax.tree.unflatten(traced.out_tree, outs)
    return after.out.merge(after.arrays[: sum(s is TRACED for s in after.out.static)])


def graph_key(graphdef: Any) -> Any:
    """The structure of NNX objects as a key; what they hold may be a list or somebody's config."""
    if is_hashable(graphdef):
        return graphdef
    return key_of((tuple(graphdef.nodes), tuple(graphdef.attributes)))


def last_call(model: nnx.Module) -> tuple[tuple, dict] | None:
    """The abstract arguments of the last call; None if there was none."""
    runner = last_runner(model)
    if runner is None or runner.example is None:
        return None
    values, args, kwargs, _ = runner.call.merge(runner.example)
    if any(isinstance(leaf, Node) for leaf in jax.tree.leaves((args, kwargs))):
        nodes = nnx.merge(runner.graphdef, values)
        args, kwargs = _unmarked((args, kwargs), nodes)
    return args, kwargs


def _unmarked(tree: Any, nodes: Any) -> Any:
    """Arguments with the NNX objects that they had."""

    def unmark(value):
        return nodes[value.index] if isinstance(value, Node) else value

    return jax.tree.map(unmark, tree, is_leaf=lambda x: isinstance(x, Node))


def _run(ready: Prepared, provider: Any, model: nnx.Module) -> tuple[Any, dict[Path, Any]]:
    """The outcome and, for a model that collects ranges, its new statistics."""
    kept = {path: v for path, v in ready.variables.items() if isinstance(v, QuantStat)}
    if not kept or not provider.collects or getattr(model, UPDATE_OFF, False):
        return ready.runner(ready.dynamic), {}
    outcome, found = ready.runner.collecting(ready.dynamic)
    names = {
        "/".join(p for p in (place_of(ready.nodes[path[0]]), *map(str, path[1:])) if p): path
        for path in kept
    }
    return outcome, {names[name]: stat for name, stat in found.items() if name in names}


def noise_key(model: nnx.Module, provider: Any) -> Any:
    """A new key from the model's own streams, if its rules round stochastically."""
    rngs = getattr(model, RNGS, None)
    return rngs[STREAM]() if provider.trains and provider.draws_noise and rngs is not None else None


class NnxRunner(Runner):
    """A runner that reports changed state instead of returning all of it."""

    def __init__(self, model, provider, method, bases, graphdef, call, variables, tree):
        base = bases[0]
        names = _names(bases, variables, tree)
        before = input_slots(variables)
        scales = tuple(
            path
            for path, v in variables.items()
            if is_scale(path, v) or is_adapter(path, v, variables)
        )
        twin = functools.partial(_run_twin, graphdef, base, method, call, scales)
        super().__init__(
            functools.partial(twin, True),
            provider,
            lambda key: self.names[key[0].idx],
            method=method,
            root=not base,
            what=f"NNX module {type(model).__name__}",
        )
        self.names, self.before, self.call, self.graphdef = names, before, call, graphdef
        self._unscoped: Any = jax.jit(functools.partial(twin, False))
        self._notes: tuple[str, ...] = ()

    def trace(self, tree: Any) -> Traced:
        """As every runner; a model that cannot bear module paths is traced without them."""
        try:
            traced = super().trace(tree)
        except UntraceableModelError:
            raise
        except (TypeError, ValueError):
            if self._unscoped is None:
                raise
            scoped, self._traceable = self._traceable, self._unscoped
            try:
                traced = super().trace(tree)
            except Exception:
                self._traceable = scoped
                raise
            self._unscoped, self._notes = None, (_NO_SCOPES,)
        program = replace(traced.program, opaque=traced.program.opaque + self._notes)
        return replace(traced, program=program)

    def finish(self, traced: Traced, outs: list[Any], values: list[Any]) -> Outcome:
        after = jax.tree.unflatten(traced.out_tree, list(range(len(outs))))
        numbers = iter(after.arrays)
        new: list[Any] = []

        def slots(call: Call) -> Slots:
            leaves = []
            for static in call.static:
                if static is not TRACED:
                    leaves.append(static)
                    continue
                number = next(numbers)
                source = traced.forwarded[number]
                if source is None:
                    new.append(plain(outs[number]))
                leaves.append(New(len(new) - 1) if source is None else In(source))
            return call.treedef, tuple(leaves)

        out = slots(after.out)
        contents = tuple((path, slots(call)) for path, call in after.state)
        writes = tuple((path, s) for path, s in contents if self.before.get(path) != s)
        structure = None if after.graphdef is None else (after.graphdef, contents)
        return Outcome(new, out, writes, structure)

    def rewritten(self, tree: Any) -> list[str]:
        """The parameters that the forward itself changes."""
        traced = self.trace(tree)
        outcome = self.finish(traced, [None] * len(traced.forwarded), traced.values)
        changed = {path for path, _ in outcome.writes}
        numbers = [
            leaf.number
            for path, (_, leaves) in self.before.items()
            for leaf in leaves
            if path in changed and isinstance(leaf, In)
        ]
        return [name for name in map(self.names.__getitem__, numbers) if name is not None]


def is_scale(path: Path, variable: Any) -> bool:
    """Whether a Variable holds a scale, of activations or learned, or what one is made from."""
    if isinstance(variable, QuantStat | LearnedScale | AmaxHistory):
        return True
    return isinstance(variable, nnx.Param) and is_static_scale(path[-1], value_of(variable))


def _names(bases: tuple[str, ...], variables: dict[Path, Any], tree: Any) -> tuple[str | None, ...]:
    """The parameter path of each traced leaf; None for what is no parameter of the model itself.

    Static scales are known in the arguments' modules too: a Site there is named by its module.
    Adapters are beside the parameters as scales are.
    """
    kinds = list(variables.items())

    def name(keypath):
        if keypath[0].idx == 3:
            return ScaleName(keypath[1].key)
        if keypath[0].idx != 0:
            return None
        path, variable = kinds[keypath[1].idx]
        scale = is_scale(path, variable) or is_adapter(path, variable, variables)
        if not scale and (path[0] != 0 or not isinstance(variable, nnx.Param)):
            return None
        parts = [bases[path[0]], *map(str, path[1:]), key_name(keypath[2:])]
        name = "/".join(part for part in parts if part)
        return ScaleName(name) if scale else name

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
    return tuple(name(key) for key, value in flat if is_array(value))


def _run_twin(
    graphdef: Any,
    base: str,
    method: str,
    call: Call,
    scales: tuple[Path, ...],
    annotate: bool,
    dynamic: list[Any],
) -> After:
    values, args, kwargs, _ = call.merge(dynamic)
    nodes = nnx.merge(graphdef, values)  # a list: a Variable may hold a dict, which is no state
    # The author's code, which may scan or vmap a module, must not meet scales of another shape.
    set_aside = [(get_at(nodes, path[:-1]), path[-1]) for path in scales]
    # Nor keys, which `set_attributes` gives to every module, those of a stack of layers too.
    modules = [part for _, part in nnx.iter_graph(nodes) if isinstance(part, nnx.Module)]
    set_aside += [(module, RNGS) for module in modules if RNGS in vars(module)]
    variables = [vars(module)[name] for module, name in set_aside]
    for module, name in set_aside:
        delattr(module, name)
    changed = open_scopes(nodes, base, annotate)

    args, kwargs = _unmarked((args, kwargs), nodes)
    result = getattr(nodes[0], method)(*args, **kwargs)
    close_scopes(changed)
    for (module, name), variable in zip(set_aside, variables, strict=True):
        setattr(module, name, variable)
    out, out_call = split_call(refer(result, nodes))
    after, state = nnx.split(nodes)
    arrays, contents = list(out), []
    for path, variable in nnx.to_flat_state(state):
        leaves, kept = split_call(value_of(variable))
        arrays += leaves
        contents.append((path, kept))
    return After(arrays, out_call, tuple(contents), None if after == graphdef else after)
