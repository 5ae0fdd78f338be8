"""Ranges so small that their scale under-flows: found where they are collected, and told.

A scale below the root of the smallest float counts as nothing and becomes 1 (`_scales`), so all
numbers of such a range become zeros, as those of a range of zeros would. Calibration treats a whole
operand like that as it treats one that is all zero: an error, or a warning with `strict=False`,
because the result is the same. Statistics that come from elsewhere (training, a file), and single
scales of many, are told like weights, whose arrays may have an empty channel with good reason. So
are such statistics of nothing but zeros.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._plan import ScalePlan
from fewbit._qarray_losses import smallest_magnitude
from fewbit.numerics import format_of
from fewbit.static_scales import SCALE, range_keys, scale_and_zero_point

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
