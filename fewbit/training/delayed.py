"""Delayed scaling: the range of a step comes from the largest values of the steps before.

A history holds the largest magnitude of each past step, the latest first. Its derivative is the
history after the step: it comes out of `jax.grad` beside the gradients, and takes the place of the
old one. Inside a step a history is a *range*, two numbers: the largest value it remembers (0 if it
is empty), and a second one whose cotangent says that the step was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fewbit._scales import scale_type
from fewbit.calibration import calibrate, compute_scale_zero_point
from fewbit.qarray import HowToQuantize, QArray, quantize_with_scale_zero_point
from fewbit.training.paired import CHECKPOINT_NAME
from fewbit.training.reverse_only import differentiable_once, reverse_only, tangent_only

SUFFIX = "_amax_history"

_MSG_ONCE = (
    "Delayed scaling has first derivatives, in reverse mode: the history after a step comes out of "
    "jax.grad (or vjp, jacrev) beside the gradients, and would be lost in forward mode and in "
    "second derivatives (jax.jvp, linearize, jacfwd, hessian, grad of grad). Use 'absmax' in place "
    "of 'delayed' where these are taken."
)


def empty_history(length: int, layers: tuple[int, ...] = ()) -> jax.Array:
    """A history of no steps: all zero.

    >>> empty_history(4)
    Array([0., 0., 0., 0.], dtype=float32)
    """
    return jnp.zeros((*layers, length), jnp.float32)


def delayed_range(history: jax.Array) -> jax.Array:
    """(largest value remembered, 0) of each history; its derivative is the history one step later.

    >>> history = jnp.array([1.0, 3.0, 2.0])
    >>> delayed_range(history)
    Array([3., 0.], dtype=float32)
    >>> step = lambda history: seen(0.0, delayed_range(history), jnp.float32(5))
    >>> jax.grad(step)(history)
    Array([5., 1., 3.], dtype=float32)
    """
    return _range(reverse_only(history, _MSG_ONCE))


@jax.custom_vjp
def _range(history: jax.Array) -> jax.Array:
    largest = jnp.max(history, axis=-1)
    return jnp.stack([largest, jnp.zeros_like(largest)], axis=-1)


def _range_forward(history: jax.Array) -> Any:
    return _range(history), history


def _range_backward(history: jax.Array, cotangent: jax.Array) -> Any:
    amax, ran = cotangent[..., :1], cotangent[..., 1:]
    later = jnp.concatenate([amax.astype(history.dtype), history[..., :-1]], axis=-1)
    return (jnp.where(ran > 0, later, history),)  # what did not run remembers what it knew


_range.defvjp(_range_forward, _range_backward)


def seen(value: Any, ranges: Any, amax: Any) -> Any:
    """`value`; its derivative tells the ranges what the largest value of this step was.

    `ranges` and `amax` are trees of one form. Infinity and NaN are not remembered.

    >>> float(seen(1.0, jnp.zeros((2,)), jnp.float32(5)))
    1.0
    """
    return _seen(*reverse_only((value, ranges, amax), _MSG_ONCE))


@jax.custom_vjp
def _seen(value: Any, ranges: Any, amax: Any) -> Any:
    return value


def _seen_forward(value: Any, ranges: Any, amax: Any) -> Any:
    named = jax.tree.map(lambda a: checkpoint_name(a, CHECKPOINT_NAME), amax)
    return value, (named, jax.tree.map(tangent_only, value))


def _seen_backward(saved: Any, cotangent: Any) -> Any:
    amax, traces = saved
    cotangent = differentiable_once(cotangent, traces, _MSG_ONCE)
    return cotangent, jax.tree.map(range_cotangent, amax), jax.tree.map(jnp.zeros_like, amax)


_seen.defvjp(_seen_forward, _seen_backward)


def range_cotangent(amax: jax.Array) -> jax.Array:
    """What tells a range that a step had this largest value."""
    amax = jnp.where(jnp.isfinite(amax), amax, jnp.zeros_like(amax))
    return jnp.stack([amax, jnp.ones_like(amax)], axis=-1)


def two_uses(history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A history for two products; what each of them makes of it is merged by maximum, not added.

    >>> use = lambda history, amax: seen(0.0, delayed_range(history), jnp.float32(amax))
    >>> def step(history):
    ...     first, second = two_uses(history)
    ...     return use(first, 5) + use(second, 7)
    >>> jax.grad(step)(jnp.array([1.0, 3.0, 2.0]))
    Array([7., 1., 3.], dtype=float32)
    """
    return _two_uses(reverse_only(history, _MSG_ONCE))


@jax.custom_vjp
def _two_uses(history: jax.Array) -> tuple[jax.Array, jax.Array]:
    return history, history


_two_uses.defvjp(
    lambda history: ((history, history), None),
    lambda _, cotangents: (jnp.maximum(*cotangents),),
)


def anchored(value: Any, ranges: Any) -> Any:
    """`value`, which every range is now part of: whoever differentiates it reaches them all.

    A history that no gradient reaches would come back as zeros, and so be forgotten.
    """
    return _anchored(*reverse_only((value, ranges), _MSG_ONCE))


@jax.custom_vjp
def _anchored(value: Any, ranges: Any) -> Any:
    return value


_anchored.defvjp(
    lambda value, ranges: (value, ranges),
    lambda ranges, cotangent: (cotangent, jax.tree.map(jnp.zeros_like, ranges)),
)


def delayed_absmax(amax: jax.Array, largest: jax.Array) -> jax.Array:
    """What the scale of a step covers: what is remembered, of nothing what is there now.

    An array that is not finite has no range; its codes must not pass for numbers.

    >>> now = jnp.float32(5)
    >>> delayed_absmax(now, jnp.float32(3)), delayed_absmax(now, jnp.zeros(()))
    (Array(3., dtype=float32), Array(5., dtype=float32))
    """
    known = jnp.where(largest > 0, largest, amax)
    return jnp.where(jnp.isfinite(amax), known, jnp.array(jnp.nan, known.dtype))


def quantize_delayed(
    array: jax.Array, delayed: jax.Array, how: HowToQuantize
) -> tuple[QArray, jax.Array]:
    """An array quantized with the scale of the steps before, and its largest value of this one.

    `how` has no axes but those of layers, for each of which there is one range.

    >>> how = HowToQuantize(qtype='int8')
    >>> q, amax = quantize_delayed(jnp.array([1.0, 4.0]), jnp.array([255.0, 0]), how)
    >>> q.qvalue, amax
    (Array([0, 2], dtype=int8), Array(4., dtype=float32))
    """
    array = jax.lax.stop_gradient(array)
    delayed = jax.lax.stop_gradient(delayed)
    amax = calibrate(array, how)["absmax"].astype(jnp.float32)
    absmax = delayed_absmax(amax, delayed[..., 0].reshape(amax.shape))
    q = quantize_with_absmax(array, absmax, how)
    q = jax.tree.map(lambda part: checkpoint_name(part, CHECKPOINT_NAME), q)
    return q, amax.reshape(delayed.shape[:-1])


def quantize_with_absmax(array: jax.Array, absmax: jax.Array, how: HowToQuantize) -> QArray:
    """An array quantized with a symmetric range that is known already."""
    dtype = scale_type(array.dtype, how.scale_dtype)
    scale, _ = compute_scale_zero_point({"absmax": absmax}, how.qtype, dtype)
    return quantize_with_scale_zero_point(array, how.qtype, scale, noise_fn=how.noise_fn)


def ranges_of(histories: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The range of each history, by name."""
    return {name: delayed_range(history) for name, history in histories.items()}
