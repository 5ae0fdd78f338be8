"""Keras' legacy HDF5 files of whole models, which cannot hold quantized layers: refused.

`keras.saving.save_model(model, 'm.h5')` opens the file and asks the model for its config; that is
the first that a model hears of it, and the config says by its form what it is for.
"""

import functools

import keras

_MSG_LEGACY = (
    "{name} is quantized, and Keras' legacy HDF5 format cannot hold quantized layers: no model is "
    "in the file that Keras has just opened. Save it as model.save('model.keras'), or its weights "
    "alone as model.save_weights('model.weights.h5')."
)


def refuse_legacy(name: str) -> None:
    """Raise while Keras asks for configs in the form of its legacy files."""
    if "module" not in _probe().get_config()["layers"][0]:
        raise ValueError(_MSG_LEGACY.format(name=name))


@functools.cache
def _probe() -> keras.Sequential:
    """A model whose config has the form that Keras is asking for: legacy ones name no modules."""
    return keras.Sequential([keras.layers.Identity(name="fewbit_form")], name="fewbit_probe")
