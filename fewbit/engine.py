"""The engine under every front end: a pure function traced, planned, and run quantized.

A front end turns its model into `pure(tree)`, a function of one pytree in which parameters may be
stored quantized, and says which leaves are parameters. Everything JAX can cache, JAX caches: one
`Runner` holds one function object, so a second call costs a jit dispatch.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit import current
from fewbit._plan import Plan, SitePlan
from fewbit._plan_messages import unmatched_message
from fewbit.decisions import Decision, Leaf, Request, RuleFor, decide, storage
from fewbit.interpret import Interpreter
from fewbit.jaxprs import bind, forwards
from fewbit.layouts import for_kernels, would_be_faster
from fewbit.provenance import Constant
from fewbit.qarray import QArray, WithAux, quantize_with
from fewbit.sites import SiteRunner
from fewbit.static_run import StaticScales, check_scales
from fewbit.static_scales import ScaleName, abstract_scales, planned_scales
from fewbit.taps import Tap, Taps
from fewbit.trace import Program, analyse
from fewbit.weight import Weight, is_weight, plain, without_gradient

LeafPath = Callable[[tuple[Any, ...]], str | None]

_MSG_UNTRACEABLE = """{where} cannot be traced: its Python code asks for the value of an array.
  {error}
fewbit reads a model the way jax.jit does. Two cures:
  1. Pass what the code branches on as a plain Python value (a bool, int or string is never traced).
  2. Quantize the submodules that can be traced on their own, and leave this one in float."""

_MSG_UNQUANTIZED = (
    "It seems you're feeding an unquantized param to a quantized model. Parameter '{leaf}' is "
    "float, but {site} wants it as {qtype}. Quantize the tree first: "
    "quantize_params(params, plan), or for Linen "
    "quantize_params(params, jax.eval_shape(model.init, key, x)['params'])."
)
_MSG_OTHER_TYPE = (
    "Parameter '{leaf}' is stored as {stored}, but the rule for {site} says {wanted}. Quantize the "
    "float parameters with these rules, or run the model with the rules they were quantized by."
)
_MSG_NO_RULE = (
    "Parameter '{leaf}' is stored as {stored}, but no rule of this provider matches {site}, so it "
    "would be read dequantized. Run the model with the rules its parameters were quantized by "
    "(this one by {was!r}), or make the provider with strict=False."
)
_MSG_KEPT_FLOAT = (
    "Parameter '{leaf}' is stored as {stored}, but {rule!r} keeps {site} float. Run the model with "
    "the rules its parameters were quantized by, or give it the float parameter: "
    "fewbit.dequantize(...)."
)
_MSG_TWICE = (
    "{what} is called with a module that has a static scale '{name}', as it has itself: a scale is "
    "found by its module's path. Make the one a submodule of the other and quantize them together, "
    "or use dynamic ranges in one of them."
)
_MSG_NOTHING = (
    "Nothing in this call is quantized: no parameter of {what} is stored quantized, and no rule is "
    "in force at {count} of it. {why} fewbit.plan(model, rules, ...) shows which rule meets "
    "which Site; make the provider with strict=False to run the model in float."
)


class UntraceableModelError(TypeError):
    """A model whose Python code depends on array values."""


def untraceable(what: str, failed: Sequence[str], error: Exception) -> UntraceableModelError:
    """The error for `what`, of which the module at path `failed[0]` asked for a value."""
    where = f"Module '{failed[0]}' of {what}" if failed and failed[0] else what
    first_line = str(error).strip().split("\n")[0]
    return UntraceableModelError(_MSG_UNTRACEABLE.format(where=where, error=first_line))


def is_stored(value: Any) -> bool:
    """Whether a tree node is a quantized parameter."""
    return isinstance(value, WithAux | QArray)


def float_view(value: Any) -> Any:
    """The abstract float array that a leaf, quantized or not, stands for."""
    if not is_stored(value):
        return jax.typeof(value) if not isinstance(value, jax.ShapeDtypeStruct) else value
    q = value.array if isinstance(value, WithAux) else value
    if not isinstance(q, QArray):
        return float_view(q)
    codes = q.qvalue
    if isinstance(codes, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(q.shape, q.dtype, sharding=codes.sharding)
    return jax.typeof(codes).update(dtype=q.dtype)


def as_value(value: Any, leaf: str | None) -> Any:
    """A tree leaf as a value of the interpreter."""
    if isinstance(value, WithAux):
        if not isinstance(value.array, QArray):
            return value.array
        return Weight(without_gradient(value.array, leaf or ""), leaf or "", value.how.rule)
    if isinstance(value, QArray):
        return Weight(without_gradient(value, leaf or ""), leaf or "")
    return value


@dataclass
class Traced:
    """One trace of a runner's function on one set of inputs."""

    program: Program
    values: list[Any]
    out_tree: Any
    forwarded: Sequence[int | None]  # output k is input forwarded[k], untouched
    leaves: list[Leaf | None]  # aligned with values; None for an input that is no parameter
    scales: dict[str, Any] = field(default_factory=dict)  # static scales among the inputs


class Runner:
    """`pure`, traced for `provider`; calling it runs the quantized program under a cached jit.

    `site_path` is 'module' or 'leaf' (see `trace.analyse`). With `root=False` the function is a
    submodule called on its own: paths are not the model's, so rules come from the weights
    themselves.
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
        self._traceable = jax.jit(pure)
        self._compiled = jax.jit(self.interpret)

    def __call__(self, tree: Any) -> Any:
        return (self.interpret if self.provider.disable_jit else self._compiled)(tree)

    def trace(self, tree: Any) -> Traced:
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
        views = [float_view(value) for _, value in flat]
        names = [self.leaf_path(key) for key, _ in flat]
        paths = [None if isinstance(name, ScaleName) else name for name in names]
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
        out_tree = jax.tree.structure(traced.out_info)
        program = analyse(traced.jaxpr, leaves, method=self.method, site_path=self.site_path)
        scales = [
            (str(n), v) for n, v in zip(names, values, strict=True) if isinstance(n, ScaleName)
        ]
        twice = [name for name, count in Counter(name for name, _ in scales).items() if count > 1]
        if twice:
            raise ValueError(_MSG_TWICE.format(what=self.what, name=twice[0]))
        return Traced(
            program,
            values,
            out_tree,
            list(forwards(traced.jaxpr)),
            [
                None if path is None else Leaf(path, tuple(view.shape), view.dtype)
                for path, view in zip(paths, views, strict=True)
            ],
            dict(scales),
        )

    def rule_for(self, values: Sequence[Any]) -> RuleFor:
        carried = {v.leaf: v.rule for v in values if is_weight(v)}

        def find(ts):
            if self.root or ts.site.weight is None:
                return self.provider.rule_for(ts.site.path, ts.site.op)
            rule = carried.get(ts.site.weight)  # a weight that the model kept float stays float
            return next((i for i, r in enumerate(self.provider.rules) if r == rule), None), rule

        return find

    def interpret(self, tree: Any) -> Any:
        """Trace, decide, run: what is jitted. All but the arrays' values happens at trace time."""
        traced, decisions = self.ready(tree)
        outs = self.run(traced.program, decisions, traced.values, traced.scales)[0]
        return self.finish(traced, outs, jax.tree.leaves(tree, is_leaf=is_stored))

    def as_traced(self, tree: Any) -> list[Any]:
        """The leaves that the function itself returns for float leaves, no Site replaced."""
        with current.tracing(self.provider):
            return jax.tree.leaves(self._traceable(tree))

    def ready(self, tree: Any) -> tuple[Traced, dict[str, Decision]]:
        """Traced and decided; parameters and scales are checked against the rules."""
        traced = self.trace(tree)
        decisions = decide(traced.program, self.rule_for(traced.values))
        self.provider.mark_used(
            d.rule_index for d in decisions.values() if d.rule_index is not None
        )
        rules = {site: d.rule for site, d in decisions.items() if d.rule is not None}
        self.provider.check_ready(rules)
        if self.provider.quantizes_params:
            requests = storage([traced.program], [decisions], lambda message: None)
            self.check_stored(traced, decisions, requests)
            self.check_something(traced, decisions)
            check_scales(traced.program, decisions, traced.scales, self.provider.strict)
            _say_once_if_unpacked(tree)
        return traced, decisions

    def finish(self, traced: Traced, outs: list[Any], values: list[Any]) -> Any:
        """The model's output. A parameter handed through untouched comes out as it is stored."""
        leaves = [
            plain(out) if source is None else values[source]
            for out, source in zip(outs, traced.forwarded, strict=True)
        ]
        return jax.tree.unflatten(traced.out_tree, leaves)

    def run(
        self,
        program: Program,
        decisions: dict[str, Decision],
        values: Sequence[Any],
        scales: dict[str, Any],
        report: Callable[[str, str], None] = lambda site, text: None,
    ) -> tuple[list[Any], list[tuple[str, str]]]:
        static = StaticScales(scales)
        sites = SiteRunner(self.provider, decisions, report, static)
        interpreter = Interpreter(
            sites,
            lambda ts: decisions[ts.site.id].rule is not None,
            sites.finishes,
            shortcuts=any(d.rule is not None for d in decisions.values()),
            static=static,
        )
        return interpreter.run(program.root, values), interpreter.dequantized

    def readings(self, tree: Any, tap_for: Callable[[Traced, dict[str, Decision]], Tap]) -> Any:
        """What a tap reads while the model runs as it is, in float: `{site id: Reading}`."""
        traced = self.trace(tree)
        tap = tap_for(traced, decide(traced.program, self.rule_for(traced.values)))
        interpreter = Interpreter(
            lambda ts, ins: bind(ts.eqn, [plain(v) for v in ins])[0],
            lambda ts: False,
            taps=Taps(tap),
        )
        return interpreter.run_tapped(traced.program.root, traced.values)[1]

    def check_stored(
        self, traced: Traced, decisions: dict[str, Decision], requests: dict[str, Request]
    ) -> None:
        """Parameters must be stored as the rules say."""
        if not self.root:
            return
        stored = {v.leaf: v for v in traced.values if is_weight(v)}
        for leaf, wanted in requests.items():
            site = wanted.site.site.id
            if leaf not in stored:
                raise ValueError(
                    _MSG_UNQUANTIZED.format(leaf=leaf, site=site, qtype=wanted.how.qtype)
                )
            qtype = stored[leaf].array.qtype
            if qtype != wanted.how.qtype:
                raise ValueError(
                    _MSG_OTHER_TYPE.format(
                        leaf=leaf, stored=qtype, wanted=wanted.how.qtype, site=site
                    )
                )
        for ts in traced.program.sites if self.provider.strict else ():
            read, index = ts.site.weight, decisions[ts.site.id].rule_index
            if read is None or read not in stored or read in requests or ts.site.op == "take":
                continue  # a table stored for another method's logits is read as it is
            rule = None if index is None else self.provider.rules[index]
            if rule is not None and not rule.switched_off:
                continue
            message, weight = _MSG_NO_RULE if rule is None else _MSG_KEPT_FLOAT, stored[read]
            kept = dict(leaf=read, stored=weight.array.qtype, site=ts.site.id)
            raise ValueError(message.format(**kept, rule=rule, was=weight.rule))

    def check_something(self, traced: Traced, decisions: dict[str, Decision]) -> None:
        """A model whose rules all miss would run in float without a word."""
        provider, sites = self.provider, [ts.site for ts in traced.program.sites]
        if not (self.root and provider.strict and sites) or any(map(is_weight, traced.values)):
            return
        active = [i for i, rule in enumerate(provider.rules) if not rule.switched_off]
        in_force = any(decision.rule is not None for decision in decisions.values())
        if not active or in_force or any(map(provider.asked_by_kernel, active)):
            return
        used = {decision.rule_index for decision in decisions.values()}
        missed = [provider.rules[i] for i in active if i not in used]
        why = f"At {sites[0].id}: {decisions[sites[0].id].reason}."
        if missed:
            rows = (SitePlan(s, None, None, None, None, "", "float", "float") for s in sites)
            why = unmatched_message(Plan(provider.rules, tuple(rows), ()), missed)
        count = "the one Site" if len(sites) == 1 else f"any of the {len(sites)} Sites"
        raise ValueError(_MSG_NOTHING.format(what=self.what, count=count, why=why))

    def observe(
        self, traced: Traced, decisions: dict[str, Decision], requests: dict[str, Request]
    ) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """Run abstractly on leaves stored as requested: what ran each Site, what dequantized."""
        ran: dict[str, str] = {}
        seen: list[tuple[str, str]] = []
        values = [
            _abstract_weight(leaf, requests[leaf.path].how)
            if leaf and leaf.path in requests
            else value
            for value, leaf in zip(traced.values, traced.leaves, strict=True)
        ]

        scales = abstract_scales(planned_scales([traced.program], [decisions]))

        def go(values, scales):
            outs, dequantized = self.run(
                traced.program,
                decisions,
                values,
                scales,
                lambda site, text: ran.__setitem__(site, text),
            )
            seen.extend(dequantized)
            return [plain(out) for out in outs]

        jax.eval_shape(go, values, scales)
        return ran, seen


@functools.cache
def _say_unpacked() -> None:
    logging.getLogger("fewbit").warning(
        "Quantized parameters with one code per element run through XLA, which is slow for them on "
        "a CPU. fewbit.pack(params), or quantize_params(params, plan) with a plan, stores them for "
        "the native kernels."
    )


def _say_once_if_unpacked(tree: Any) -> None:
    """A plain tree runs everywhere; on a CPU with kernels that is not what people want."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_stored):
        if isinstance(leaf, WithAux) and isinstance(leaf.array, QArray):
            if jax.default_backend() == "cpu" and would_be_faster(leaf.array, leaf.how):
                return _say_unpacked()


def _abstract_weight(leaf: Leaf, how: Any) -> Weight:
    array = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    q = jax.eval_shape(lambda x: quantize_with(x, how), array)
    return Weight(for_kernels(q, how), leaf.path)
