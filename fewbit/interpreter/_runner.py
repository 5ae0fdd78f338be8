"""The engine under every front end: a pure function traced, planned, and run quantized.

A front end turns its model into `pure(tree)`, a function of one pytree in which parameters may be
stored quantized, and says which leaves are parameters. Everything JAX can cache, JAX caches: one
`Runner` holds one function object, so a second call costs a jit dispatch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from fewbit.adapters import Adapters, check_adapters
from fewbit.interpreter import _current as current
from fewbit.interpreter._beside import Filled, StaticScales, check_scales
from fewbit.interpreter._interpret import Interpreter
from fewbit.interpreter._site import SiteRunner
from fewbit.interpreter._taps import Readings, Tap, Taps
from fewbit.interpreter._traced import (
    LeafPath,
    Traced,
    as_value,
    check_something,
    check_stored,
    float_view,
    say_once_if_unpacked,
    untraceable,
)
from fewbit.interpreter._weights import Weight, is_weight, plain
from fewbit.kernels import for_kernels
from fewbit.planning import (
    NOISE,
    SCALE,
    Decision,
    Leaf,
    Plan,
    Request,
    RuleFor,
    ScaleName,
    abstract_adapters,
    abstract_scales,
    decide,
    make_plan,
    planned_adapters,
    planned_scales,
)
from fewbit.qarray import abstract_quantized, is_stored
from fewbit.tracing import Constant, Program, analyse, bind, forwards
from fewbit.training import (
    QSCALE,
    HistoryPlan,
    Statistic,
    abstract_learned,
    check_leftovers,
    check_trains,
    empty_histories,
    empty_statistics,
    histories,
    range_tap,
    reaching,
    run_inputs,
    trained_inputs,
    wanted_storage,
)
from fewbit.training import added as added_statistics

_MSG_TWICE = (
    "{what} is called with a module that has a static scale '{name}', as it has itself: a scale is "
    "found by its module's path. Make the one a submodule of the other and quantize them together, "
    "or use dynamic ranges in one of them."
)


class Runner:
    """`pure`, traced for `provider`; calling it runs the quantized program under a cached jit.

    `site_path` is 'module', 'owner' or 'leaf' (see `tracing.analyse`). With `root=False` the
    function is a submodule called on its own: paths are not the model's, so rules come from the
    weights themselves.
    """

    def __init__(
        self,
        pure: Callable[[Any], Any],
        provider: Any,
        leaf_path: LeafPath,
        *,
        method: str = "__call__",
        site_path: str = "module",
        root: bool = True,
        what: str = "The model",
    ):
        self.provider, self.leaf_path = provider, leaf_path
        self.method, self.site_path, self.root, self.what = method, site_path, root, what
        self.example: Any = None  # the abstract leaves of the last trace
        self.call: Any = None  # what makes arguments of them, for front ends that keep it
        self.cure = ""  # what to do if all weights are constants, where a front end knows
        self._scales: dict[int, str] | None = None  # the leaves that are static scales
        self._filled = Filled()
        self._traceable = jax.jit(pure)
        self._compiled = jax.jit(self.interpret)
        self._compiled_collecting = jax.jit(self.interpret_collecting)

    def __call__(self, tree: Any) -> Any:
        self.check_filled(tree)
        return (self.interpret if self.provider.disable_jit else self._compiled)(tree)

    def check_filled(self, tree: Any) -> None:
        """Raise if a static scale among the leaves waits for statistics; traced ones may."""
        if not self.provider.quantizes_params:
            return
        if self._scales is None:
            flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
            named = enumerate(self.leaf_path(key) for key, _ in flat)
            self._scales = {
                i: str(name)
                for i, name in named
                if isinstance(name, ScaleName) and name.endswith(SCALE)
            }
        if self._scales:
            leaves = jax.tree.leaves(tree, is_leaf=is_stored)
            found = {name: leaves[i] for i, name in self._scales.items()}
            self._filled.check(found, self.what)

    def trace(self, tree: Any) -> Traced:
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
        views = [float_view(value) for _, value in flat]
        names = [self.leaf_path(key) for key, _ in flat]
        paths = [None if isinstance(name, ScaleName) else name for name in names]
        _refuse_one_name_for_two(path for path in paths if path is not None)
        with current.tracing(self.provider) as failed:
            try:
                traced = self._traceable.trace(jax.tree.unflatten(treedef, views))
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
                raise untraceable(self.what, failed, error) from error
        values = [as_value(value, path) for path, (_, value) in zip(paths, flat, strict=True)]
        leaves = [
            (path, tuple(view.shape))
            if path is not None
            else (Constant() if is_weight(value) else None)
            for path, view, value in zip(paths, views, values, strict=True)
        ]
        shapes = [jax.ShapeDtypeStruct(view.shape, view.dtype) for view in views]
        self.example = jax.tree.unflatten(treedef, shapes)
        out_tree = jax.tree.structure(traced.out_info)
        program = analyse(traced.jaxpr, leaves, method=self.method, site_path=self.site_path)
        scales = [
            (str(n), v)
            for n, v in zip(names, values, strict=True)
            if isinstance(n, ScaleName) and (n != NOISE or self.provider.trains)
        ]
        twice = [name for name, count in Counter(name for name, _ in scales).items() if count > 1]
        if twice:
            raise ValueError(_MSG_TWICE.format(what=self.what, name=twice[0]))
        learned = {name: value for name, value in scales if name.endswith(QSCALE)}
        return Traced(
            program,
            values,
            out_tree,
            list(forwards(traced.jaxpr)),
            [
                None if path is None else Leaf(path, tuple(view.shape), view.dtype)
                for path, view in zip(paths, views, strict=True)
            ],
            {name: value for name, value in scales if name not in learned},
            learned,
        )

    def rule_for(self, values: Sequence[Any]) -> RuleFor:
        carried = {v.leaf: v.rule for v in values if is_weight(v)}

        def find(ts):
            if self.root or ts.site.weight is None or self.provider.trains:
                return self.provider.rule_for(ts.site.path, ts.site.op)
            rule = carried.get(ts.site.weight)  # a weight that the model kept float stays float
            if rule is None and self.provider.adapts:  # unless it has an adapter
                rule = self.provider.adapter_rule(ts.site.weight, ts.site.op)
            return next((i for i, r in enumerate(self.provider.rules) if r == rule), None), rule

        return find

    def interpret(self, tree: Any) -> Any:
        """Trace, decide, run: what is jitted. All but the arrays' values happens at trace time."""
        return self._interpret(tree, collecting=False)[0]

    def interpret_collecting(self, tree: Any) -> tuple[Any, dict[str, Any]]:
        """As `interpret`, and the statistics of static scales with this batch, by name."""
        out, scales, readings = self._interpret(tree, collecting=True)
        return out, added_statistics(scales, readings)

    def _interpret(self, tree: Any, collecting: bool) -> tuple[Any, dict[str, Any], Readings]:
        traced, decisions = self.ready(tree)
        values, scales, ranges = run_inputs(self.provider, traced, decisions)
        interpreter = self.interpreter(traced.program, decisions, scales, collecting=collecting)
        outs, readings = interpreter.run_tapped(traced.program.root, values)
        outs = reaching(outs, traced.forwarded, ranges)
        out = self.finish(traced, outs, jax.tree.leaves(tree, is_leaf=is_stored))
        return out, scales, readings

    def collecting(self, tree: Any) -> tuple[Any, dict[str, Any]]:
        """Run a model that trains, and collect the ranges of its activations."""
        eager = self.provider.disable_jit
        return (self.interpret_collecting if eager else self._compiled_collecting)(tree)

    def as_traced(self, tree: Any) -> list[Any]:
        """The leaves that the function itself returns for float leaves, no Site replaced."""
        with current.tracing(self.provider):
            return jax.tree.leaves(self._traceable(tree))

    def decided(self, tree: Any) -> tuple[Traced, dict[str, Decision]]:
        """Traced and decided, nothing checked."""
        traced = self.trace(tree)
        return traced, decide(traced.program, self.rule_for(traced.values))

    def ready(self, tree: Any) -> tuple[Traced, dict[str, Decision]]:
        """Traced and decided; parameters and scales are checked against the rules."""
        traced, decisions = self.decided(tree)
        self.provider.mark_used(
            d.rule_index for d in decisions.values() if d.rule_index is not None
        )
        rules = {site: d.rule for site, d in decisions.items() if d.rule is not None}
        self.provider.check_ready(rules)
        if self.provider.trains:
            check_trains(self.provider, traced, decisions, self.what, self.root, self.cure)
        if self.provider.quantizes_params:
            requests = wanted_storage(traced.program, decisions)
            if self.root:
                program, values = traced.program, traced.values
                said = (self.provider, self.what, self.cure)
                check_stored(program, values, decisions, requests, *said)
                check_something(program, values, decisions, *said)
            check_scales(traced.program, decisions, traced.scales, self.provider.strict)
            say_once_if_unpacked(jax.tree.leaves(tree, is_leaf=is_stored))
        if self.provider.adapts:
            plans = planned_adapters([traced.program], [decisions])
            used = {ts.site.weight for ts in traced.program.sites}
            check_adapters(plans, traced.scales, self.provider.strict, used)
        return traced, decisions

    def finish(self, traced: Traced, outs: list[Any], values: list[Any]) -> Any:
        """The model's output. A parameter handed through untouched comes out as it is stored."""
        leaves = [
            plain(out) if source is None else values[source]
            for out, source in zip(outs, traced.forwarded, strict=True)
        ]
        return jax.tree.unflatten(traced.out_tree, leaves)

    def interpreter(
        self,
        program: Program,
        decisions: dict[str, Decision],
        scales: dict[str, Any],
        report: Callable[[str, str], None] | None = None,
        collecting: bool = False,
    ) -> Interpreter:
        static = StaticScales(scales)
        adapters = Adapters(static=static)
        if self.provider.adapts:
            adapters.plans = planned_adapters([program], [decisions])
        said = report or (lambda site, text: None)
        planning = report is not None
        sites = SiteRunner(self.provider, decisions, said, static, adapters, collecting, planning)
        return Interpreter(
            sites,
            lambda ts: decisions[ts.site.id].rule is not None or ts.site.weight in adapters.plans,
            sites.finishes,
            shortcuts=any(d.rule is not None for d in decisions.values()),
            static=static,
            taps=Taps(range_tap(program, decisions)) if collecting else Taps(),
        )

    def tapped(
        self, tree: Any, tap_for: Callable[[Traced, dict[str, Decision]], Tap]
    ) -> tuple[Any, Any]:
        """The model as it is, in float, and what a tap reads meanwhile: `{site id: Reading}`."""
        traced, decisions = self.decided(tree)
        tap = tap_for(traced, decisions)
        in_float = lambda ts, ins: bind(ts.eqn, [plain(v) for v in ins])[0]  # noqa: E731
        interpreter = Interpreter(in_float, lambda ts: False, taps=Taps(tap))
        outs, readings = interpreter.run_tapped(traced.program.root, traced.values)
        return self.finish(traced, outs, jax.tree.leaves(tree, is_leaf=is_stored)), readings

    def observe(
        self, traced: Traced, decisions: dict[str, Decision], requests: dict[str, Request]
    ) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """Run abstractly on leaves stored as requested: what ran each Site, what dequantized."""
        if self.root and self.provider.strict and not self.provider.learns:
            check_leftovers(traced.program, traced.leaves)
        ran: dict[str, str] = {}
        seen: list[tuple[str, str]] = []
        trains = self.provider.trains
        values = [
            _abstract_weight(leaf, requests[leaf.path].how, value)
            if leaf and leaf.path in requests and not trains
            else value
            for value, leaf in zip(traced.values, traced.leaves, strict=True)
        ]

        scales = abstract_scales(planned_scales([traced.program], [decisions]))
        if self.provider.adapts:
            dtypes = {leaf.path: leaf.dtype for leaf in traced.leaves if leaf}
            scales |= abstract_adapters(planned_adapters([traced.program], [decisions], dtypes))
        plans = histories(self.provider, traced.program, decisions, requests)
        scales |= jax.eval_shape(lambda: empty_histories(plans))
        learned = abstract_learned(traced.leaves, requests) if trains else {}

        def go(values, scales, learned):
            if trains:
                values, scales, _ = trained_inputs(
                    values, traced.leaves, requests, plans, scales, learned
                )
            interpreter = self.interpreter(traced.program, decisions, scales, ran.__setitem__)
            outs = interpreter.run(traced.program.root, values)
            seen.extend(interpreter.dequantized)
            return [plain(out) for out in outs]

        jax.eval_shape(go, values, scales, learned)
        return ran, seen


def _abstract_weight(leaf: Leaf, how: Any, value: Any) -> Weight:
    # Where it lies, if that is part of its type: planning sees what a `shard_map` will.
    sharding = getattr(value, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and sharding.mesh.are_all_axes_explicit
    place = sharding if explicit else None
    array = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return Weight(for_kernels(abstract_quantized(array, how), how), leaf.path)


def _refuse_one_name_for_two(paths: Iterable[str]) -> None:
    """Raise where two parameters would be one: `{'a/b': ...}` beside `{'a': {'b': ...}}`."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ValueError(
                f"Two parameters have the path '{path}', by which rules, plans and files know "
                "them. Rename one: a key with '/' in it reads like a key within a key."
            )
        seen.add(path)


# --- From runners and inputs to a Plan: what every front end's `plan` ends in ---------------------

# (method, args, kwargs) of one call of a float model -> its runner, and the leaves to call it with.
FloatRun = Callable[[str, tuple, dict], tuple[Runner, list[Any]]]


def plan_runs(
    runs: Sequence[tuple[Runner, Any]], *, kind: str, strict: bool
) -> tuple[Plan, dict[str, Request]]:
    """One plan over one or more methods of a model, and the storage it asks of each parameter."""
    first, _ = runs[0]
    decided = [runner.decided(tree) for runner, tree in runs]
    leaves = {leaf.path: leaf for traced, _ in decided for leaf in traced.leaves if leaf}
    return make_plan(
        first.provider,
        [(run[0].method, traced.program) for run, (traced, _) in zip(runs, decided, strict=True)],
        list(leaves.values()),
        kind=kind,
        observe=lambda k, requests: runs[k][0].observe(*decided[k], requests),
        strict=strict,
        cure=first.cure,
    )


def empty_histories_of(run: tuple[Runner, Any]) -> dict[str, Any]:
    """The histories that delayed scales of such a model begin with, by name."""
    return empty_histories(histories_of(run))


def histories_of(run: tuple[Runner, Any]) -> dict[str, HistoryPlan]:
    """What histories the delayed scales of a run need, by name."""
    runner, tree = run
    traced, decisions = runner.decided(tree)
    requests = wanted_storage(traced.program, decisions)
    return histories(runner.provider, traced.program, decisions, requests)


def empty_statistics_of(run: tuple[Runner, Any]) -> dict[str, Statistic]:
    """The statistics that a run of a model that trains fills, all zero, by name."""
    runner, tree = run
    traced, decisions = runner.decided(tree)
    empty = empty_statistics(traced.program, decisions)
    return {name: statistic for name, (_, _, statistic) in empty.items()}
