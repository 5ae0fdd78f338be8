"""Scales of a quantized layer as its users know them, whatever form the kernels read.

One number per tensor, one per channel with the weight's rank, one per tensor for activations.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from fewbit.keras._state import LayerState
from fewbit.keras._variables import Stored, value_of


class ScaleView:
    """A scale to read: `value` is what it is now, in the shape that users know.

    >>> view = ScaleView(lambda: jnp.ones((1, 4)))
    >>> view, view.shape, float(view.value.sum())
    (ScaleView([[1. 1. 1. 1.]]), (1, 4), 4.0)
    """

    def __init__(self, read: Callable[[], jax.Array]):
        self._read = read

    @property
    def value(self) -> jax.Array:
        """The scale now."""
        return self._read()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `value`."""
        return self.value.shape

    @property
    def dtype(self) -> str:
        """The name of the type of `value`, as of a Keras variable."""
        return str(self.value.dtype)

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array."""
        return np.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        return f"ScaleView({self.numpy()})"


def weight_scales(state: LayerState) -> dict[str, Any]:
    """The scale of each quantized variable: a view, or an array where it is a constant."""
    return {name: _weight_scale(state, stored) for name, stored in state.stored.items()}


def activation_scales(state: LayerState, end: str) -> dict[str, Any]:
    """The static scales (`end` '_scale') or zero points ('_zero_point') by operand."""
    return {
        name: _flat(scale) for name, scale in state.scales.items() if name.endswith(end)
    }  # fmt: skip


def single(found: dict[str, Any]) -> Any:
    """The value where there is one, None where there is none, else all by name."""
    return next(iter(found.values())) if len(found) == 1 else found or None


def _weight_scale(state: LayerState, stored: Stored) -> Any:
    per_tensor = state.settings.get("granularity") == "per_tensor"

    def read() -> jax.Array:
        scale = jnp.asarray(stored.value().array.scale)
        return scale[(slice(1),) * scale.ndim] if per_tensor else scale

    variables = any(isinstance(part, keras.Variable) for part in stored.parts)
    return ScaleView(read) if variables else read()


def _flat(scale: Any) -> Any:
    def read() -> jax.Array:
        value = jnp.asarray(value_of(scale))
        return value.reshape(1) if value.size == 1 else value

    return ScaleView(read) if isinstance(scale, keras.Variable) else read()
