"""One call of an NNX method: split the objects, trace a private twin, run, write back what changed.

The twin has the original classes and float parameters. Only Variables that the forward really
changed are written, so a model that is closed over inside another trace can be called there.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from fewbit._util import key_name
from fewbit.interpreter import (
    TRACED,
    Cache,
    Call,
    Hashed,
    Runner,
    Traced,
    UntraceableModelError,
    is_array,
    key_of,
    plain,
    split_call,
)
from fewbit.models._flax_parts import check_layout, join_parts, split_parts, whole_variable
from fewbit.models.nnx._companions import LearnedScale, dropout_key, is_adapter
from fewbit.models.nnx._scopes import (
    RNGS,
    UPDATE_OFF,
    close_scopes,
    last_runner,
    open_scopes,
    place_of,
    remember_call,
)
from fewbit.planning import NOISE, STREAM, ScaleName, is_static_scale
from fewbit.qarray import is_stored

# --- NNX objects as structure: what a call changed besides the values of Variables ----------------


def value_of(variable: Any) -> Any:
    """A Variable's value; arrays that are plain attributes stand for themselves."""
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def is_object(value: Any) -> bool:
    """Whether a tree's node is one thing to us: an NNX object or a stored parameter."""
    return isinstance(value, nnx.Pytree | nnx.Variable) or is_stored(value)


def get_at(nodes: Any, path: tuple[Any, ...]) -> Any:
    """The object at a path below `nodes`."""
    node = nodes
    for key in path:
        inside = isinstance(node, tuple | list | dict)
        node = node[key] if inside else getattr(node, str(key))
    return node


def set_at(nodes: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set an array that is a plain attribute, or a stored weight, which then is a Variable."""
    parent, have = get_at(nodes, path[:-1]), get_at(nodes, path)
    new = whole_variable(have).replace(value) if is_stored(have) else value
    put_into = type(parent).__setitem__ if isinstance(parent, dict | list) else setattr
    put_into(parent, path[-1], new)


def take_over(mine: Any, new: Any, seen: list[Any]) -> None:
    """The call made Variables or changed plain attributes: take both over from the twin.

    Variables that were there before have their values already.
    """
    if any(mine is done for done in seen) or isinstance(mine, nnx.Variable):
        return
    seen.append(mine)
    for name, value in list(vars(new).items()):
        have = vars(mine).get(name)
        if name.startswith("_pytree__") or _is_kept(have, value):
            continue
        if isinstance(value, nnx.Pytree) and type(value) is type(have):
            take_over(have, value, seen)
        else:
            is_data = vars(new)["_pytree__nodes"].get(name, False)
            setattr(mine, name, nnx.data(value) if is_data else value)
    for name in set(vars(mine)) - set(vars(new)):
        delattr(mine, name)


def _is_kept(have: Any, value: Any) -> bool:
    """Whether an attribute holds the same Variables, or the same plain value, as before."""
    if have is value or (is_stored(have) and is_stored(value)):
        return True  # the values of Variables are written, and nothing else of a weight changes
    if type(have) is not type(value) or isinstance(value, nnx.Pytree):
        return False
    if isinstance(value, nnx.Variable):
        return True
    old: Any
    mine, old = jax.tree.flatten(have, is_leaf=is_object)
    theirs, new = jax.tree.flatten(value, is_leaf=is_object)
    return old == new and all(
        type(a) is type(b) and (isinstance(a, nnx.Variable) or (not is_array(a) and a == b))
        for a, b in zip(mine, theirs, strict=True)
    )


# --- Places of values among the inputs and results of an NNX call ---------------------------------

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Node:
    """The place of an NNX object among a call's arguments."""

    index: int


@dataclass(frozen=True)
class In:
    """A value that is traced input `number`."""

    number: int


@dataclass(frozen=True)
class New:
    """A value that is computed: number `number` of an outcome's arrays."""

    number: int


@dataclass(frozen=True)
class Object:
    """A result that is one of the caller's own modules or Variables."""

    path: Path


def refer(result: Any, nodes: tuple[Any, ...]) -> Any:
    """A method's result with the twin's modules and Variables replaced by their paths."""
    found: dict[int, Path] = {}

    def place(value):
        if not isinstance(value, nnx.Pytree | nnx.Variable):
            return value
        if not found:
            found.update((id(node), path) for path, node in nnx.iter_graph(nodes))
        return Object(found[id(value)]) if id(value) in found else value

    return jax.tree.map(place, result, is_leaf=is_object)


# A treedef, and for each leaf its place or, if it is no array, the leaf itself.
Slots = tuple[Any, tuple[Any, ...]]


@jax.tree_util.register_pytree_node_class
@dataclass
class After:
    """A twin after its call: output and state as arrays, everything else static.

    `graphdef` is None when the structure did not change.
    """

    arrays: list[Any]
    out: Call
    state: tuple[tuple[Path, Call], ...]
    graphdef: Any

    def tree_flatten(self):
        return (self.arrays,), (self.out, self.state, self.graphdef)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)


@jax.tree_util.register_pytree_node_class
@dataclass
class Outcome:
    """What leaves the jit: new arrays. The rest is static, so that a cached call knows it too."""

    new: list[Any]
    out: Slots
    writes: tuple[tuple[Path, Slots], ...]
    structure: Any  # (graphdef, every Variable's slots), or None

    def tree_flatten(self):
        return (self.new,), (self.out, self.writes, self.structure)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0], *static)


def input_slots(variables: dict[Path, Any]) -> dict[Path, Slots]:
    """Where each Variable's value comes from when a call begins."""
    number, found = 0, {}
    for path, variable in variables.items():
        leaves, treedef = jax.tree.flatten(value_of(variable), is_leaf=is_stored)
        places: list[Any] = []
        for leaf in leaves:
            places.append(In(number) if is_array(leaf) else leaf)
            number += is_array(leaf)
        found[path] = (treedef, tuple(places))
    return found


# --- One call: split the objects, trace a private twin, run, write back what changed --------------

_runners: Cache["NnxRunner"] = Cache(256)

_NO_SCOPES = (
    "the forward treats its modules as values of one structure (it stacks them), so it was traced "
    "without module scopes: a Site's path is its weight's, products of two activations have none"
)

_MSG_PARTS = (
    "The Variable at '{path}' was given the parts of a stored weight ({parts}), but it is one "
    "Variable, as of a float model. Update a model that is quantized: "
    "model = fewbit.quantize_model(model, provider, *inputs), then nnx.update(model, state)."
)


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
        for path, held in zip(variables, values, strict=True):
            if isinstance(held, nnx.State | dict) and "array" in held:
                name = "/".join(map(str, path[1:]))
                parts = held["array"] if isinstance(held["array"], nnx.State | dict) else held
                raise ValueError(_MSG_PARTS.format(path=name, parts=", ".join(parts)))
        whole = _Whole(graphdef, values, (args, kwargs, beside))
        return NnxRunner(model, provider, method, bases, whole)

    runner = _runners.get(lambda: (graph_key(graphdef), provider, method, bases, call.key), make)
    dynamic = [made(dynamic) for made in runner.makers]
    return Prepared(runner, dynamic, tuple(nodes), variables)


@dataclass(frozen=True)
class _At:
    """The place of an array among those of a call."""

    number: int


class _Whole:
    """A call whose stored weights are one Variable each, as what traces and runs it wants them."""

    def __init__(self, graphdef: Any, values: list[Any], rest: tuple[Any, ...]):
        self.graphdef, state = _joined(graphdef, values)
        self.variables = dict(nnx.to_flat_state(state))
        self.tree = ([value_of(v) for v in self.variables.values()], *rest)
        self.call = split_call(self.tree)[1]
        numbers = itertools.count()
        places = jax.tree.map(
            lambda x: _At(next(numbers)) if is_array(x) else x, (values, *rest), is_leaf=is_stored
        )
        state = _joined(graphdef, places[0])[1]
        values = [value_of(v) for v in dict(nnx.to_flat_state(state)).values()]
        leaves = jax.tree.leaves((values, *places[1:]), is_leaf=is_stored)
        self.makers = [_maker(leaf) for leaf in leaves if isinstance(leaf, _At) or is_stored(leaf)]


def _joined(graphdef: Any, values: list[Any]) -> tuple[Any, Any]:
    return nnx.split(join_parts(nnx.merge(graphdef, values)))


def _maker(leaf: Any) -> Callable[[list[Any]], Any]:
    """What makes a traced leaf of a call of the caller's arrays."""
    if isinstance(leaf, _At):
        return operator.itemgetter(leaf.number)
    treedef: Any
    places, treedef = jax.tree.flatten(leaf)
    return lambda arrays: treedef.unflatten([arrays[place.number] for place in places])


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
        twin = split_parts(nnx.merge(graphdef, [value(slots) for _, slots in contents]))
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
    try:
        return Hashed(graphdef)
    except (TypeError, ValueError):  # the latter of a memoryview that can be written to
        return key_of((tuple(graphdef.nodes), tuple(graphdef.attributes)))


def last_call(model: nnx.Module) -> tuple[tuple, dict] | None:
    """The abstract arguments of the last call, or of quantizing; None if there was neither."""
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
    kept = {
        path: v
        for path, v in ready.variables.items()
        if isinstance(v, QuantStat)
        and not getattr(get_at(ready.nodes, path[:-1]), UPDATE_OFF, False)
    }
    if not kept or not provider.collects:
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


_MSG_MOVED = (
    "{method} of {model} takes the parameter '{path}' out of its place, or puts it in two. A call "
    "is computed from the model as it was and cannot move a weight: do it outside of methods (as "
    "in `model.b = model.a`), or to the float model before it is quantized."
)


class NnxRunner(Runner):
    """A runner that reports changed state instead of returning all of it."""

    def __init__(self, model, provider, method, bases, whole):
        base, variables = bases[0], whole.variables
        graphdef, call = whole.graphdef, whole.call
        names = _names(bases, variables, whole.tree)
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
        self.makers = whole.makers
        self._params = [path for path, v in variables.items() if isinstance(v, nnx.Param)]
        self._what = dict(method=method, model=type(model).__name__)
        self._unscoped: Any = jax.jit(functools.partial(twin, False))
        self._notes: tuple[str, ...] = ()

    def trace(self, tree: Any) -> Traced:
        """As every runner; a model that cannot bear module paths is traced without them."""
        flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
        for key, value in flat:
            check_layout(self.leaf_path(key), value)
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
        there = {path for path, _ in after.state}
        gone = next((path for path in self._params if path not in there), None)
        if gone is not None:
            raise ValueError(_MSG_MOVED.format(path="/".join(map(str, gone[1:])), **self._what))
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
    # From here on the modules have the author's classes: else their methods would be interpreted
    # again, inside the program that is to be interpreted.
    changed = open_scopes(nodes, base, annotate)

    args, kwargs = _unmarked((args, kwargs), nodes)
    result = getattr(nodes[0], method)(*args, **kwargs)
    close_scopes(changed)
    for (module, name), variable in zip(set_aside, variables, strict=True):
        setattr(module, name, variable)
    # What is returned may be the twin's own objects; outside they are the caller's, by path.
    out, out_call = split_call(refer(result, nodes))
    after, state = nnx.split(nodes)
    arrays, contents = list(out), []
    for path, variable in nnx.to_flat_state(state):
        leaves, kept = split_call(value_of(variable))
        arrays += leaves
        contents.append((path, kept))
    return After(arrays, out_call, tuple(contents), None if after == graphdef else after)
