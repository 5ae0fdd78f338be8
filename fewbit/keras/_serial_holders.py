"""Which layers must tell, when they are saved, of the quantized ones inside them."""

import keras

from fewbit.keras._classes import holder_class, is_quantized
from fewbit.keras._serial_tree import places


def make_saveable(model: keras.Layer) -> None:
    """Let every model, and every layer whose config may not show its quantized sublayers, tell.

    The config of a Functional or Sequential model shows all of them; but only a class of ours can
    check, once it is loaded, that there is something to train.
    """
    for layer in [*reversed(places(model).values()), model]:
        if hasattr(layer, "_fewbit_original"):
            continue
        inside = [child for child in places(layer).values() if is_quantized(child)]
        if inside:
            layer.__class__ = holder_class(type(layer))
