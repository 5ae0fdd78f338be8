"""Keras 3 models on the JAX backend, quantized layer by layer."""

from fewbit.keras._classes import let_keras_find as _let_keras_find

_let_keras_find()
