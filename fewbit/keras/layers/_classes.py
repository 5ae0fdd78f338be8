"""The classes of quantized layers: `QStaticDense` is a Dense whose call is interpreted.

A user's layer becomes one by changing the class of the instance; no class of a library changes.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from fewbit.keras.generate._cache import faster_bases
from fewbit.keras.layers._lora import adapter_methods
from fewbit.keras.layers._program import LayerState, Regularized
from fewbit.keras.layers._variables import Stored, value_of
from fewbit.keras.saving import _whole
from fewbit.keras.saving._checking import check_weights
from fewbit.keras.saving._layer import (
    SHARED_NAME,
    Saveable,
    hub_name,
    let_hub_find,
    let_hub_find_all,
    methods,
    register,
)


class WholeModel:
    """`save` and `save_weights` leave the old file whole; `load_weights` looks at what it reads."""

    def save(
        self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Save the model as a `.keras` file: see `fewbit.keras.save_model`."""
        _whole.check_suffix(filepath)
        if _whole.is_writing() or not str(filepath).endswith(".keras") and zipped is not False:
            return super().save(filepath, overwrite, zipped, **kwargs)  # type: ignore[misc]
        return _whole.save_model(self, filepath, overwrite, zipped, **kwargs)

    def save_weights(
        self, filepath: Any, overwrite: bool = True, max_shard_size: Any = None
    ) -> None:
        """Save the weights as a `.weights.h5` file, which is whole or still the old one."""
        alone = max_shard_size is None and str(filepath).endswith(".weights.h5")
        if _whole.is_writing() or not alone or not _whole.is_local(filepath):
            return super().save_weights(filepath, overwrite, max_shard_size)  # type: ignore[misc]
        return _whole.save_weights(self, filepath, overwrite)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Load the weights of a file, after a look at what it is."""
        check_weights(filepath)
        try:
            return super().load_weights(filepath, *args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            error.add_note(f"This was {os.fspath(filepath)}.")
            raise


class WholePreset(WholeModel):
    """And `save_to_preset` leaves the old folder whole."""

    def save_to_preset(self, preset_dir: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model as a preset: see `fewbit.keras.save_to_preset`."""
        if _whole.is_writing() or not _whole.is_local(preset_dir):
            return super().save_to_preset(preset_dir, *args, **kwargs)  # type: ignore[misc]
        return _whole.save_to_preset(self, preset_dir, *args, **kwargs)


@functools.cache
def whole_bases(original: Any) -> tuple[type, ...]:
    """What stands before a class that saves itself; nothing for a layer.

    >>> whole_bases(keras.layers.Dense)
    ()
    """
    if not issubclass(original, keras.Model):
        return ()
    return (WholePreset,) if hasattr(original, "save_to_preset") else (WholeModel,)


# --- Scales of a quantized layer as its users know them, whatever form the kernels read -----------

T = TypeVar("T")


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
    return {name: _flat(scale) for name, scale in state.scales.items() if name.endswith(end)}


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


# --- The classes of quantized layers: `QStaticDense` is a Dense whose call is interpreted ---------

PREFIXES = dict(static="QStatic", dynamic="QDynamic", weight_only="QDynamic", training="QTrain")
_MSG_KERAS_QUANTIZE = (
    "{path} is quantized by fewbit ({rule}). Quantize the float model again instead of the "
    "quantized one: keras' own quantize('{mode}') would find no float kernel here."
)


class QuantizedLayer(Regularized, Saveable):
    """What quantized layers of every class have in common."""

    _fewbit: LayerState

    @property
    def w_scale(self) -> Any:
        """The scale of the quantized weight; by name where there are several."""
        return single(weight_scales(self._fewbit))

    @property
    def a_scale(self) -> Any:
        """The static scale of the input, if there is one; by name where there are several."""
        return single(activation_scales(self._fewbit, "_scale"))

    @property
    def a_zero_point(self) -> Any:
        """The static zero point of the input, if there is one; by name where there are several."""
        return single(activation_scales(self._fewbit, "_zero_point"))

    @property
    def dot_product_attention_enable(self) -> bool:
        """Whether attention may take Keras' fused operation."""
        return self._fewbit.settings.get("fused") is not False

    def quantize(self, mode: Any = None, *args: Any, **kwargs: Any) -> None:
        state = self._fewbit
        raise ValueError(_MSG_KERAS_QUANTIZE.format(path=state.path, rule=state.rule, mode=mode))


# A class is a key, which the type of `functools.cache` does not say.
_once: Callable[[T], T] = functools.cache  # type: ignore[assignment]


def run_by_fewbit(original: Any) -> Callable[..., Any]:
    """The `call` of a subclass of `original` whose instances leave it to their `_fewbit`."""

    @functools.wraps(original.call)
    def call(self, *args, **kwargs):
        return self._fewbit.run(self, args, kwargs)

    return call


@_once
def quantized_class(original: Any, kind: str) -> type[keras.Layer]:
    """The class of a quantized `original`; one per class and kind."""
    name = PREFIXES[kind] + original.__name__
    namespace = {
        "call": run_by_fewbit(original),
        "_fewbit_original": original,
        "__module__": __name__,
        "__doc__": f"A {original.__name__} whose products run on few bits.",
        **methods(original),
        **adapter_methods(original),
    }
    made = type(name, (QuantizedLayer, *whole_bases(original), original), namespace)
    register(made)
    return made


class QuantizedHolder(Saveable):
    """A layer or model that holds quantized ones which its own config does not tell of."""


@_once
def holder_class(original: Any) -> type[keras.Layer]:
    """The class of an `original` that holds quantized layers: it saves them, and may be faster."""
    namespace = {
        "_fewbit_original": original,
        "__module__": __name__,
        "__doc__": f"A {original.__name__} that holds quantized layers.",
        **methods(original),
    }
    bases = (QuantizedHolder, *whole_bases(original), *faster_bases(original), original)
    made = type(f"Quantized{original.__name__}", bases, namespace)
    name = hub_name(original)
    register(made, name or SHARED_NAME)
    if name:
        let_hub_find(original.__name__)
    return made


def is_quantized(layer: Any) -> bool:
    """Whether fewbit made this layer quantized."""
    return isinstance(layer, QuantizedLayer)


def become(layer: keras.Layer, state: LayerState) -> None:
    """Make the instance a quantized one, in place."""
    original: Any = type(layer)
    layer.__class__ = quantized_class(original, state.kind)
    vars(layer).pop("quantize", None)  # Keras wraps the float class's, on every instance
    layer._fewbit = state


def let_keras_find() -> None:
    """Let Keras make quantized layers and models out of configs, in a process that made none."""
    keras.saving.get_custom_objects().update({f"fewbit>{SHARED_NAME}": QuantizedLayer})
    let_hub_find_all()
