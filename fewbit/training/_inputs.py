"""The inputs of a run that trains: floats with their codes, and what their scales are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fewbit.calibration import (
    ObserverTap,
    by_operand,
    observer_named,
    operands_of,
    scale_of,
)
from fewbit.interpreter import (
    Readings,
    StaticScales,
    Traced,
    TrainedWeight,
    check_something,
    is_weight,
    plain,
)
from fewbit.ops import Paired, clip_gradient, pair
from fewbit.planning import (
    SIDES,
    Decision,
    Leaf,
    Request,
    planned_scales,
    range_keys,
    scale_name,
    scale_plan,
    storage,
)
from fewbit.qarray import HowToQuantize
from fewbit.tracing import Program, TracedSite
from fewbit.training._delayed import anchored, delayed_range, quantize_delayed, seen
from fewbit.training._history_plans import (
    HistoryPlan,
    check_histories,
    delayed_weights,
    planned_histories,
)
from fewbit.training._learned import QSCALE, check_learned, check_leftovers, learned_pair

_MSG_STORED = (
    "{what} is to be trained, but its parameter '{leaf}' is stored quantized, which no gradient "
    "reaches. Train the float parameters; to train beside a quantized base use a LoraProvider."
)


class Inputs(NamedTuple):
    """What is run, what rides beside it, and the ranges of histories among that."""

    values: Sequence[Any]
    scales: dict[str, Any]
    ranges: dict[str, Any]


def run_inputs(provider: Any, traced: Traced, decisions: dict[str, Decision]) -> Inputs:
    """The inputs of a run, of a model that trains or not."""
    if not provider.trains:
        return Inputs(traced.values, traced.scales, {})
    requests = wanted_storage(traced.program, decisions)
    plans = histories(provider, traced.program, decisions, requests)
    return trained_inputs(
        traced.values, traced.leaves, requests, plans, traced.scales, traced.learned
    )


def trained_inputs(
    values: Sequence[Any],
    leaves: Sequence[Leaf | None],
    requests: Mapping[str, Request],
    plans: Mapping[str, HistoryPlan],
    scales: dict[str, Any],
    learned: Mapping[str, Any],
) -> Inputs:
    """Inputs in which each float weight has the codes that products see."""
    ranges = {name: delayed_range(scales[name]) for name in plans}
    delayed = delayed_weights(plans, ranges)
    made = trained_values(values, leaves, requests, learned, delayed)
    return Inputs(made, {**scales, **ranges}, ranges)


def trained_values(
    values: Sequence[Any],
    leaves: Sequence[Leaf | None],
    requests: Mapping[str, Request],
    learned: Mapping[str, Any] = {},
    delayed: Mapping[str, tuple[HowToQuantize, Any]] = {},
) -> list[Any]:
    """The inputs of a run, each requested float leaf with its codes.

    `learned` are the scales that are parameters themselves, by name; `delayed` tells of leaves
    whose scales come from the steps before.
    """
    made = list(values)
    for k, leaf in enumerate(leaves):
        if leaf is not None and leaf.path in requests:
            wanted, scale = requests[leaf.path], learned.get(leaf.path + QSCALE)
            weight = _paired(values[k], wanted, scale, delayed.get(leaf.path))
            made[k] = TrainedWeight(weight.quantized, leaf.path, wanted.rule, weight.array)
    return made


def _paired(array: Any, wanted: Request, scale: Any, delayed: Any) -> Paired:
    own = getattr(wanted.rule, "additional_qt_config", None) or {}
    clip = not own.get("disable_gradient_clipping", False)
    if delayed is not None:
        how, remembered = delayed
        q, amax = quantize_delayed(array, remembered, how)
        return Paired(seen(clip_gradient(array, q) if clip else array, remembered, amax), q)
    if scale is not None:
        return learned_pair(array, scale, wanted.how, clip=clip)
    return pair(array, wanted.how, clip=clip)


def wanted_storage(program: Program, decisions: Mapping[str, Decision]) -> dict[str, Request]:
    """How each weight would be stored; what is wrong with that was told by the plan."""
    return storage([program], [dict(decisions)], lambda message: None)


def histories(
    provider: Any,
    program: Program,
    decisions: Mapping[str, Decision],
    requests: Mapping[str, Request],
) -> dict[str, HistoryPlan]:
    """The histories that delayed scales need, by name."""
    if not provider.delays:
        return {}
    gradients = not getattr(provider, "emulate", False)
    return planned_histories(program, decisions, requests, gradients)


def check_trains(
    provider: Any,
    traced: Traced,
    decisions: dict[str, Decision],
    what: str,
    root: bool,
    cure: str,
) -> None:
    """A model that trains has float parameters, rules that do something, and all its state."""
    stored = [value.leaf for value in traced.values if is_weight(value)]
    if root and stored:
        raise ValueError(_MSG_STORED.format(what=what, leaf=stored[0]))
    if root:
        check_something(traced.program, traced.values, decisions, provider, what, cure)
    if root and provider.strict and not provider.learns:
        check_leftovers(traced.program, traced.leaves)
    if not (provider.learns or traced.learned or provider.delays):
        return
    requests = wanted_storage(traced.program, decisions)
    if provider.learns or traced.learned:
        check_learned(traced.leaves, requests, traced.learned, provider.strict and root)
    if provider.delays:
        plans = histories(provider, traced.program, decisions, requests)
        check_histories(plans, traced.scales, what)


def reaching(
    outs: Sequence[Any], forwarded: Sequence[int | None], ranges: dict[str, Any]
) -> list[Any]:
    """Results through whose gradients every history is reached; inputs handed through are not."""
    outs = list(outs)
    for k, source in enumerate(forwarded) if ranges else ():
        out = plain(outs[k])
        if source is None and jnp.issubdtype(jax.typeof(out).dtype, jnp.inexact):
            outs[k] = anchored(out, ranges)
    return outs


# --- Activation ranges that training collects, for static scales: what is seen, and what is used --

RANGE = "range"
COUNT = "count"
Statistic = dict[str, Any]


def entry(name: str, key: str) -> str:
    """What one array of a statistic is called beside the parameters.

    >>> entry('mlp/up/dot_general0_lhs', 'count')
    'mlp/up/dot_general0_lhs/count'
    """
    return f"{name}/{key}"


def empty_statistics(
    program: Program, decisions: Mapping[str, Decision]
) -> dict[str, tuple[str, str, Statistic]]:
    """(Site id, side, zeros) of every statistic of a program, by name."""
    found, layers = {}, {ts.site.id: ts.layers for ts in program.sites}
    for scale in planned_scales([program], [decisions]):
        stat: Statistic = {COUNT: jnp.zeros(layers[scale.site], jnp.int32)}
        for key in range_keys(scale.how):
            extreme = "min_of_" if key == "min" else "max_of_"
            stat |= {
                name + key: jnp.zeros(scale.shape, jnp.float32) for name in ("sum_of_", extreme)
            }
        found[scale.name] = (scale.site, scale.side, stat)
    return found


def range_tap(program: Program, decisions: Mapping[str, Decision]) -> ObserverTap:
    """What reads the range of every activation with a static scale."""
    operands = [o for ts in program.sites for o in operands_of(ts, decisions[ts.site.id])]
    return ObserverTap(operands, {RANGE: observer_named(RANGE)}, [RANGE])


def added(stats: Mapping[str, Any], readings: Readings) -> dict[str, Statistic]:
    """Every statistic with what a run has seen, by name; `stats` are the entries before it."""
    observer = observer_named(RANGE)
    result = {}
    for name, reading in by_operand(readings).items():
        new = reading.value[RANGE]
        before = {key: stats[entry(name, key)] for key in new if entry(name, key) in stats}
        count = stats.get(entry(name, COUNT))
        if count is None or len(before) < len(new):
            result[name] = {COUNT: reading.count, **new}
        else:
            result[name] = {COUNT: count + reading.count, **observer.merge(before, new)}
    return result


def scales_of_step(
    static: StaticScales,
    ts: TracedSite,
    decision: Decision,
    operands: Sequence[Any],
    collecting: bool,
) -> dict[int, tuple[Any, Any]]:
    """(scale, zero point) of each static operand: of what was seen, this batch too if collecting.

    Before anything was seen the batch itself is all there is.
    """
    rule, result = decision.rule, {}
    observer = observer_named(RANGE)
    for operand in operands_of(ts, decision):
        if operand.how is None or rule is None or not observer.wants(operand):
            continue
        side = SIDES.index(operand.side)
        # A range has no gradient. That of a maximum divides by how often the maximum is met, which
        # is never where XLA computes the array anew and rounds it otherwise: NaN.
        array = jax.lax.stop_gradient(plain(operands[side]))
        new = observer.observe(operand, observer.init(operand), array)
        stat = _known(static, ts, scale_name(ts.site, side), new)
        with_batch = {COUNT: jnp.int32(1), **new}
        if stat is not None:
            before = {key: stat[key] for key in new}
            merged = {COUNT: stat[COUNT] + 1, **observer.merge(before, new)}
            known = merged if collecting else stat
            empty = known[COUNT] == 0
            with_batch = {k: jnp.where(empty, with_batch[k], known[k]) for k in known}
        one_layer = replace(scale_plan(ts, side, rule), shape=operand.scale_shape or ())
        parts = scale_of(one_layer, with_batch)
        result[side] = (parts["_scale"], parts.get("_zero_point"))
    return result


def _known(
    static: StaticScales, ts: TracedSite, name: str, new: Mapping[str, Any]
) -> Statistic | None:
    """The statistic of the layer that is being run, if one was given."""
    entries = {key: static.of_layer(ts, entry(name, key)) for key in new}
    count = static.of_layer(ts, entry(name, COUNT))
    if count is None or any(value is None for value in entries.values()):
        return None
    return {COUNT: count} | {
        key: value if value.ndim == new[key].ndim else value.reshape(new[key].shape)
        for key, value in entries.items()
    }
