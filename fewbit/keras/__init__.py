"""Keras 3 models on the JAX backend, quantized layer by layer."""
