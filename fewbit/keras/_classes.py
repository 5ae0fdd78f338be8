"""The classes of quantized layers: `QStaticDense` is a Dense whose call is interpreted.

A user's layer becomes one by changing the class of the instance; no class of a library changes.
"""

import functools
from typing import Any

import keras

from fewbit.keras._generation import faster_bases
from fewbit.keras._lora import adapter_methods
from fewbit.keras._losses import Regularized
from fewbit.keras._scale_views import activation_scales, single, weight_scales
from fewbit.keras._serial_hub import hub_name, let_hub_find, let_hub_find_all
from fewbit.keras._serial_layer import SHARED_NAME, Saveable, methods, register
from fewbit.keras._state import LayerState
from fewbit.keras._whole_models import whole_bases

PREFIXES = {
    "static": "QStatic",
    "dynamic": "QDynamic",
    "weight_only": "QDynamic",
    "training": "QTrain",
}
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


def quantized_class(original: Any, kind: str) -> type[keras.Layer]:
    """The class of a quantized `original`; one per class and kind."""
    return _quantized_class(original, kind)


@functools.cache
def _quantized_class(original: Any, kind: str) -> type[keras.Layer]:

    @functools.wraps(original.call)
    def call(self, *args, **kwargs):
        return self._fewbit.run(self, args, kwargs)

    name = PREFIXES[kind] + original.__name__
    namespace = {
        "call": call,
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


def holder_class(original: Any) -> type[keras.Layer]:
    """The class of an `original` that holds quantized layers: it saves them, and may be faster."""
    return _holder_class(original)


@functools.cache
def _holder_class(original: Any) -> type[keras.Layer]:
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
