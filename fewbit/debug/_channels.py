"""Channels of a Site's operands, and those that stand far out from the others."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit.trace import TracedSite

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
    order = sorted(range(len(axes)), key=lambda i: axes[i])  # as `max` leaves them
    back = [order.index(i) for i in range(len(axes))]
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
            times = value / median
            yield Outlier(site, of, int(channel), value, median, times, tuple(layer))


def far_out(found: Sequence[Outlier], ratio: float) -> tuple[Outlier, ...]:
    """Those at least `ratio` times above their Site's other channels, farthest first."""
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be a positive number, got {ratio!r}.")
    return tuple(sorted((o for o in found if o.ratio >= ratio), key=lambda o: -o.ratio))
