"""Plan: rules meet the traced program.

Two steps. First, for every Site: which rule governs it, and what storage that asks of the parameter
leaf behind it. Second, an abstract run of the interpreter on leaves so stored, which tells what
really happens at each Site; the plan's `runs on` column is that report, not a guess.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from fewbit import kernels
from fewbit._plan import LeafPlan, Plan, ScalePlan, SitePlan, stored_bytes
from fewbit._plan_adapter import AdapterPlan
from fewbit._plan_messages import Complaint, complaints, op_name_faults, unmatched_message
from fewbit.adapters import planned_adapters
from fewbit.decisions import (
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
from fewbit.numerics import qtype_name
from fewbit.provenance import Origin
from fewbit.rules import QuantizationRule
from fewbit.static_scales import planned_scales, static_sides
from fewbit.stored_checks import why_inputs, why_nothing
from fewbit.trace import Program, TracedSite

_FLOAT_BASE = "float base with an adapter"
_MSG_NOTHING = "Nothing of the model would be quantized. {why}"
_NOTE_SLOW = "slow: XLA runs this slower than float32 on this CPU; it saves memory, not time"


def make_plan(
    provider: Any,
    programs: Sequence[tuple[str, Program]],
    leaves: Sequence[Leaf],
    *,
    kind: str,
    observe: Callable[[int, dict[str, Request]], tuple[dict[str, str], list[tuple[str, str]]]],
    strict: bool,
    cure: str = "",
) -> tuple[Plan, dict[str, Request]]:
    """The plan of one model over one or more methods.

    `observe(k, requests)` runs program k abstractly on leaves stored as requested and returns what
    ran each Site and which leaves were dequantized by which primitive. `cure` tells what to do if
    all weights turn out to be constants.
    """
    with complaints(strict) as complaint:
        return _make_plan(provider, programs, leaves, kind, observe, complaint, cure)


def _make_plan(
    provider: Any,
    programs: Sequence[tuple[str, Program]],
    leaves: Sequence[Leaf],
    kind: str,
    observe: Callable[[int, dict[str, Request]], tuple[dict[str, str], list[tuple[str, str]]]],
    complaint: Complaint,
    cure: str,
) -> tuple[Plan, dict[str, Request]]:
    methods = [method for method, _ in programs]
    decisions = [
        decide(p, lambda ts: provider.rule_for(ts.site.path, ts.site.op)) for _, p in programs
    ]
    requests: dict[str, Request] = {}
    scales: tuple[ScalePlan, ...] = ()
    if provider.quantizes_params or provider.trains:
        requests = storage([p for _, p in programs], decisions, complaint)
        scales = planned_scales([p for _, p in programs], decisions, complaint)
    adapters: dict[str, AdapterPlan] = {}
    if provider.adapts:
        dtypes = {leaf.path: jnp.dtype(leaf.dtype) for leaf in leaves}
        adapters = planned_adapters([p for _, p in programs], decisions, dtypes, complaint)
    rows: list[SitePlan] = []
    notes: list[str] = list(provider.idle)
    for k, (_, program) in enumerate(programs):
        ran, dequantized = observe(k, requests)
        decided = decisions[k]
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
    used = {
        d.rule_index for decided in decisions for d in decided.values() if d.rule_index is not None
    }
    used |= {i for i, rule in enumerate(provider.rules) if provider.asked_by_kernel(i)}
    unmatched = tuple(i for i in range(len(provider.rules)) if i not in used)
    provider.mark_used(used)
    wrong, named = op_name_faults(
        [provider.rules[i] for i in sorted(used)],
        {row.site.op for row in rows},
        provider.kernel_op_names(),
    )
    if any(row.runs_on.endswith("slow") for row in rows):
        notes.append(_NOTE_SLOW)
    plan = Plan(
        rules=provider.rules,
        sites=tuple(rows),
        leaves=tuple(
            _leaf_plan(leaf, requests if provider.quantizes_params else {}, rows) for leaf in leaves
        ),
        notes=tuple(dict.fromkeys(notes + named)),
        unmatched_rules=unmatched,
        kind=kind,
        methods=tuple(methods),
        scales=scales,
        adapters=tuple(adapters.values()),
    )
    if unmatched:
        complaint(unmatched_message(plan, [provider.rules[i] for i in unmatched]))
    for message in wrong:
        complaint(message)
    acts = provider.quantizes_params or provider.trains
    if acts and not unmatched:
        both = [(p, decided) for (_, p), decided in zip(programs, decisions, strict=True)]
        if requests or adapters:
            why = why_inputs(provider, both, cure)
        else:
            pairs = [(ts, decided[ts.site.id]) for p, decided in both for ts in p.sites]
            why = why_nothing(provider, pairs, cure)
        if why is not None:
            complaint(_MSG_NOTHING.format(why=why))
    return plan, requests


def _row(
    ts: TracedSite,
    decision: Decision,
    requests: dict[str, Request],
    ran: dict[str, str],
    adapters: Mapping[str, AdapterPlan],
    provider: Any,
) -> SitePlan:
    site, rule = ts.site, decision.rule
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
        return SitePlan(
            site=site,
            rule=decision.rule_index,
            weight_qtype=None,
            act_qtype=None,
            act_mode=None,
            granularity="",
            runs_on="float",
            reason=_FLOAT_BASE,
        )
    if rule is None:
        reason = decision.reason or "no rule matches"
        if stored is not None:
            reason += f"; reads '{site.weight}' dequantized (stored for {stored.site.site.id})"
        return SitePlan(
            site=site,
            rule=decision.rule_index,
            weight_qtype=None,
            act_qtype=None,
            act_mode=None,
            granularity="",
            runs_on="float",
            reason=reason,
        )
    act = _act_types(ts, rule)
    mode = None if act is None else _act_mode(ts, rule)
    text = granularity_text(stored.how) if stored else _act_granularity(rule)
    dlhs, drhs = provider.gradient_products(ts, rule, stored)
    return SitePlan(
        site=site,
        rule=decision.rule_index,
        weight_qtype=qtype_name(stored.how.qtype) if stored else None,
        act_qtype=act,
        act_mode=mode,
        granularity=text,
        runs_on=_runs_on(ts, ran.get(site.id)),
        reason=None,
        notes=_other_weight(ts, requests, act) if stored else (_what_it_is(ts),),
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


def _what_it_is(ts: TracedSite) -> str:
    why = why_no_weight(ts)
    return f"{why}: quantized on the fly, not stored" if why else "product of two activations"


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


def _act_granularity(rule: QuantizationRule) -> str:
    return f"tile {rule.tile_size}" if rule.tile_size is not None else "per-channel"


def _leaf_plan(leaf: Leaf, requests: dict[str, Request], rows: Iterable[SitePlan]) -> LeafPlan:
    wanted = requests.get(leaf.path)
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
