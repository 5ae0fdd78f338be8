"""From runners and inputs to a Plan: what every front end's `plan` ends in."""

from collections.abc import Callable, Sequence
from typing import Any

from fewbit._plan import Plan
from fewbit.decisions import Leaf, Request, decide
from fewbit.engine import Runner
from fewbit.planner import make_plan
from fewbit.trained_histories import HistoryPlan, empty_histories
from fewbit.trained_inputs import histories, wanted_storage
from fewbit.trained_statistics import Statistic, empty_statistics

# (method, args, kwargs) of one call of a float model -> its runner, and the leaves to call it with.
FloatRun = Callable[[str, tuple, dict], tuple[Runner, list[Any]]]


def plan_runs(
    runs: Sequence[tuple[Runner, Any]], *, kind: str, strict: bool
) -> tuple[Plan, dict[str, Request]]:
    """One plan over one or more methods of a model, and the storage it asks of each parameter."""
    provider = runs[0][0].provider
    traces = [runner.trace(tree) for runner, tree in runs]
    leaves: dict[str, Leaf] = {}
    for traced in traces:
        leaves.update((leaf.path, leaf) for leaf in traced.leaves if leaf is not None)

    def observe(
        k: int, requests: dict[str, Request]
    ) -> tuple[dict[str, str], list[tuple[str, str]]]:
        runner = runs[k][0]
        decisions = decide(traces[k].program, runner.rule_for(traces[k].values))
        return runner.observe(traces[k], decisions, requests)

    return make_plan(
        provider,
        [(runner.method, traced.program) for (runner, _), traced in zip(runs, traces, strict=True)],
        list(leaves.values()),
        kind=kind,
        observe=observe,
        strict=strict,
        cure=runs[0][0].cure,
    )


def empty_histories_of(run: tuple[Runner, Any]) -> dict[str, Any]:
    """The histories that delayed scales of such a model begin with, by name."""
    return empty_histories(histories_of(run))


def histories_of(run: tuple[Runner, Any]) -> dict[str, HistoryPlan]:
    """What histories the delayed scales of a run need, by name."""
    runner, tree = run
    traced = runner.trace(tree)
    decisions = decide(traced.program, runner.rule_for(traced.values))
    requests = wanted_storage(traced.program, decisions)
    return histories(runner.provider, traced.program, decisions, requests)


def empty_statistics_of(run: tuple[Runner, Any]) -> dict[str, Statistic]:
    """The statistics that a run of a model that trains fills, all zero, by name."""
    runner, tree = run
    traced = runner.trace(tree)
    decisions = decide(traced.program, runner.rule_for(traced.values))
    return {
        name: stat for name, (_, _, stat) in empty_statistics(traced.program, decisions).items()
    }
