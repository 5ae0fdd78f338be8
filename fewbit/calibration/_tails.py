"""Ranges that few values set: what lies far beyond almost all others leaves these few codes.

Decoders have such activations, a channel or a token a thousand times the rest. A static range must
hold them, so integers of a byte are left with one or two codes for everything else. Calibration
compares each range with percentiles of a sample, which costs little beside a product.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.calibration._observers import Operand, State
from fewbit.interpreter import whole_array
from fewbit.numerics import format_of
from fewbit.planning import SCALE, ScalePlan, range_keys, scale_and_zero_point
from fewbit.qarray import parse_method, smallest_magnitude

TAIL = "tail"
SAMPLE = 8192  # values that are looked at in a batch, for one scale
_LEAST = 1024  # and for each of many
_GOLDEN = (math.sqrt(5) - 1) / 2
# Percent of the values, and how many times further than theirs a range is far. Of normal numbers
# the largest of a billion is 1.9, 2.4 and 3.1 times these; of a gated product some 3, 8 and 20.
_FAR = {99.9: 10.0, 99.0: 30.0, 95.0: 80.0}

_MSG_FAR = (
    "{count} of {total} static ranges {lie} far beyond almost all of the values, for which few "
    "codes are left: {places}. Measure each batch there: {cure}. Or clip the largest values, if "
    "they do not matter: act_calibration_method='percentile,99.9' or 'mse'."
)
_MSG_RULE = "put {rule!r} before the other rules{more}"


class Tail:
    """Percentiles of the magnitudes that a scale serves, of a sample: the largest of all batches.

    Zeros do not count: they have a code of their own whatever the range.
    """

    name = TAIL

    def wants(self, operand: Operand) -> bool:
        if operand.how is None or operand.averages:
            return False
        row = format_of(operand.how.qtype)
        is_short = row.kind == "int" and row.bits <= 8  # floats have codes for small numbers too
        return is_short and not parse_method(operand.how.calibration_method).clips

    def init(self, operand: Operand) -> State:
        assert operand.scale_shape is not None
        return {_key(percent): jnp.zeros(operand.scale_shape, jnp.float32) for percent in _FAR}

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State:
        assert operand.scale_shape is not None
        places = sample_places(array.shape, operand.scale_shape)
        if places is None:
            return state
        groups, inside = places
        flat = whole_array(array).ravel()
        sample = jnp.abs(flat[jnp.asarray(groups)[:, None] + jnp.asarray(inside)[None]])
        some = sample.shape[1]
        top = jax.lax.top_k(sample.astype(jnp.float32), some // 20 + 1)[0]
        count = jnp.sum(sample > 0, axis=1, keepdims=True).astype(jnp.float32)
        new = {}
        for percent in _FAR:
            place = jnp.floor(count * ((100 - percent) / 100)).astype(jnp.int32)
            value = jnp.take_along_axis(top, jnp.minimum(place, top.shape[1] - 1), 1)
            new[_key(percent)] = value.reshape(operand.scale_shape)
        return self.merge(state, new)

    def merge(self, first: State, second: State) -> State:
        return {name: jnp.maximum(first[name], second[name]) for name in first}

    def finalize(self, state: State) -> Mapping[str, Any]:
        return {}  # no part of a statistic: it makes no scale


def _key(percent: float) -> str:
    return f"percentile_{percent:g}"


def sample_places(
    shape: Sequence[int], scale_shape: Sequence[int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Where to look: flat places of each scale's first value, and steps from there to some others.

    None where tiles are uneven, or an array is empty or huge. Steps follow the golden ratio, which
    no width of an axis is in step with.

    >>> groups, inside = sample_places((4, 6), (2, 1))
    >>> groups.tolist(), inside.tolist()
    ([0, 12], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    """
    if 0 in shape or math.prod(shape) >= 2**31:
        return None
    if any(n % s for n, s in zip(shape, scale_shape, strict=True)):
        return None
    tiles = [n // s for n, s in zip(shape, scale_shape, strict=True)]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    size, count = math.prod(tiles), math.prod(scale_shape)
    some = min(size, max(SAMPLE // count, _LEAST))
    steps = np.arange(size)
    if some < size:
        steps = np.floor((np.arange(some) * _GOLDEN) % 1.0 * size).astype(np.int64)

    def flat(places: np.ndarray, dims: Sequence[int], each: Sequence[int]) -> np.ndarray:
        along = np.unravel_index(places, tuple(dims)) if len(dims) else ()
        total = np.zeros(len(places), np.int64)
        for index, step in zip(along, each, strict=True):
            total += index * step
        return total.astype(np.int32)

    between = [tile * stride for tile, stride in zip(tiles, strides, strict=True)]
    return flat(np.arange(count), scale_shape, between), flat(steps, tiles, strides)


@dataclass(frozen=True)
class FarRange:
    """A range far beyond `percent` of the values that it is for, which are within `typical`."""

    name: str
    reach: float
    percent: float
    typical: float
    layer: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"{self.name[:-4]} ({self.name[-3:]}"
        where += f", layer {'/'.join(map(str, self.layer))})" if self.layer else ")"
        return f"{where} ±{self.reach:.4g}, but {self.percent:g} % within ±{self.typical:.3g}"


def far_ranges(entries: Mapping[str, Any]) -> list[FarRange]:
    """The operands whose range is far beyond what most of their values need, the worst first."""
    found = [_worst(name, entry) for name, entry in entries.items() if TAIL in entry.states]
    return sorted((far for far in found if far is not None), key=lambda f: -f.reach / f.typical)


def _worst(name: str, entry: Any) -> FarRange | None:
    seen, tail = entry.states.get("range", {}), entry.states[TAIL]
    edges = [np.abs(v) for k, v in seen.items() if k.startswith(("max_of_", "min_of_"))]
    if not edges or any(value.shape != edges[0].shape for value in tail.values()):
        return None
    reach = np.max(edges, axis=0)
    for percent, far in _FAR.items():
        typical = tail[_key(percent)]
        known = typical > 0
        if not known.any():
            return None
        ratio = np.where(known, reach / np.where(known, typical, 1), 0)
        place = np.unravel_index(np.argmax(ratio), ratio.shape)
        if ratio[place] >= far:
            layer = tuple(int(i) for i in place[: entry.count.ndim])
            return FarRange(name, float(reach[place]), percent, float(typical[place]), layer)
    return None


def far_message(far: Sequence[FarRange], total: int, cure: str) -> str:
    """Which ranges of so many, the numbers, and how to measure each batch instead."""
    places = "; ".join(map(str, far[:5])) + (f"; and {len(far) - 5} more" if len(far) > 5 else "")
    lie = "lies" if len(far) == 1 else "lie"
    return _MSG_FAR.format(count=len(far), total=total, lie=lie, places=places, cure=cure)


def cure_by_rule(far: Sequence[FarRange], operands: Mapping[str, Operand]) -> str:
    """The rule that measures each batch at the worst of them."""
    worst = operands[far[0].name]
    rule = worst.rule.replace(module_path=re.escape(worst.site.path), act_static_scale=None)
    others = len({operands[f.name].site.path for f in far}) - 1
    more = f", and the like for {others} more path{'s' * (others > 1)}" if others else ""
    return _MSG_RULE.format(rule=rule, more=more)


# --- Ranges so small that their scale under-flows: found where they are collected, and told -------

EXTREMES = {"absmax": "max_of_absmax", "max": "max_of_max", "min": "min_of_min"}
# Far above all that can be lost: most models are spared the arithmetic.
_SUSPICIOUS = 1e-3

_MSG_LOST = (
    "The static scale {name}: the numbers of {lost} of {all} scales become zeros, because a range "
    "as small as theirs (at most {largest:.2g}) counts as nothing beside {dtype} scales. {cure}."
)
_MSG_ZERO = (
    "The statistics of the static scale {name} saw nothing but zeros, which is no range to "
    "quantize by: the scale becomes 1, whatever the inputs are. Collect them on real inputs, or "
    "use a dynamic range there: act_static_scale=None in a rule of its own."
)
CURE = (
    "Multiply the inputs by a power of two first, or keep activations float there: a rule of its "
    "own without act_qtype"
)


def is_tiny(scale: ScalePlan, state: Mapping[str, Any], layers: int = 0) -> bool:
    """Whether all numbers of an operand, in some layer, are lost, though not all are zero.

    `state` is what the observer of ranges keeps, with so many axes of layers in front.

    >>> from fewbit.qarray import HowToQuantize
    >>> scale = ScalePlan('up/dot_general0_lhs', '', HowToQuantize(qtype='int8'), (1,), 'float32')
    >>> [is_tiny(scale, {'max_of_absmax': np.array([x], np.float32)}) for x in (0, 1e-20, 1e-10)]
    [False, True, False]
    """
    names = {key: EXTREMES[key] for key in range_keys(scale.how)}
    if any(name not in state for name in names.values()):
        return False
    edges = {key: np.asarray(state[name]) for key, name in names.items()}
    largest = _largest(edges)
    axes = tuple(range(layers, largest.ndim))
    whole = largest.max(axes, initial=0)
    if not ((whole > 0) & (whole < _SUSPICIOUS)).any():
        return False
    with jax.ensure_compile_time_eval():
        made = scale_and_zero_point({k: jnp.asarray(e) for k, e in edges.items()}, scale)
    lost = _lost(scale, largest, made[SCALE])
    return bool((np.all(lost | (largest == 0), axis=axes) & (whole > 0)).any())


def tell_tiny(
    scale: ScalePlan, edges: Mapping[str, Any], made: Mapping[str, Any], stacklevel: int = 2
) -> None:
    """Warn of static scales that turn all numbers of their range to zero. Silent inside `jit`."""
    arrays = [*edges.values(), made[SCALE]]
    if any(isinstance(a, jax.core.Tracer) or not a.is_fully_addressable for a in arrays):
        return
    largest = _largest({key: np.asarray(edge) for key, edge in edges.items()})
    if not ((largest > 0) & (largest < _SUSPICIOUS)).any():
        return
    lost = _lost(scale, largest, made[SCALE])
    if lost.any():
        said = dict(lost=lost.sum(), all=lost.size, largest=largest[lost].max())
        text = _MSG_LOST.format(name=scale.name, dtype=made[SCALE].dtype, cure=CURE, **said)
        warnings.warn(text, stacklevel=stacklevel + 1)


def tell_zeros(
    scale: ScalePlan, edges: Mapping[str, Any], layers: int, stacklevel: int = 2
) -> None:
    """Warn of a range that holds nothing but zero, in some layer. Silent inside `jit`."""
    arrays = edges.values()
    if any(isinstance(a, jax.core.Tracer) or not a.is_fully_addressable for a in arrays):
        return
    largest = _largest({key: np.asarray(edge) for key, edge in edges.items()})
    if largest.size and (largest.max(tuple(range(layers, largest.ndim))) == 0).any():
        warnings.warn(_MSG_ZERO.format(name=scale.name), stacklevel=stacklevel + 1)


def largest_of(state: Mapping[str, Any]) -> float:
    """The largest number that the observer of ranges saw."""
    seen = [np.abs(v).max(initial=0) for k, v in state.items() if k.startswith(("max_", "min_"))]
    return float(max(seen, default=0.0))


def _largest(edges: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.max([np.abs(edge.astype(np.float64)) for edge in edges.values()], axis=0)


def _lost(scale: ScalePlan, largest: np.ndarray, made: Any) -> np.ndarray:
    """Ranges whose largest number has the code of zero."""
    half = smallest_magnitude(format_of(scale.how.qtype)) / 2
    return (largest > 0) & (largest < np.asarray(made).astype(np.float64) * half)
