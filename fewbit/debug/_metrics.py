"""Numbers about arrays: how far one is from another, channels that stand out, distributions.

SQNR, cosine and relative error are functions of four sums over the elements in float64: signal Σf²,
noise Σ(q-f)², dot Σfq and power Σq², so that what is measured in parts (shards, trips of a loop)
adds up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import convert_from, format_of, get_asymmetric_bound, qtype_name
from fewbit.qarray import QArray, units, unpack
from fewbit.tracing import TracedSite

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


def from_parts(parts: Any) -> Difference:
    """The metrics of sums that were taken in parts: the last axis has the four of each part."""
    return from_sums(*map(float, np.asarray(parts, np.float64).reshape(-1, 4).sum(0)))


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


def level(difference: Difference | None) -> str:
    """The SQNR in words, `-` where there is none."""
    return decibels(None if difference is None else difference.sqnr)


# --- Of a whole output ----------------------------------------------------------------------------


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
    found = (agreement(f, q) for f, q in zip(reference, outputs, strict=True))
    return next((share for share in found if share is not None), None)


@dataclass(frozen=True)
class Metric:
    """A number for a model's output, and which way is better."""

    name: str
    of: Callable[[Sequence[Any], Sequence[Any]], float]
    higher: bool
    limit: float | None = None  # what is usually good enough

    def within(self, value: float, limit: float) -> bool:
        """Whether a value is at least as good as the limit."""
        return value >= limit if self.higher else value <= limit  # NaN never is


def _agreement(reference: Sequence[Any], outputs: Sequence[Any]) -> float:
    found = output_agreement(reference, outputs)
    return math.nan if found is None else found


def metric_text(name: str, value: float) -> str:
    """A value of a metric with as many digits as one reads."""
    return f"{decibels(value)} dB" if name == "sqnr" else f"{value:.4g}"


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


# --- Channels of a Site's operands, and those that stand far out from the others ------------------

# A channel this far above the median takes most of the codes of a scale it shares: at 5 the others
# have 2.3 bits less. Channels of Gaussian numbers stay below 2.
OUTLIER_RATIO = 5.0


@dataclass(frozen=True)
class Outlier:
    """A channel whose largest magnitude is `ratio` times the median channel's.

    `of` is 'weight' (an input channel), 'weight output' or 'activation'; `channel` counts along the
    axes the product sums over (or, for outputs, those it keeps), flattened.
    """

    site: str
    of: str
    channel: int
    absmax: float
    median: float
    ratio: float
    layer: tuple[int, ...] = ()

    def __str__(self) -> str:
        layer = f" in layer {', '.join(map(str, self.layer))}" if self.layer else ""
        return (
            f"{self.site}: {self.of} channel {self.channel}{layer} reaches {self.absmax:.3g}, "
            f"{self.ratio:.1f}x the median channel"
        )


def summed_axes(ts: TracedSite, side: int) -> tuple[int, ...]:
    """The axes of an operand that the product sums over: the features of a look-up's table."""
    params, op = ts.eqn.params, ts.site.op
    if op == "take":
        rows = params["dimension_numbers"].collapsed_slice_dims
        return tuple(a for a in range(ts.eqn.invars[0].aval.ndim) if a not in rows)
    if op == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        return ((numbers.lhs_spec, numbers.rhs_spec)[side][1],)
    if op == "ragged_dot":
        return tuple(params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][side])
    return tuple(params["dimension_numbers"][0][side])


def kept_axes(ts: TracedSite, side: int) -> tuple[int, ...]:
    """The axes of a weight that become axes of the result: its output channels."""
    params, op = ts.eqn.params, ts.site.op
    if op == "take":
        return ()
    if op == "conv_general_dilated":
        return (params["dimension_numbers"].rhs_spec[0],)
    used = set(summed_axes(ts, side))
    if op == "ragged_dot":
        numbers = params["ragged_dot_dimension_numbers"]
        used |= set(numbers.rhs_group_dimensions) | set(numbers.dot_dimension_numbers[1][side])
    else:
        used |= set(params["dimension_numbers"][1][side])
    return tuple(a for a in range(ts.eqn.invars[side].aval.ndim) if a not in used)


def channel_absmax(array: Any, axes: Sequence[int]) -> Any:
    """The largest magnitude in each channel, the channels of several axes in one row.

    >>> channel_absmax(jnp.array([[1.0, -9.0], [2.0, 3.0]]), (1,))
    Array([2., 9.], dtype=float32)
    """
    others = tuple(a for a in range(array.ndim) if a not in axes)
    largest = jnp.max(jnp.abs(array), axis=others).astype(jnp.float32)
    back = [sorted(axes).index(axis) for axis in axes]  # `max` leaves them in ascending order
    return jnp.transpose(largest, back).reshape(-1)


def outliers_of(
    site: str, of: str, absmax: Any, layers: tuple[int, ...], ratio: float = 2.0
) -> Iterator[Outlier]:
    """The channels above `ratio` times the median, in each layer.

    >>> [o.channel for o in outliers_of('up:dot_general0', 'weight', [1.0, 1.1, 40.0, 0.9], ())]
    [2]
    """
    absmax = np.asarray(absmax, np.float64)
    for layer in np.ndindex(layers):
        row = absmax[layer]
        if row.size < 3 or not np.isfinite(row).all():
            continue
        median = float(np.median(row))
        if median == 0:
            continue
        for channel in np.flatnonzero(row >= ratio * median):
            value = float(row[channel])
            yield Outlier(site, of, int(channel), value, median, value / median, tuple(layer))


def far_out(found: Sequence[Outlier], ratio: float) -> tuple[Outlier, ...]:
    """Those at least `ratio` times above their Site's other channels, farthest first."""
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be a positive number, got {ratio!r}.")
    return tuple(sorted((o for o in found if o.ratio >= ratio), key=lambda o: -o.ratio))


# --- Distributions of weights in units of their codes: what rounding moved where ------------------

_MOST_ELEMENTS = 2**20
_MOST_CODES = 64  # of integers; more are counted in bins, which float formats would not fill
_BINS = 64


@dataclass(frozen=True)
class Distribution:
    """A weight before and after, both in units of the scale that each number has.

    `before` counts the float numbers in equal bins from `low` to `high`; `codes` are the values
    that codes stand for (middles of bins, if they are many integers) and `after` how many numbers
    have each; `first` and `last` are the extreme codes. `absmax` is the largest magnitude of the
    float weight. Of a large weight a million numbers are counted.
    """

    path: str
    qtype: str
    low: float
    high: float
    before: tuple[int, ...]
    codes: tuple[float, ...]
    after: tuple[int, ...]
    first: float
    last: float
    absmax: float
    elements: int


def distribution(path: str, weight: Any, q: QArray) -> Distribution:
    """How `weight` lies on the grid that `q` stores it on.

    >>> import fewbit
    >>> w = jnp.array([0.0, 1.0, 2.0, 3.0, -3.5])
    >>> d = distribution('w', w, fewbit.quantize(w, 'int3'))
    >>> dict(zip(d.codes, d.after))
    {-4.0: 1, -3.0: 0, -2.0: 0, -1.0: 0, 0.0: 1, 1.0: 1, 2.0: 1, 3.0: 1}
    """
    before, after, absmax = (np.asarray(x, np.float64) for x in _in_units(weight, q))
    before = before[np.isfinite(before)]
    grid = _grid(q)
    first, last, binned = float(grid[0]), float(grid[-1]), len(grid) > _MOST_CODES
    if binned and format_of(q.qtype).kind == "int":
        grid = np.linspace(first - 0.5, last + 0.5, 2 * _BINS + 1)[1::2]  # middles of equal bins
        step = (last - first + 1) / _BINS
        counted = np.histogram(after, _BINS, (first - 0.5, last + 0.5))[0]
    else:
        binned, step = False, (last - first) / (len(grid) - 1)
        middles = (grid[1:] + grid[:-1]) / 2
        counted = np.bincount(np.searchsorted(middles, after), minlength=len(grid))
    low, high = float(grid[0] - step / 2), float(grid[-1] + step / 2)
    fine = 1 if binned else 6 if before.size > 20_000 else 4 if before.size > 4_000 else 2
    bins = min(fine * len(grid), 2 * _BINS)
    return Distribution(
        path=path,
        qtype=qtype_name(q.qtype),
        low=low,
        high=high,
        before=tuple(map(int, np.histogram(np.clip(before, low, high), bins, (low, high))[0])),
        codes=tuple(float(f"{g:.6g}") for g in grid),
        after=tuple(map(int, counted)),
        first=first,
        last=last,
        absmax=float(absmax),
        elements=int(np.size(weight)),
    )


@jax.jit
def _in_units(weight: jax.Array, q: QArray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers before and after in units of their scales, and the largest magnitude before."""
    q = unpack(q)
    zero_point = None if q.zero_point is None else q.zero_point.astype(jnp.float32)
    array = weight.astype(jnp.float32)
    before = units(array, q.scale, zero_point, q.tensor_scale, q.tile_shape)
    after = convert_from(q.qvalue, q.qtype)
    return _thinned(before), _thinned(after), jnp.max(jnp.abs(array), initial=0.0)


def _thinned(array: jax.Array) -> jax.Array:
    """At most a million elements, evenly taken."""
    flat = array.reshape(-1)
    return flat[:: max(-(-flat.size // _MOST_ELEMENTS), 1)]


def _grid(q: QArray) -> np.ndarray:
    """Every value that a code of the format can stand for, ascending."""
    row = format_of(q.qtype)
    if row.kind == "sign":
        return np.array([-1.0, 1.0])
    if row.kind == "int":
        low, high = get_asymmetric_bound(q.qtype)
        return np.arange(low, high + 1, dtype=np.float64)
    if row.kind == "table":
        return np.asarray(convert_from(jnp.arange(16, dtype=jnp.uint4), q.qtype), np.float64)
    bits = int(jnp.finfo(row.storage).bits)
    if bits == 4:
        magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        return np.unique([s * m for s in (-1.0, 1.0) for m in magnitudes])
    numbers = np.arange(2**bits, dtype=np.uint8).view(row.storage).astype(np.float64)
    return np.unique(numbers[np.isfinite(numbers)])
