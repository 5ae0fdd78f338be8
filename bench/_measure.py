"""Interleaved rounds, and how their times become numbers. Needs numpy alone.

The speed of a shared machine drifts within seconds, so times of different kernels are compared only
within a round, in which each kernel is called once (at most: slow ones take part in every fourth):
a number is the median, over the rounds, of the ratios within them. Kernels are called in another
order each round, so that none always finds the caches as the same other one left them.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

SELDOM = 4
RESULTS = pathlib.Path(__file__).with_name("results")

Times = dict[str, list[float]]


class Shape(NamedTuple):
    """x[rows, k] · w[k, n].

    `tied`: w is the transpose of a table [n, k]; `back`: the gradient g[rows, n] · wᵀ.
    """

    rows: int
    k: int
    n: int
    tied: bool = False
    back: bool = False

    def __str__(self) -> str:
        return f"{self.rows}x{self.k}x{self.n}" + " tied" * self.tied + " g·Wᵀ" * self.back

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def io_bytes(self) -> int:
        """Float32 activations in and out."""
        return 4 * self.rows * (self.k + self.n)


SHAPES = (
    Shape(1, 640, 2048),
    Shape(1, 2048, 8192),
    Shape(1, 4096, 16384),
    Shape(1, 640, 262144, tied=True),
    Shape(8, 2048, 8192),
    Shape(128, 2048, 2048),
    Shape(512, 2048, 2048),
    Shape(512, 2048, 2048, back=True),
)


BACK_SHAPES = tuple(
    Shape(rows, 2048, n, back=True) for n in (2048, 8192) for rows in (1, 8, 128, 512)
)


def chosen_shapes(words: list[str] | None, *, back: bool = False) -> list[Shape]:
    """Those whose names begin with one of the words; of the gradients if `back`."""
    shapes = BACK_SHAPES if back else SHAPES
    found = [s for s in shapes if not words or str(s).startswith(tuple(words))]
    if not found:
        raise SystemExit(f"no shape matches {words}; there are: {', '.join(map(str, shapes))}")
    return found


def threads() -> int:
    return len(os.sched_getaffinity(0))


def one_round(calls: dict[str, Callable[[], Any]], order: list[str]) -> dict[str, float]:
    """Seconds of one call of each; a call waits for its result, or returns its own seconds."""
    seconds = {}
    for name in order:
        start = time.perf_counter()
        own = calls[name]()
        seconds[name] = own if isinstance(own, float) else time.perf_counter() - start
    return seconds


def orders(names: list[str], seed: int = 0) -> Iterator[list[str]]:
    """Another order of the names each time."""
    source = random.Random(seed)
    while True:
        names = source.sample(names, len(names))
        yield names


def interleave(
    calls: dict[str, Callable[[], Any]],
    *,
    budget: float,
    seldom: Collection[str] = (),
    least: int = 12,
    most: int = 300,
) -> Times:
    """Seconds per round, until `budget` seconds are over, but of at least `least` rounds.

    `seldom` names what is called in every fourth round only and has NaN in the others.
    """
    times: Times = {name: [] for name in calls}
    shuffled = orders(list(calls))
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(most):
            if number >= least and time.perf_counter() - start > budget:
                break
            left_out = set(seldom) if number % SELDOM else set()
            order = [name for name in next(shuffled) if name not in left_out]
            seconds = one_round(calls, order)
            for name in calls:
                times[name].append(seconds.get(name, math.nan))
    finally:
        gc.enable()
    return times


def summary(times: Times, base: str) -> dict[str, dict[str, Any]]:
    """Per kernel: median ms, and how many times as fast as `base` (median and quartiles)."""
    out = {}
    for name, seconds in times.items():
        speed = np.asarray(times[base]) / np.asarray(seconds)
        low, median, high = np.nanpercentile(speed, [25, 50, 75])
        out[name] = {
            "ms": _short(1e3 * np.nanmedian(seconds)),
            "speed": _short(median),
            "speed_quartiles": [_short(low), _short(high)],
            "rounds": int(np.isfinite(speed).sum()),
        }
    return out


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")


def machine(**more: Any) -> dict[str, Any]:
    """What a number depends on, without anything that names the machine."""
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    cpu = f"{fields['model name']}, family {fields['cpu family']} model {fields['model']}"
    words = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    has = [word for word in words if word in fields["flags"].split()]
    cache = fields.get("cache size", "")
    return {"cpu": cpu, "has": has, "cache": cache, "threads": threads(),
            "load": [load()], "python": platform.python_version(),
            **more}  # fmt: skip


def load() -> float:
    """Processes that wanted a CPU in the last minute; ours are among them."""
    return round(os.getloadavg()[0], 1)


def headline(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    loads = " to ".join(map(str, facts["load"]))
    return f"{facts['cpu']}: {facts['threads']} threads, kernels for {facts['isa']}, load {loads}"


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def write(name: str, value: dict[str, Any]) -> pathlib.Path:
    """`value` as bench/results/<name>.json."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
