"""Which layers must tell, when they are saved, of the quantized ones inside them."""

import warnings
from typing import Any

import keras

from fewbit.keras._classes import holder_class, is_quantized
from fewbit.keras._serial_config import recorded
from fewbit.keras._serial_tree import places


def make_saveable(model: keras.Layer) -> None:
    """Let every layer whose config does not show its quantized sublayers record them itself.

    Functional and Sequential models, and tasks of KerasHub with nothing quantized beside their
    backbone, show all of them and stay as they are.
    """
    for layer in [*reversed(places(model).values()), model]:
        inside = sum(is_quantized(child) for child in places(layer).values())
        if inside and not hasattr(layer, "_fewbit_original") and _shown(layer) < inside:
            layer.__class__ = holder_class(type(layer))


def _shown(layer: Any) -> float:
    """How many quantized layers the config of a layer tells of."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says what it has to say when the user saves
            return recorded(keras.saving.serialize_keras_object(layer))
    except (NotImplementedError, TypeError, ValueError):
        return float("inf")  # it cannot be saved whole, and says so itself then
