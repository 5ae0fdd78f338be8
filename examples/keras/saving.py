"""Save a quantized model with Keras' own calls and load it again, exact to the bit.

python examples/keras/saving.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import pathlib
import tempfile

import keras
import numpy as np

import fewbit.keras  # all that loading needs

keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((16, 16, 3)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1024, activation="relu"),
        layers.Dense(1024, activation="relu"),
        layers.Dense(10),
    ]
)
pictures = np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype("float32")

with tempfile.TemporaryDirectory() as folder:
    plain, small = (pathlib.Path(folder) / name for name in ("float.keras", "int4.keras"))
    model.save(plain)
    config = fewbit.keras.DynamicQuantConfig(weight_dtype="int4", group_size=32)
    model = fewbit.keras.quantize_model(model, config)
    model.save(small)
    loaded = keras.saving.load_model(small)
    print(f"float32 {plain.stat().st_size:,} bytes, int4 {small.stat().st_size:,} bytes")

same = np.array_equal(model.predict(pictures, verbose=0), loaded.predict(pictures, verbose=0))
print(f"loaded {type(loaded).__name__} with {[type(layer).__name__ for layer in loaded.layers]}")
print("the same outputs to the bit:", same)
