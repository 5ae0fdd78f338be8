"""Calibrate a Keras model: its layers report what they see while the user's own code runs it.

The code may call the model, `predict`, or `generate` inside a compiled loop. So what a layer sees
leaves the program through a callback, which no way of compiling the model can lose.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from fewbit._plan import Plan
from fewbit.decisions import Decision
from fewbit.engine import Runner, Traced
from fewbit.jaxprs import scope_name
from fewbit.keras._freed import Leftovers
from fewbit.keras._planning import LayerPlan
from fewbit.keras._state import named_variables
from fewbit.observed import Entry, Statistics, model_digest
from fewbit.observer_tap import FINITE, HISTOGRAM, ObserverTap, by_operand, combine_all
from fewbit.observers import Observer, Operand, observer_named, operands_of
from fewbit.tails import TAIL
from fewbit.taps import Reading

_MSG_NOT_FINITE = (
    "Calibration met NaN or infinity at the input of '{path}' ({cls}), in its call number {call}. "
    "Look at the data and at the float model first: fewbit cannot choose a range for such values."
)
_MOST_PENDING = 256


class CalibrationError(ValueError):
    """Calibration that cannot give every layer a range."""


class Collector:
    """What one layer's observers have seen so far."""

    def __init__(self, layer_plan: LayerPlan, leftovers: Leftovers):
        self.layer_plan, self.leftovers = layer_plan, leftovers
        names = ["range", HISTOGRAM, TAIL]
        self.observers: dict[str, Observer] = {name: observer_named(name) for name in names}
        self.operands: dict[str, Operand] = {}
        self.calls = 0
        self.spoilt: int | None = None
        self._total: dict[str, Reading] = {}
        self._pending: list[dict[str, Reading]] = []
        self._lock = threading.Lock()
        self._compiled: dict[Runner, Any] = {}

    def run(self, layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's float call, observed."""
        program = self.layer_plan.program
        runner, dynamic, others = program.prepare(named_variables(layer), {}, {}, args, kwargs)
        if runner not in self._compiled:
            self._compiled[runner] = jax.jit(functools.partial(self._observed, runner))
        with jax.named_scope(scope_name(self.layer_plan.path, type(layer).__name__)):
            result, readings = self._compiled[runner](dynamic)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(readings)):
            self.leftovers.expect()
            jax.debug.callback(self.add, readings)
        else:
            self.add(readings)
            self._settle()
        return program.finish(result, others, args, kwargs)

    def _observed(self, runner: Runner, dynamic: list[Any]) -> Any:
        out, readings = runner.tapped(dynamic, self._tap)
        return out, by_operand(readings)

    def _tap(self, traced: Traced, decisions: dict[str, Decision]) -> ObserverTap:
        found = [
            operand
            for ts in traced.program.sites
            for operand in operands_of(ts, decisions[ts.site.id])
        ]
        tap = ObserverTap(found, self.observers, ["range", TAIL])
        self.operands |= {o.name: o for o in found if tap.observers_of(o)}
        return tap

    def add(self, readings: dict[str, Reading]) -> None:
        """Take what one call saw. Called from inside programs too: no JAX in here."""
        self.leftovers.give_back()
        held = jax.tree.map(np.asarray, readings)
        with self._lock:
            self.calls += 1
            finite = all(np.all(reading.value[FINITE]) for reading in held.values())
            if not finite and self.spoilt is None:
                self.spoilt = self.calls
            self._pending.append(held)

    def _settle(self, force: bool = False) -> None:
        if not force and len(self._pending) < _MOST_PENDING:
            return
        with self._lock:
            pending, self._pending = self._pending, []
        combine = combine_all(tuple(self.observers.items()))
        for readings in pending:
            shared = [name for name in readings if name in self._total]
            # By number: names differ from layer to layer, and each would compile its own program.
            both = combine(
                {str(k): self._total[name] for k, name in enumerate(shared)},
                {str(k): readings[name] for k, name in enumerate(shared)},
            )
            self._total |= readings | {name: both[str(k)] for k, name in enumerate(shared)}

    def entries(self) -> dict[str, Entry]:
        """What was seen, by operand."""
        self._settle(force=True)
        if self.spoilt is not None:
            where = dict(path=self.layer_plan.path, cls=type(self.layer_plan.layer).__name__)
            raise CalibrationError(_MSG_NOT_FINITE.format(**where, call=self.spoilt))
        return {
            name: Entry(
                self.operands[name].site.id,
                self.operands[name].side,
                np.asarray(reading.count),
                {
                    o: jax.tree.map(np.asarray, state)
                    for o, state in reading.value.items()
                    if o != FINITE
                },
                self.operands[name].range_method,
            )
            for name, reading in self._total.items()
        }


@contextlib.contextmanager
def observing(
    planned: Sequence[LayerPlan], layers: Sequence[keras.Layer]
) -> Iterator[list[Collector]]:
    """While the layers report to collectors; their classes are as before afterwards.

    `layers` are all of the model: recurrent ones step through their cells meanwhile, as they will
    when the cells are quantized.
    """
    leftovers = Leftovers()
    collectors = [Collector(each, leftovers) for each in planned]
    before = [type(each.layer) for each in planned]
    whole = [(layer, layer.use_cudnn) for layer in layers if hasattr(layer, "use_cudnn")]
    try:
        for layer, _ in whole:
            layer.use_cudnn = False
        for collector in collectors:
            layer = collector.layer_plan.layer
            layer._fewbit = collector
            original: Any = type(layer)
            layer.__class__ = _observed_class(original)
        yield collectors
        jax.effects_barrier()
    finally:
        for layer, setting in whole:
            layer.use_cudnn = setting
        for each, cls in zip(planned, before, strict=True):
            each.layer.__class__ = cls
            del each.layer._fewbit


@functools.cache
def _observed_class(original: type[keras.Layer]) -> type[keras.Layer]:
    @functools.wraps(original.call)
    def call(self, *args, **kwargs):
        return self._fewbit.run(self, args, kwargs)

    return type(f"Observed{original.__name__}", (original,), {"call": call})


def statistics(collectors: Sequence[Collector], plan: Plan) -> Statistics:
    """What all layers saw, as one value."""
    entries: dict[str, Entry] = {}
    for collector in collectors:
        entries |= collector.entries()
    calls = max((collector.calls for collector in collectors), default=0)
    return Statistics("keras", model_digest(plan), calls, entries)
