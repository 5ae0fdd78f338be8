"""Distributions of weights in units of their codes: what rounding moved where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._scales import units
from fewbit.numerics import convert_from, format_of, qtype_name
from fewbit.qarray import QArray, unpack

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
        counted = np.bincount(np.searchsorted(_middles(grid), after), minlength=len(grid))
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


def _middles(grid: np.ndarray) -> np.ndarray:
    return (grid[1:] + grid[:-1]) / 2


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
    step = -(-flat.size // _MOST_ELEMENTS)
    return flat[:: max(step, 1)]


def _grid(q: QArray) -> np.ndarray:
    """Every value that a code of the format can stand for, ascending."""
    row = format_of(q.qtype)
    if row.kind == "sign":
        return np.array([-1.0, 1.0])
    if row.kind == "int":
        low, high = row.asymmetric or (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
        return np.arange(low, high + 1, dtype=np.float64)
    if row.kind == "table":
        return np.asarray(convert_from(jnp.arange(16, dtype=jnp.uint4), q.qtype), np.float64)
    return _float_grid(row.storage)


def _float_grid(dtype: Any) -> np.ndarray:
    info = jnp.finfo(dtype)
    codes = np.arange(2 ** int(info.bits), dtype=np.uint8)
    if int(info.bits) == 4:
        magnitudes: Sequence[float] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        return np.unique([s * m for s in (-1.0, 1.0) for m in magnitudes])
    numbers = codes.view(np.dtype(dtype)).astype(np.float64)
    return np.unique(numbers[np.isfinite(numbers)])
