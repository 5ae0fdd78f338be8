"""A small Keras model that trains with ranges or histories, here and in a process of its own."""

import sys

import keras
import numpy as np

import fewbit
import fewbit.keras
from fewbit import QtProvider, QtRule

STATIC = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", act_static_scale=True)
DELAYED = QtRule(
    weight_qtype="float8_e4m3fn",
    act_qtype="float8_e4m3fn",
    bwd_qtype="float8_e5m2",
    weight_calibration_method="delayed,4",
    act_calibration_method="delayed,4",
    bwd_calibration_method="delayed,4",
)
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = np.tanh(X[:, :2] - X[:, 2:4])
BATCHES = [slice(k, k + 8) for k in range(0, 32, 8)]


def net(rule, optimizer=None, **compiled):
    """Two layers that train quantized; the second sees what the first makes."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name="one"), keras.layers.Dense(2, name="two")]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model = fewbit.quantize_model(model, QtProvider([rule]))
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


def fit(model, epochs=1):
    history = model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"]


def remembered(layer):
    """What a layer keeps of its steps, by name."""
    return {v.name: np.asarray(v.value) for v in layer._fewbit.remembered.variables.values()}


def main(path, out):
    """Load a model, train it on, convert it; write what it is then."""
    model = keras.saving.load_model(path)
    losses = fit(model, 2)
    kept = {f"{k.name}.{n}": v for k in model.layers for n, v in remembered(k).items()}
    trained = model.predict(X, verbose=0)
    served = fewbit.to_ptq(model, progress=False).predict(X, verbose=0)
    np.savez(out, losses=losses, trained=trained, served=served, **kept)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        main(path, path + ".npz")
