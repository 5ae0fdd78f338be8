"""How far one array is from another: SQNR, cosine, relative error, agreement. All in float64.

Every metric is a function of four sums over the elements: signal Σf², noise Σ(q-f)², dot Σfq and
power Σq², so that what is measured in parts (shards, trips of a loop) adds up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

_MSG_METRIC = (
    "There is no metric {name!r}. Use one of {names}, or a function metric(reference, output) of "
    "the float model's output and the other's."
)


@dataclass(frozen=True)
class Difference:
    """Two arrays held against each other; `relative` is |q-f| / |f| in the Euclidean norm.

    >>> print(difference([3.0, 4.0], [3.0, 4.5]))
    20.0 dB, cosine 0.9985, relative error 10.00%
    """

    sqnr: float
    cosine: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{decibels(self.sqnr)} dB, cosine {self.cosine:.4f}, "
            f"relative error {self.relative:.2%}"
        )


def difference(reference: Any, value: Any) -> Difference:
    """How far `value` is from `reference`, element by element."""
    return from_sums(*sums(reference, value))


def sums(reference: Any, value: Any) -> tuple[float, float, float, float]:
    """Signal, noise, dot and power.

    >>> sums([1.0, 2.0], [1.0, 3.0])
    (5.0, 1.0, 7.0, 10.0)
    """
    f, q = _flat(reference), _flat(value)
    # Where both overflowed alike there is no error, only a value that no sum can hold.
    with np.errstate(invalid="ignore", over="ignore"):
        noise = np.where(f == q, 0.0, q - f)
        return float(f @ f), float(noise @ noise), float(f @ q), float(q @ q)


def from_sums(signal: float, noise: float, dot: float, power: float) -> Difference:
    """The metrics of the four sums. Nothing against nothing is equal; anything else is not.

    >>> from_sums(0.0, 0.0, 0.0, 0.0), from_sums(4.0, 0.04, 4.0, 4.0).sqnr
    (Difference(sqnr=inf, cosine=1.0, relative=0.0), 20.0)
    """
    if not all(map(math.isfinite, (signal, noise, dot, power))):
        return Difference(math.nan, math.nan, math.nan)
    if noise == 0:
        return Difference(math.inf, 1.0, 0.0)
    if signal == 0:
        return Difference(-math.inf, 0.0, math.inf)
    cosine = dot / math.sqrt(signal * power) if power else 0.0
    ratio = noise / signal
    return Difference(-10 * math.log10(ratio), max(-1.0, min(1.0, cosine)), math.sqrt(ratio))


def agreement(reference: Any, value: Any) -> float | None:
    """The share of rows whose largest entry stands at the same place; None for single numbers.

    >>> agreement([[1.0, 2.0], [5.0, 3.0]], [[1.0, 9.0], [1.0, 3.0]])
    0.5
    """
    f, q = (np.asarray(x, np.float64) for x in (reference, value))
    if f.ndim == 0 or f.shape[-1] < 2 or f.size == 0:
        return None
    return float(np.mean(f.argmax(-1) == q.argmax(-1)))


def decibels(value: float | None) -> str:
    """A level with one digit, `exact` where there is no error.

    >>> decibels(38.26), decibels(math.inf), decibels(None)
    ('38.3', 'exact', '-')
    """
    if value is None:
        return "-"
    if value == math.inf:
        return "exact"
    return "NaN" if math.isnan(value) else f"{value:.1f}"


# --- of a whole output ----------------------------------------------------------------------------


def measured(outputs: Sequence[Any]) -> list[np.ndarray]:
    """The arrays of an output that errors are measured on: the floats, if there are any."""
    numbers = [x for x in outputs if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]
    floats = [x for x in numbers if jax.dtypes.issubdtype(x.dtype, np.inexact)]
    return [np.asarray(x) for x in floats or numbers]


def output_difference(reference: Sequence[Any], outputs: Sequence[Any]) -> Difference:
    """Over all arrays of a model's output together."""
    parts = [sums(f, q) for f, q in zip(reference, outputs, strict=True)]
    return from_sums(*(float(sum(column)) for column in zip(*parts, strict=True)))


def output_agreement(reference: Sequence[Any], outputs: Sequence[Any]) -> float | None:
    """Of the first array that has rows."""
    for f, q in zip(reference, outputs, strict=True):
        found = agreement(f, q)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class Metric:
    """A number for a model's output, and which way is better."""

    name: str
    of: Callable[[Sequence[Any], Sequence[Any]], float]
    higher: bool
    limit: float | None = None  # what is usually good enough

    def within(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher else value <= limit  # NaN never is

    def text(self, value: float) -> str:
        return f"{decibels(value)} dB" if self.name == "sqnr" else f"{value:.4g}"


def _agreement(reference: Sequence[Any], outputs: Sequence[Any]) -> float:
    found = output_agreement(reference, outputs)
    return math.nan if found is None else found


METRICS = {
    "sqnr": Metric("sqnr", lambda f, q: output_difference(f, q).sqnr, True, 30.0),
    "cosine": Metric("cosine", lambda f, q: output_difference(f, q).cosine, True, 0.999),
    "relative": Metric("relative", lambda f, q: output_difference(f, q).relative, False, 0.03),
    "agreement": Metric("agreement", _agreement, True, 0.99),
}


def metric_of(metric: Any, higher_is_better: bool = True) -> Metric:
    """A metric by name, or of a function `metric(reference, output)`.

    >>> metric_of('cosine').higher, metric_of(lambda f, q: 0.0, higher_is_better=False).higher
    (True, False)
    """
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]
    if isinstance(metric, str) or not callable(metric):
        raise ValueError(_MSG_METRIC.format(name=metric, names=", ".join(METRICS)))
    name = getattr(metric, "__name__", type(metric).__name__)
    return Metric(name, metric, higher_is_better)


def _flat(array: Any) -> np.ndarray:
    array = np.asarray(array)
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag])
    return array.astype(np.float64).ravel()
