"""Keras 3 models on the JAX backend, quantized layer by layer."""

from fewbit.keras._classes import let_keras_find as _let_keras_find
from fewbit.keras._saving import save_model as save_model
from fewbit.keras._saving import save_to_preset as save_to_preset

_let_keras_find()
