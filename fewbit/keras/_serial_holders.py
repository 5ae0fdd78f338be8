"""Which layers must tell, when they are saved, of the quantized ones inside them."""

from typing import Any

import keras

from fewbit.keras._classes import holder_class, is_quantized
from fewbit.keras._serial_tree import places


def make_saveable(model: keras.Layer) -> None:
    """Let every layer whose config may not show its quantized sublayers record them itself.

    Functional and Sequential models, and tasks of KerasHub with nothing quantized beside their
    backbone, show all of them and stay as they are.
    """
    for layer in [*reversed(places(model).values()), model]:
        if hasattr(layer, "_fewbit_original"):
            continue
        shown = {id(child) for child in _shown(layer)}
        inside = [child for child in places(layer).values() if is_quantized(child)]
        if any(id(child) not in shown for child in inside):
            layer.__class__ = holder_class(type(layer))


def _shown(layer: Any) -> list[keras.Layer]:
    """The layers that the config of a layer is known to tell of.

    Told by its class: asking for a config makes Keras import TensorFlow where that is installed.
    """
    module, _, _ = type(layer).__module__.partition(".")
    if module == "keras" and type(layer).__name__ in ("Functional", "Sequential"):
        return list(places(layer).values())
    backbone = getattr(layer, "backbone", None)
    if module == "keras_hub" and isinstance(backbone, keras.Model):
        return [backbone, *places(backbone).values()]
    return []
