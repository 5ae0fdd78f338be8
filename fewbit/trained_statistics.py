"""Activation ranges that training collects, for static scales: what is seen, and what is used.

A statistic enters as entries `<module>/<op_id>_lhs/<key>` beside the parameters and leaves with the
batch added. The scale of a step is made from both, and so is the one that serves after training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._plan import ScalePlan
from fewbit.decisions import Decision
from fewbit.observer_tap import ObserverTap, by_operand
from fewbit.observers import Operand, observer_named, operands_of
from fewbit.static_run import StaticScales
from fewbit.static_scales import planned_scales, range_keys, scale_name, scale_plan
from fewbit.static_statistics import scale_of
from fewbit.taps import Readings
from fewbit.trace import Program, TracedSite
from fewbit.weight import plain

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
    found = {}
    for scale in planned_scales([program], [decisions]):
        layers = scale.shape[: len(scale.shape) - _rank(program, scale)]
        found[scale.name] = (scale.site, scale.side, _zeros(scale, layers))
    return found


def _rank(program: Program, scale: ScalePlan) -> int:
    site = next(ts.site for ts in program.sites if ts.site.id == scale.site)
    return len(getattr(site, scale.side).shape)


def _zeros(scale: ScalePlan, layers: Sequence[int]) -> Statistic:
    stat: Statistic = {COUNT: jnp.zeros(tuple(layers), jnp.int32)}
    for key in range_keys(scale.how):
        stat[f"sum_of_{key}"] = jnp.zeros(scale.shape, jnp.float32)
        stat[("min_of_" if key == "min" else "max_of_") + key] = jnp.zeros(scale.shape, jnp.float32)
    return stat


def range_tap(program: Program, decisions: Mapping[str, Decision]) -> ObserverTap:
    """What reads the range of every activation with a static scale."""
    operands = [o for ts in program.sites for o in operands_of(ts, decisions[ts.site.id])]
    return ObserverTap(operands, {RANGE: observer_named(RANGE)}, [RANGE])


def added(stats: Mapping[str, Any], readings: Readings) -> dict[str, Statistic]:
    """Every statistic with what a run has seen, by name; `stats` are the entries before it."""
    observer = observer_named(RANGE)
    result = {}
    for name, reading in by_operand(readings).items():
        seen = reading.value[RANGE]
        before = {key: stats[entry(name, key)] for key in seen if entry(name, key) in stats}
        count = stats.get(entry(name, COUNT))
        if count is None or len(before) < len(seen):
            result[name] = {COUNT: reading.count, **seen}
        else:
            result[name] = {COUNT: count + reading.count, **observer.merge(before, seen)}
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
        side = int(operand.side == "rhs")
        # A range has no gradient. That of a maximum divides by how often the maximum is met, which
        # is never where XLA computes the array anew and rounds it otherwise: NaN.
        array = jax.lax.stop_gradient(plain(operands[side]))
        seen = observer.observe(operand, observer.init(operand), array)
        stat = _known(static, ts, operand, seen)
        with_batch = {COUNT: jnp.int32(1), **seen}
        if stat is not None:
            merged = {COUNT: stat[COUNT] + 1, **observer.merge(_without_count(stat), seen)}
            known = merged if collecting else stat
            empty = known[COUNT] == 0
            with_batch = {k: jnp.where(empty, with_batch[k], known[k]) for k in known}
        plan = scale_plan(ts, side, rule)
        one_layer = ScalePlan(
            plan.name, plan.site, plan.how, operand.scale_shape or (), plan.dtype, rule
        )
        parts = scale_of(one_layer, with_batch)
        result[side] = (parts["_scale"], parts.get("_zero_point"))
    return result


def _without_count(stat: Statistic) -> Statistic:
    return {key: value for key, value in stat.items() if key != COUNT}


def _known(
    static: StaticScales, ts: TracedSite, operand: Operand, seen: Mapping[str, Any]
) -> Statistic | None:
    """The statistic of the layer that is being run, if one was given."""
    side = int(operand.side == "rhs")
    entries = {key: static.of_layer(ts, entry(scale_name(ts.site, side), key)) for key in seen}
    count = static.of_layer(ts, entry(scale_name(ts.site, side), COUNT))
    if count is None or any(value is None for value in entries.values()):
        return None
    return {COUNT: count} | {
        key: value if value.ndim == seen[key].ndim else value.reshape(seen[key].shape)
        for key, value in entries.items()
    }
