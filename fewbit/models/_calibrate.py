"""Calibrate: run the float model on sample batches and collect what observers see at its Sites."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fewbit._util import progress as with_progress
from fewbit.calibration import (
    FINITE,
    HISTOGRAM,
    TAIL,
    CalibrationError,
    Entry,
    Observer,
    ObserverTap,
    Operand,
    Statistics,
    by_operand,
    chosen,
    combine_all,
    cure_by_rule,
    far_message,
    far_ranges,
    is_tiny,
    largest_of,
    model_digest,
    observer_named,
    operands_of,
)
from fewbit.interpreter import Reading, Runner, Traced, is_array, is_weight
from fewbit.models import _calibrate_messages as messages
from fewbit.models._front_ends import front_end, is_rules
from fewbit.models._front_ends import plan as make_plan
from fewbit.planning import Complaint, Decision, Plan, complaints
from fewbit.providers import PtqProvider, QuantizationProvider
from fewbit.rules import QuantizationRule


class Batch:
    """One call of the model, where a tuple of positional arguments is not enough.

    >>> Batch(1, train=False)
    Batch(1, train=False)
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"Batch({', '.join(words)})"

    @classmethod
    def of(cls, value: Any, common: Mapping[str, Any]) -> "Batch":
        """A tuple is the positional arguments; anything else is the only one."""
        batch = value if isinstance(value, Batch) else None
        args = batch.args if batch else value if isinstance(value, tuple) else (value,)
        return cls(*args, **{**common, **(batch.kwargs if batch else {})})


def calibrate(
    model: Any,
    rules_or_plan: Iterable[QuantizationRule] | QuantizationProvider | Plan,
    params: Any = None,
    batches: Iterable[Any] | None = None,
    observers: Sequence[str | Observer] = ("range",),
    *,
    method: str | Sequence[str] | None = None,
    progress: bool = True,
    strict: bool = True,
    **kwargs: Any,
) -> Statistics:
    """Run the float model on `batches` and return what was seen, for `quantize_params`.

    A batch is what the model is called with: an array (or any tree) if it takes one argument, a
    tuple of arguments, or `fewbit.Batch(*args, **kwargs)`; `kwargs` go to every call. `batches` is
    any iterable, a generator too; sizes may differ along `act_batch_axes`. `params` are the float
    parameters of a function or a Linen module, or all variables of the latter; an NNX model holds
    its own: `calibrate(model, rules, batches)`. Nothing that a call changes is kept.

    With a plan its methods are run, with rules `__call__`, or those in `method`, each on every
    batch. Rules with `act_calibration_method='percentile,...'` or `'mse'` add the observer
    'histogram' by themselves. A range far beyond almost all of the values it is for, as the few
    huge activations of a decoder make it, is named in a warning.

    >>> import fewbit, jax.numpy as jnp
    >>> rule = fewbit.QuantizationRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
    >>> f, params = lambda params, x: jnp.tanh(x @ params['w']), {'w': jnp.eye(3)}
    >>> batches = [jnp.full((2, 3), v) for v in (0.5, -3.0, 1.0)]
    >>> stats = fewbit.calibrate(f, [rule], params, batches)
    >>> stats
    Statistics(function, 1 operand, 3 batches)
    >>> plan = fewbit.plan(f, [rule], params, batches[0])
    >>> qparams = fewbit.quantize_params(params, plan, stats)
    >>> fewbit.quantize_model(f, fewbit.PtqProvider([rule]))(qparams, batches[1]).shape
    (2, 3)
    """
    kind = front_end(model)
    if batches is None and hasattr(kind, "HOLDS_PARAMS"):
        params, batches = None, params
    _check_arguments(model, rules_or_plan, params, batches)
    plan = rules_or_plan if isinstance(rules_or_plan, Plan) else None
    provider = _provider(rules_or_plan, plan)
    methods = (method,) if isinstance(method, str) else tuple(method or ())
    methods = methods or (plan.methods if plan else ("__call__",))
    run = kind.float_runs(model, provider, params)
    with complaints(strict) as complaint:
        work = _Work(chosen(observers), run, methods, complaint)
        for number, value in enumerate(_told(batches, progress), start=1):
            batch = Batch.of(value, kwargs)
            if work.plan is None:
                work.plan = plan or _plan(model, kind, provider, params, batch, methods, strict)
            work.add(number, batch)
        return work.finish()


def _told(batches: Any, show: bool) -> Iterator[Any]:
    return with_progress(batches, "Calibrating", show=show)


def _provider(rules_or_plan: Any, plan: Plan | None) -> QuantizationProvider:
    if isinstance(rules_or_plan, QuantizationProvider):
        return rules_or_plan
    return PtqProvider(plan.rules if plan else rules_or_plan)


def _plan(
    model: Any,
    kind: Any,
    provider: QuantizationProvider,
    params: Any,
    batch: Batch,
    methods: Sequence[str],
    strict: bool,
) -> Plan:
    first = (params,) if kind.__name__.endswith(".function") else ()
    common: dict[str, Any] = dict(methods=methods, strict=strict)
    try:
        return make_plan(model, provider, *first, *batch.args, **common, **batch.kwargs)
    except (TypeError, ValueError) as error:
        raise messages.wrapped(error, 1, batch) from error


# --- the work -------------------------------------------------------------------------------------


@dataclass
class _Work:
    """What has been collected so far, and how."""

    observers: tuple[Observer, ...]
    run: Callable[[str, tuple, dict], tuple[Runner, list[Any]]]
    methods: Sequence[str]
    complaint: Complaint
    plan: Plan | None = None
    batches: int = 0
    operands: dict[str, Operand] = field(default_factory=dict)
    total: dict[str, Reading] = field(default_factory=dict)  # by operand
    _runs: dict[Runner, Any] = field(default_factory=dict)

    def add(self, number: int, batch: Batch) -> None:
        """Run one batch through each method."""
        seen: dict[str, Reading] = {}
        for method in self.methods:
            try:
                runner, dynamic = self.run(method, batch.args, batch.kwargs)
                if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(dynamic)):
                    raise CalibrationError(messages.ABSTRACT.format(number=number))
                new = self._run_of(runner)(dynamic)
            except messages.NoNumbers as error:
                self.complaint(error.told(number, batch))
                return
            except (TypeError, ValueError) as error:
                raise messages.wrapped(error, number, batch) from error
            seen = self._combined(seen, new)
        spoilt = [name for name in self.operands if name in seen and _is_spoilt(seen[name])]
        if spoilt:
            self.complaint(messages.spoilt(self.operands[spoilt[0]], number, batch, len(spoilt)))
            return
        self.total = self._combined(self.total, seen)
        self.batches += 1

    def _run_of(self, runner: Runner) -> Callable[[list[Any]], dict[str, Reading]]:
        if runner not in self._runs:

            def readings(dynamic: list[Any]) -> dict[str, Reading]:
                return by_operand(runner.tapped(dynamic, self._tap)[1])

            self._runs[runner] = jax.jit(readings)
        return self._runs[runner]

    def _tap(self, traced: Traced, decisions: dict[str, Decision]) -> ObserverTap:
        assert self.plan is not None
        stored = [value.leaf for value in traced.values if is_weight(value)]
        if stored:
            raise CalibrationError(messages.STORED.format(leaf=stored[0]))
        found = [
            operand
            for ts in traced.program.sites
            for operand in operands_of(ts, decisions[ts.site.id])
        ]
        planned = {scale.name: scale for scale in self.plan.scales}
        for operand in found:
            messages.check_planned(operand, planned)
        tap = ObserverTap(found, dict(self.known), self.asked)
        seen = [operand for operand in found if tap.observers_of(operand)]
        self.operands |= {o.name: o for o in seen if o.name not in self.operands}
        if not self.operands:
            names = [observer.name for observer in self.observers]
            raise CalibrationError(messages.nothing(self.plan, names))
        for operand in seen:
            if 0 in operand.shape:
                raise messages.NoNumbers(operand)
        return tap

    def _combined(self, first: dict[str, Reading], second: Mapping[str, Reading]) -> Any:
        shared = {name: first[name] for name in first if name in second}
        both = combine_all(self.known)(shared, {name: second[name] for name in shared})
        return {**first, **second, **both}

    @functools.cached_property
    def known(self) -> tuple[tuple[str, Observer], ...]:
        """The observers by name, with the one that some methods cannot do without."""
        own = {observer.name: observer for observer in self.observers}
        added = {name: own.get(name, observer_named(name)) for name in (HISTOGRAM, TAIL)}
        return tuple({**own, **added}.items())

    @property
    def asked(self) -> list[str]:
        """The observers that look at every operand that they want; ranges are looked at twice."""
        names = [observer.name for observer in self.observers]
        return [*names, *([TAIL] if "range" in names and TAIL not in names else ())]

    def finish(self) -> Statistics:
        """The statistics, if every operand has some."""
        if self.plan is None:
            raise ValueError(messages.NO_BATCHES)
        order = {scale.name: i for i, scale in enumerate(self.plan.scales)}
        names = sorted(self.operands, key=lambda name: order.get(name, len(order)))
        total = jax.device_get(self.total)
        empty = [n for n in names if n not in total or not np.all(total[n].count > 0)]
        if empty:
            counts = {name: total[name].count if name in total else None for name in empty}
            self.complaint(messages.empty(self.operands, counts, self.batches))
        zero = [n for n in names if n not in empty and _is_zero(total[n])]
        if zero:
            self.complaint(messages.all_zero([self.operands[name] for name in zero]))
        self._check_tiny({n: total[n] for n in names if n not in empty and n not in zero})
        entries = {
            name: Entry(
                self.operands[name].site.id,
                self.operands[name].side,
                np.asarray(total[name].count),
                {o: total[name].value[o] for o in total[name].value if o != FINITE},
                self.operands[name].range_method,
            )
            for name in names
            if name in total and name not in empty
        }
        far = far_ranges(entries)
        if far:
            cure = cure_by_rule(far, self.operands)
            warnings.warn(far_message(far, len(entries), cure), stacklevel=3)
        digest, known = model_digest(self.plan), dict(self.known)
        return Statistics(self.plan.kind, digest, self.batches, entries, own_observers=known)

    def _check_tiny(self, total: Mapping[str, Reading]) -> None:
        """Ranges whose numbers would all become zeros."""
        assert self.plan is not None
        scales = {scale.name: scale for scale in self.plan.scales}
        ranges = {
            n: (r.value["range"], r.count.ndim) for n, r in total.items() if "range" in r.value
        }
        tiny = [n for n in ranges if n in scales and is_tiny(scales[n], *ranges[n])]
        if tiny:
            largest = max(largest_of(ranges[name][0]) for name in tiny)
            self.complaint(messages.tiny([self.operands[name] for name in tiny], largest))


def _is_spoilt(reading: Reading) -> bool:
    """Some value was not finite in a run that took place."""
    finite, count = np.asarray(reading.value[FINITE]), np.asarray(reading.count)
    return bool(np.any(~finite & (count > 0)))


def _is_zero(reading: Reading) -> bool:
    """A range that holds nothing but zero, in some layer."""
    state = reading.value.get("range", {})
    extremes = [v for k, v in state.items() if k.startswith(("max_of_", "min_of_"))]
    if not extremes or not all(v.size for v in extremes):
        return False
    layers = reading.count.ndim
    axes = tuple(range(layers, extremes[0].ndim))
    return bool(np.any(np.all([np.all(v == 0, axis=axes) for v in extremes], axis=0)))


def _check_arguments(model: Any, rules: Any, params: Any, batches: Any) -> None:
    if not isinstance(rules, Plan) and not is_rules(rules):
        if is_rules(model) or not isinstance(rules, Iterable) or isinstance(rules, Mapping | str):
            raise TypeError(messages.ARGUMENTS.format(found=type(rules).__name__))
    if isinstance(rules, QuantizationRule):
        raise TypeError(messages.ONE_RULE.format(rule=rules))
    if batches is None:
        raise TypeError(messages.MISSING)
    if is_array(batches) or isinstance(batches, Mapping | Batch | str):
        raise TypeError(messages.ONE_BATCH.format(found=messages.describe_batches(batches)))
    if not isinstance(batches, Iterable):
        raise TypeError(messages.NOT_BATCHES.format(found=type(batches).__name__))
