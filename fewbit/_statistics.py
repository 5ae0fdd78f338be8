"""Running statistics of calibrations: what static activation scales are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

# Ranges contain zero, so zero is neutral for all three and an untouched statistic is all zeros.
_EXTREMES = {
    "absmax": ("max_of_absmax", jnp.maximum),
    "max": ("max_of_max", jnp.maximum),
    "min": ("min_of_min", jnp.minimum),
}


@dataclasses.dataclass(frozen=True)
class SimpleMovingAverage:
    """Mean and extremes of calibrations over steps, kept as a dict of arrays.

    The dict has `count` (int32) and, for each key of the calibration, `sum_of_<key>` and the
    extreme seen, `max_of_absmax`, `max_of_max` or `min_of_min` (float32).

    >>> average = SimpleMovingAverage()
    >>> stat = average.init({'absmax': jnp.array([0.0])})
    >>> for value in (1.0, 3.0):
    ...     stat = average.update(stat, {'absmax': jnp.array([value])})
    >>> average.get_calibration(stat), average.get_calibration(stat, reduction='range')
    ({'absmax': Array([2.], dtype=float32)}, {'absmax': Array([3.], dtype=float32)})
    """

    bootstrap_steps: int = 0

    def init(self, calibration: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """An empty statistic for calibrations of this shape."""
        stat = {"count": jnp.zeros((), jnp.int32)}
        for key, value in calibration.items():
            stat[f"sum_of_{key}"] = jnp.zeros(value.shape, jnp.float32)
            stat[_EXTREMES[key][0]] = jnp.zeros(value.shape, jnp.float32)
        return stat

    def update(
        self, stat: Mapping[str, jax.Array], calibration: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The statistic with one more calibration in it."""
        result = dict(stat)
        result["count"] = stat["count"] + 1
        for key, value in calibration.items():
            total = stat.get(f"sum_of_{key}")
            if total is None:
                raise ValueError(
                    f"The statistic has no 'sum_of_{key}', only {sorted(stat)}: it was collected "
                    "with another calibration method. Start a new one with init()."
                )
            if total.shape != value.shape:
                raise ValueError(
                    f"Shape mismatch between the statistic 'sum_of_{key}' {total.shape} and the "
                    f"calibration {value.shape}. Scales of static activations may not depend on "
                    "the batch: average the axes in act_batch_axes, and keep the others fixed."
                )
            value = value.astype(jnp.float32)
            result[f"sum_of_{key}"] = total + value
            name, extreme = _EXTREMES[key]
            if name in stat:
                result[name] = extreme(stat[name], value)
        return result

    def get_calibration(
        self,
        stat: Mapping[str, jax.Array],
        default: Mapping[str, jax.Array] | None = None,
        *,
        reduction: str = "mean",
    ) -> dict[str, jax.Array]:
        """The calibration that the statistic stands for: its mean, or the range it saw.

        `default` is returned while `count <= bootstrap_steps`.
        """
        if reduction not in ("mean", "range"):
            raise ValueError(f"Unknown reduction {reduction!r}: use 'mean' or 'range'.")
        result = {}
        for name, total in stat.items():
            if not name.startswith("sum_of_"):
                continue
            key = name.removeprefix("sum_of_")
            # Layers of a scan have a count each: its axes are the leading ones of the sums.
            count = stat["count"].reshape(
                stat["count"].shape + (1,) * (total.ndim - stat["count"].ndim)
            )
            if reduction == "mean":
                value = total / jnp.maximum(count, 1).astype(jnp.float32)
            elif _EXTREMES[key][0] in stat:
                value = stat[_EXTREMES[key][0]]
            else:
                raise ValueError(
                    f"The statistic has no '{_EXTREMES[key][0]}', only {sorted(stat)}: it comes "
                    "from another library. Use reduction='mean'."
                )
            if default is not None:
                early = count <= self.bootstrap_steps
                value = jnp.where(early, default[key].astype(jnp.float32), value)
            result[key] = value
        return result
