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
_FEW_CODES = 32
_BINS = 96


@dataclass(frozen=True)
class Distribution:
    """A weight before and after, both in units of the scale that each number has.

    `before` counts the float numbers in equal bins from `low` to `high`; `codes` are the values
    that codes stand for and `after` how many numbers have each; with more codes than bins, both are
    bins. `absmax` is the largest magnitude of the float weight.
    """

    path: str
    qtype: str
    low: float
    high: float
    before: tuple[int, ...]
    codes: tuple[float, ...]
    after: tuple[int, ...]
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
    grid = _grid(q)
    before = before[np.isfinite(before)]
    margin = (grid[-1] - grid[0]) / (2 * (len(grid) - 1))
    low, high = float(grid[0] - margin), float(grid[-1] + margin)
    fine = 6 if before.size > 20_000 else 4 if before.size > 4_000 else 2
    bins = _BINS if len(grid) > _FEW_CODES else fine * len(grid)
    counts = np.histogram(np.clip(before, low, high), bins, (low, high))[0]
    if len(grid) > _FEW_CODES:
        edges = np.linspace(low, high, _BINS + 1)
        grid = (edges[1:] + edges[:-1]) / 2
        codes = np.histogram(after, _BINS, (low, high))[0]
    else:
        nearest = np.abs(after[:, None] - grid[None, :]).argmin(1) if after.size else after[:0]
        codes = np.bincount(nearest.astype(int), minlength=len(grid))
    return Distribution(
        path,
        qtype_name(q.qtype),
        low,
        high,
        tuple(map(int, counts)),
        tuple(float(f"{g:.6g}") for g in grid),
        tuple(map(int, codes)),
        float(absmax),
        int(np.size(weight)),
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
    step = -(-flat.size // _MOST_ELEMENTS)
    return flat[:: max(step, 1)]


def _grid(q: QArray) -> np.ndarray:
    """Every value that a code of the format can stand for, ascending."""
    row = format_of(q.qtype)
    if row.kind == "sign":
        return np.array([-1.0, 1.0])
    if row.kind == "int":
        low, high = row.asymmetric or (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
        if high - low > 4 * _BINS:
            return np.linspace(low, high, 4 * _BINS)
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
