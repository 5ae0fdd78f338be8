"""The inputs of a run that trains: floats with their codes, and what their scales are made from."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fewbit.decisions import Decision, Leaf, Request, storage
from fewbit.learned_scales import check_learned, check_leftovers
from fewbit.stored_checks import check_something
from fewbit.trace import Program
from fewbit.traced import Traced
from fewbit.trained import trained_values
from fewbit.trained_histories import (
    HistoryPlan,
    check_histories,
    delayed_weights,
    planned_histories,
)
from fewbit.training.delayed import anchored, ranges_of
from fewbit.weight import is_weight, plain

_MSG_STORED = (
    "{what} is to be trained, but its parameter '{leaf}' is stored quantized, which no gradient "
    "reaches. Train the float parameters; to train beside a quantized base use a LoraProvider."
)


class Inputs(NamedTuple):
    """What is run, what rides beside it, and the ranges of histories among that."""

    values: Sequence[Any]
    scales: dict[str, Any]
    ranges: dict[str, Any]


def trained_inputs(
    values: Sequence[Any],
    leaves: Sequence[Leaf | None],
    requests: Mapping[str, Request],
    plans: Mapping[str, HistoryPlan],
    scales: dict[str, Any],
    learned: Mapping[str, Any],
) -> Inputs:
    """Inputs in which each float weight has the codes that products see."""
    ranges = ranges_of({name: scales[name] for name in plans})
    delayed = delayed_weights(plans, ranges)
    made = trained_values(values, leaves, requests, learned, delayed)
    return Inputs(made, {**scales, **ranges}, ranges)


def run_inputs(provider: Any, traced: Traced, decisions: dict[str, Decision]) -> Inputs:
    """The inputs of a run, of a model that trains or not."""
    if not provider.trains:
        return Inputs(traced.values, traced.scales, {})
    requests = wanted_storage(traced.program, decisions)
    plans = histories(provider, traced.program, decisions, requests)
    return trained_inputs(
        traced.values, traced.leaves, requests, plans, traced.scales, traced.learned
    )


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
    if not ranges:
        return outs
    for k, source in enumerate(forwarded):
        out = plain(outs[k])
        if source is None and jnp.issubdtype(jax.typeof(out).dtype, jnp.inexact):
            outs[k] = anchored(out, ranges)
    return outs
