"""The tap of calibration: observers look at the operands of Sites while the float model runs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fewbit.observers import Observer, Operand
from fewbit.taps import Reading, Readings, combine_readings
from fewbit.trace import TracedSite
from fewbit.weight import plain

FINITE, HISTOGRAM = "all finite", "histogram"


class ObserverTap:
    """The tap of calibration: the observers of each operand, and whether all values are finite.

    Of the observers those that are `asked` for are used, and histograms where a method needs one.
    """

    def __init__(
        self, operands: Sequence[Operand], observers: Mapping[str, Observer], asked: Sequence[str]
    ):
        self.observers, self.asked = observers, asked
        self.operands: dict[str, list[Operand]] = {}
        for operand in operands:
            if self.observers_of(operand):
                self.operands.setdefault(operand.site.id, []).append(operand)

    def observers_of(self, operand: Operand) -> list[Observer]:
        needed = {*self.asked, *([HISTOGRAM] if operand.needs_histogram else ())}
        return [o for name, o in self.observers.items() if name in needed and o.wants(operand)]

    def wants(self, site: TracedSite) -> bool:
        return site.site.id in self.operands

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any:
        read: dict[str, Any] = {}
        for operand in self.operands[site.site.id]:
            array = jax.lax.stop_gradient(plain(operands[operand.side == "rhs"]))
            states = {
                o.name: o.observe(operand, o.init(operand), array)
                for o in self.observers_of(operand)
            }
            read[operand.name] = {FINITE: jnp.all(jnp.isfinite(array)), **states}
        return read

    def combine(self, site_id: str, first: Any, second: Any) -> Any:
        return {name: merge_states(self.observers, first[name], second[name]) for name in first}


def merge_states(observers: Mapping[str, Any], first: Any, second: Any) -> Any:
    """Two states of one operand, by observer."""
    return {
        name: first[name] & second[name]
        if name == FINITE
        else observers[name].merge(first[name], second[name])
        for name in first
    }


@functools.lru_cache(maxsize=16)
def combine_all(named: tuple[tuple[str, Observer], ...]) -> Callable[..., dict[str, Reading]]:
    """Readings of two runs, by operand, as one compiled function."""
    observers = dict(named)

    def combine(first: dict[str, Reading], second: dict[str, Reading]) -> dict[str, Reading]:
        merge = functools.partial(merge_states, observers)
        return {name: combine_readings(merge, first[name], second[name]) for name in first}

    return jax.jit(combine)


def by_operand(readings: Readings) -> dict[str, Reading]:
    """Readings by operand, of those by Site."""
    return {
        name: Reading(reading.count, value)
        for reading in readings.values()
        for name, value in reading.value.items()
    }
