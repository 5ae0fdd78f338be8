"""Plan: rules meet the traced program.

Two steps. First, for every Site: which rule governs it, and what storage that asks of the parameter
leaf behind it. Second, an abstract run of the interpreter on leaves so stored, which tells what
really happens at each Site; the plan's `runs on` column is that report, not a guess.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from fewbit import kernels
from fewbit.numerics import qtype_name
from fewbit.planning._adapter_shapes import planned_adapters
from fewbit.planning._companions import planned_scales, static_sides
from fewbit.planning._decide import (
    Decision,
    Leaf,
    Request,
    activation_fields,
    decide,
    granularity_text,
    remembered,
    storage,
    weight_operand,
    why_no_weight,
)
from fewbit.planning._messages import (
    complaints,
    op_name_faults,
    tell_of_kernels,
    unmatched_message,
)
from fewbit.planning._plan import Plan
from fewbit.planning._rows import AdapterPlan, LeafPlan, ScalePlan, SitePlan, stored_bytes
from fewbit.rules import QuantizationRule
from fewbit.tracing import Changed, Constant, Origin, Program, TracedSite

# --- Why rules that ask for something do nothing to a model, and what to do about it --------------

_MSG_ACT_ALONE = (
    "Rule {number} has act_qtype without weight_qtype, and so switches off what it matches. Write "
    "{fixed!r}."
)
_MSG_CONSTANTS = (
    "The weights at {sites} are constants of the function and no parameters, so none of them can "
    "be stored{anew}. {cure}"
)
_ANEW = ", and each would be quantized anew at every call"
_MSG_INPUTS = (
    "The first argument meets nothing but constants in products, so that it is an input, and would "
    "be stored quantized in place of the parameters. "
)
_IN_A_DICT = " If it is the parameters, pass it in a dict: f({'w': w}, *inputs)."
_MAKE_PARAMETERS = "Make them the first argument of the function: f(params, *inputs)."
_MSG_HOLDER = (
    "A {name} has its parameters in .params and its Linen module in .module. Pass the parameters: "
    "f = lambda params, *inputs: model(*inputs, params=params), then "
    "fewbit.plan(f, rules, model.params, *inputs); or quantize the module, "
    "fewbit.plan(model.module, rules, *inputs) and quantize_params(model.params, plan)."
)


def holder_cure(model: Any) -> str:
    """What to do with an object that holds a Linen module and its parameters; '' for any other.

    Hugging Face's Flax models are such: a call of one closes over its parameters.
    """
    module = getattr(model, "module", None)
    # Not asked for: Hugging Face's raise where there are none yet.
    has_params = inspect.getattr_static(model, "params", None) is not None
    is_holder = has_params and callable(getattr(module, "apply", None))
    return _MSG_HOLDER.format(name=type(model).__name__) if is_holder else ""


def why_nothing(
    provider: Any, sites: Sequence[tuple[TracedSite, Decision]], cure: str = ""
) -> str | None:
    """Why rules that ask for something do nothing to a model none of whose parameters is stored.

    None if they do, or ask for nothing. A product with a constant is not what they ask for: what
    looks like a weight would be quantized anew at every call. `cure` tells where such a model's
    parameters are.
    """
    asking, met = _met(provider, sites)
    if not met:
        return None
    constant = [ts.site.id for ts, _ in met if any(_constants(ts))]
    running = [ts.site.id for ts, decision in met if decision.rule is not None]
    held = bool(cure and constant)
    if set(running) - set(constant) and not held:
        return None
    matched = {decision.rule_index for _, decision in met}
    alone = next((i for i, rule in asking.items() if i in matched and rule.switched_off), None)
    if alone is not None:
        return act_alone(alone, asking[alone])
    if held or len(constant) == len(met):
        text = dict(sites=_some(constant), cure=cure or _MAKE_PARAMETERS)
        return _MSG_CONSTANTS.format(anew=_ANEW if running else "", **text)
    return f"At {_some([f'{ts.site.id}: {decision.reason}' for ts, decision in met], '; ')}."


def act_alone(number: int, rule: QuantizationRule) -> str:
    """What is said of a rule for activations that has nothing for weights."""
    fixed = rule.replace(weight_qtype=rule.act_qtype)
    return _MSG_ACT_ALONE.format(number=number, fixed=fixed)


def why_inputs(
    provider: Any, programs: Sequence[tuple[Program, Mapping[str, Decision]]], cure: str = ""
) -> str | None:
    """Why what stands in the place of the parameters are inputs; None if they are parameters.

    An object that holds its parameters closes over them, and its float input looks like a weight. A
    function of one bare array may do the same, but may as well be `w -> data @ w`: it does so if
    its constants stand where models have their weights, on the right of every product. A product
    without a constant may be of another argument, as in `x @ (w @ constant)`.
    """
    asking, asked = _met(provider, _pairs(programs))
    met = [ts for ts, _ in asked]
    constant = [ts for ts in met if any(_constants(ts))]
    reading = [ts for ts in met if any(isinstance(s, Origin) for s in ts.sources)]
    if not (constant and reading and all(any(_constants(ts)) for ts in reading)):
        return None
    if not cure:
        sources = [source for ts in met for source in ts.sources]
        bare = all(s.leaf == "" for s in sources if isinstance(s, Origin | Changed))
        alone = all(len(program.root.jaxpr.invars) == 1 for program, _ in programs)
        on_the_right = all(_constants(ts)[1] for ts in constant)
        if not (bare and on_the_right and (alone or len(constant) == len(met))):
            return None
    text = dict(sites=_some([ts.site.id for ts in constant]), cure=cure or _MAKE_PARAMETERS)
    anew = any(rule.act_qtype is not None for rule in asking.values())
    why = _MSG_INPUTS + _MSG_CONSTANTS.format(anew=_ANEW if anew else "", **text)
    return why if cure else why + _IN_A_DICT


def _pairs(
    programs: Sequence[tuple[Program, Mapping[str, Decision]]],
) -> list[tuple[TracedSite, Decision]]:
    return [(ts, decided[ts.site.id]) for program, decided in programs for ts in program.sites]


def _met(
    provider: Any, sites: Sequence[tuple[TracedSite, Decision]]
) -> tuple[dict[int, QuantizationRule], list[tuple[TracedSite, Decision]]]:
    """The rules that ask for something, and the Sites they meet: none if one asks for a kernel."""
    asking = {i: rule for i, rule in enumerate(provider.rules) if asks(rule)}
    if any(map(provider.asked_by_kernel, asking)):
        return asking, []
    return asking, [(ts, decision) for ts, decision in sites if decision.rule_index in asking]


def _constants(ts: TracedSite) -> list[bool]:
    """Of each operand of a product, whether the function closes over it."""
    return [isinstance(source, Constant) for source in ts.sources]


def asks(rule: QuantizationRule) -> bool:
    """Whether a rule wants something quantized, and is no opt-out."""
    return not rule.switched_off or rule.act_qtype is not None


def _some(texts: Sequence[str], joint: str = ", ") -> str:
    return joint.join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


# --- Plan: rules meet the traced program ----------------------------------------------------------

# By Site id what ran it, and which leaves were dequantized by which primitive.
Observed = tuple[dict[str, str], list[tuple[str, str]]]

_FLOAT_BASE = "float base with an adapter"
_MSG_NOTHING = "Nothing of the model would be quantized. {why}"
_NOTE_SLOW = "slow: XLA runs this slower than float32 on this CPU; it saves memory, not time"


def make_plan(
    provider: Any,
    programs: Sequence[tuple[str, Program]],
    leaves: Sequence[Leaf],
    *,
    kind: str,
    observe: Callable[[int, dict[str, Request]], Observed],
    strict: bool,
    cure: str = "",
) -> tuple[Plan, dict[str, Request]]:
    """The plan of one model over one or more methods.

    `observe(k, requests)` runs program k abstractly on leaves stored as requested. `cure` tells
    what to do if all weights turn out to be constants.
    """
    traced = [program for _, program in programs]
    decisions = [decide(p, lambda ts: provider.rule_for(ts.site.path, ts.site.op)) for p in traced]
    acts = provider.quantizes_params or provider.trains
    requests: dict[str, Request] = {}
    scales: tuple[ScalePlan, ...] = ()
    adapters: dict[str, AdapterPlan] = {}
    with complaints(strict) as complaint:
        if acts:
            requests = storage(traced, decisions, complaint)
            scales = planned_scales(traced, decisions, complaint)
        if provider.adapts:
            dtypes = {leaf.path: jnp.dtype(leaf.dtype) for leaf in leaves}
            adapters = planned_adapters(traced, decisions, dtypes, complaint)
        rows, notes = _rows(provider, traced, decisions, requests, adapters, observe)
        # A rule may serve only a kernel of the model's own, which asks for it while it is traced.
        used = {i for i, rule in enumerate(provider.rules) if provider.asked_by_kernel(i)}
        met = {d.rule_index for decided in decisions for d in decided.values()}
        used |= {index for index in met if index is not None}
        provider.mark_used(used)
        wrong, named = op_name_faults(
            [provider.rules[i] for i in sorted(used)],
            {row.site.op for row in rows},
            provider.kernel_op_names(),
        )
        stored = requests if provider.quantizes_params else {}
        plan = Plan(
            rules=provider.rules,
            sites=tuple(rows),
            leaves=tuple(_leaf_plan(leaf, stored.get(leaf.path), rows) for leaf in leaves),
            notes=tuple(dict.fromkeys(notes + named)),
            unmatched_rules=tuple(i for i in range(len(provider.rules)) if i not in used),
            kind=kind,
            methods=tuple(method for method, _ in programs),
            scales=scales,
            adapters=tuple(adapters.values()),
        )
        unmatched = [provider.rules[i] for i in plan.unmatched_rules]
        if used:
            kernels_read = [path for program in traced for path in program.in_kernels]
            unmatched = tell_of_kernels(plan, unmatched, kernels_read)
        if unmatched:
            complaint(unmatched_message(plan, unmatched))
        for message in wrong:
            complaint(message)
        if acts and not unmatched:
            both = list(zip(traced, decisions, strict=True))
            if requests or adapters:
                why = why_inputs(provider, both, cure)
            else:
                why = why_nothing(provider, _pairs(both), cure)
            if why is not None:
                complaint(_MSG_NOTHING.format(why=why))
    return plan, requests


def _rows(
    provider: Any,
    programs: Sequence[Program],
    decisions: Sequence[Mapping[str, Decision]],
    requests: dict[str, Request],
    adapters: Mapping[str, AdapterPlan],
    observe: Callable[[int, dict[str, Request]], Observed],
) -> tuple[list[SitePlan], list[str]]:
    """The rows of all Sites, and notes on what else reads their weights."""
    rows: list[SitePlan] = []
    notes: list[str] = list(provider.idle)
    for k, (program, decided) in enumerate(zip(programs, decisions, strict=True)):
        ran, dequantized = observe(k, requests)
        rows += [
            _row(ts, decided[ts.site.id], requests, ran, adapters, provider) for ts in program.sites
        ]
        notes += program.opaque
        notes += [
            f"'{leaf}' is also read by {primitive}: without its adapter there"
            for leaf, primitive in program.read
            if leaf in adapters
        ]
        notes += [
            f"'{leaf}' is also read by {primitive}: dequantized there"
            for leaf, primitive in dict.fromkeys(dequantized)
        ]
    if any(row.runs_on.endswith("slow") for row in rows):
        notes.append(_NOTE_SLOW)
    return rows, notes


def _row(
    ts: TracedSite,
    decision: Decision,
    requests: dict[str, Request],
    ran: dict[str, str],
    adapters: Mapping[str, AdapterPlan],
    provider: Any,
) -> SitePlan:
    site, rule = ts.site, decision.rule
    in_float = functools.partial(SitePlan, site, decision.rule_index, None, None, None, "", "float")
    stored = requests.get(site.weight) if site.weight and weight_operand(ts) is not None else None
    if site.op == "take" and stored is not None and decision.reason is None:
        note = () if stored.site is ts else (f"table stored for {stored.site.site.id}",)
        return SitePlan(
            site=site,
            rule=decision.rule_index,
            weight_qtype=qtype_name(stored.how.qtype),
            act_qtype=None,
            act_mode=None,
            granularity=granularity_text(stored.how),
            runs_on=f"xla {ran.get(site.id, 'gather')}",
            reason=None,
            notes=note,
        )
    adapted = site.weight in adapters and weight_operand(ts) is not None
    if adapted and stored is None and (rule is not None or site.op == "take"):
        return in_float(_FLOAT_BASE)
    if rule is None:
        reason = decision.reason or "no rule matches"
        if stored is not None:
            reason += f"; reads '{site.weight}' dequantized (stored for {stored.site.site.id})"
        return in_float(reason)
    act = _act_types(ts, rule)
    tile = f"tile {rule.tile_size}" if rule.tile_size is not None else "per-channel"
    why = why_no_weight(ts)
    what = f"{why}: quantized on the fly, not stored" if why else "product of two activations"
    dlhs, drhs = provider.gradient_products(ts, rule, stored)
    return SitePlan(
        site=site,
        rule=decision.rule_index,
        weight_qtype=qtype_name(stored.how.qtype) if stored else None,
        act_qtype=act,
        act_mode=None if act is None else _act_mode(ts, rule),
        granularity=granularity_text(stored.how) if stored else tile,
        runs_on=_runs_on(ts, ran.get(site.id)),
        reason=None,
        notes=_other_weight(ts, requests, act) if stored else (what,),
        dlhs=dlhs,
        drhs=drhs,
    )


def _act_types(ts: TracedSite, rule: QuantizationRule) -> str | None:
    """The type of the activations, or both where a rule for training tells them apart."""
    sides = [k for k in (0, 1) if k != weight_operand(ts)]
    found = [activation_fields(rule, k)["qtype"] for k in sides]
    names = ["float" if qtype is None else qtype_name(qtype) for qtype in found]
    return None if set(names) == {"float"} else " x ".join(dict.fromkeys(names))


def _act_mode(ts: TracedSite, rule: QuantizationRule) -> str:
    if static_sides(ts, rule):
        return "static"
    sides = [k for k in (0, 1) if ts.sources[k] is None]
    return "delayed" if any(remembered(rule, side) for side in sides) else "dynamic"


def _other_weight(ts: TracedSite, requests: dict[str, Request], act: str | None) -> tuple[str, ...]:
    """Of a product of two parameters one is stored quantized: what becomes of the other."""
    leaves = {s.leaf for s in ts.sources if isinstance(s, Origin)} - {*requests}
    how = "stays float" if act is None else "is quantized on the fly, not stored"
    return tuple(f"a product of two parameters: {leaf} {how}" for leaf in sorted(leaves))


def _runs_on(ts: TracedSite, what: str | None) -> str:
    if what is None:
        return "not reached"
    if "." in what:  # a provider's own method
        return what
    side = weight_operand(ts)
    weight = prod(ts.eqn.invars[1 if side is None else side].aval.shape)
    return kernels.runs_on(what, ts.site.macs // max(ts.site.trips * weight, 1))


def _leaf_plan(leaf: Leaf, wanted: Request | None, rows: Iterable[SitePlan]) -> LeafPlan:
    before = prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    return LeafPlan(
        path=leaf.path,
        shape=leaf.shape,
        dtype=str(jnp.dtype(leaf.dtype)),
        how=wanted.how if wanted else None,
        bytes_before=before,
        bytes_after=stored_bytes(leaf.shape, wanted.how, leaf.dtype) if wanted else before,
        sites=tuple(row.site.id for row in rows if row.site.weight == leaf.path),
        rule=wanted.rule if wanted else None,
    )
