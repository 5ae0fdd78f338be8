"""Noise that turns rounding into stochastic rounding, from an explicit key.

A value in units of its scale plus noise in [-0.5, 0.5) rounds up with the probability of its
fraction, so the rounded value is right on average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import nearest
from fewbit.rules import check_axes

_MSG_METHOD = (
    "{method!r} is not a way to round stochastically.{near} It is one of {known}, or None to round "
    "to nearest."
)
_MSG_AXES = (
    "channelwise_noise_axes={axes} are no axes of a gradient of shape {shape}: all its values "
    "would share one number. Write axes that it has, or None for noise of every value's own."
)
_MSG_KEY = (
    "Stochastic rounding ({method!r}) needs a key, got None. Pass one that differs from step to "
    "step, such as jax.random.fold_in(jax.random.key(0), step)."
)


def uniform_noise(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Noise in [-0.5, 0.5) with 23 random bits.

    >>> noise = uniform_noise(jax.random.key(0), (1000,))
    >>> bool(noise.min() >= -0.5), bool(noise.max() < 0.5), noise.dtype
    (True, True, dtype('float32'))
    """
    return jax.random.uniform(key, tuple(shape), jnp.float32) - 0.5


def low_bit_uniform_noise(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Noise of 256 evenly spaced values from -0.5 + 1/512 to 0.5 - 1/512: 8 random bits each.

    >>> noise = low_bit_uniform_noise(jax.random.key(0), (1000,))
    >>> bool(abs(noise).max() <= 0.5 - 1 / 512), bool((noise * 512 % 2 == 1).all())
    (True, True)
    """
    bits = jax.random.bits(key, tuple(shape), jnp.uint8)
    return (bits.astype(jnp.float32) - 127.5) / 256


METHODS: dict[str, Callable[[jax.Array, Sequence[int]], jax.Array]] = {
    "uniform": uniform_noise,
    "low_bit_uniform": low_bit_uniform_noise,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoiseFn:
    """A function from a shape to noise that broadcasts to it; a pytree whose one leaf is the key.

    The noise differs along `channelwise_noise_axes` and is shared along all others; None means
    that every value has its own.

    >>> NoiseFn(jax.random.key(0), 'uniform', (0,))((8, 4)).shape
    (8, 1)
    """

    key: jax.Array
    method: str = dataclasses.field(default="uniform", metadata=dict(static=True))
    channelwise_noise_axes: tuple[int, ...] | None = dataclasses.field(
        default=(0,), metadata=dict(static=True)
    )

    def __call__(self, shape: Sequence[int]) -> jax.Array:
        own = self.channelwise_noise_axes
        if own is not None:
            axes = {axis % len(shape) for axis in own if -len(shape) <= axis < len(shape)}
            if own and shape and not axes:
                raise ValueError(_MSG_AXES.format(axes=own, shape=tuple(shape)))
            shape = [size if axis in axes else 1 for axis, size in enumerate(shape)]
        return METHODS[self.method](self.key, shape)

    def fold_in(self, number: Any) -> NoiseFn:
        """The same with an independent key: for another gradient, Site or step.

        >>> noise = NoiseFn(jax.random.key(0))
        >>> bool((noise.fold_in(1)((4,)) == noise((4,))).any())
        False
        """
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, number))


def get_noise_fn(
    method: str | None, key: jax.Array | None, channelwise_noise_axes: Sequence[int] | None = (0,)
) -> NoiseFn | None:
    """The noise function of a method: 'uniform' or 'low_bit_uniform'; None gives None.

    >>> get_noise_fn('low_bit_uniform', jax.random.key(0), (0, 1))((2, 3)).shape
    (2, 3)
    """
    if method is None:
        return None
    if method not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ValueError(
            _MSG_METHOD.format(method=method, near=nearest(method, METHODS), known=known)
        )
    if key is None:
        raise ValueError(_MSG_KEY.format(method=method))
    axes = channelwise_noise_axes
    if axes is not None:
        axes = check_axes("get_noise_fn", "channelwise_noise_axes", axes)
    return NoiseFn(key, method, axes)
