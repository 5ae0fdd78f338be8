"""A first look: quantize a small Keras model statically and see what changed.

python examples/keras/helloworld.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import fewbit
import fewbit.keras

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(8),
    ]
)
samples = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
before = model.predict(samples, verbose=0)

config = fewbit.keras.StaticQuantConfig(weight_dtype="fp8_e4m3", activation_dtype="fp8_e4m3")
print(fewbit.plan(model, config))  # nothing has happened yet

model = fewbit.keras.quantize_model(model, config, lambda model: model.predict(samples, verbose=0))
after = model.predict(samples, verbose=0)

print()
fewbit.keras.print_model(model)
print()
print(fewbit.report(model).summary)
print("float:    ", before[0, :4])
print("quantized:", after[0, :4])
error = np.linalg.norm(after - before) / np.linalg.norm(before)
print(f"relative error: {error:.4f}")
