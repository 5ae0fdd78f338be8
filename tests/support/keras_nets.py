"""What the tests of quantized Keras models share: small nets, and how to quantize and compare."""

import warnings

import keras
import numpy as np
from keras import layers

import fewbit.keras
from fewbit.keras import DynamicQuantConfig, StaticQuantConfig

WEIGHT_ONLY = {"activation_dtype": None}
# A config of each kind of arithmetic.
KINDS = {
    "dynamic int8": DynamicQuantConfig("int8"),
    "dynamic fp8": DynamicQuantConfig(),
    "static int8": StaticQuantConfig("int8"),
    "static fp8": StaticQuantConfig(),
    "emulated dynamic int8": DynamicQuantConfig("int8", emulate=True),
    "emulated dynamic fp8": DynamicQuantConfig(emulate=True),
    "emulated static int8": StaticQuantConfig("int8", emulate=True),
    "emulated static fp8": StaticQuantConfig(emulate=True),
    "weight-only int4": DynamicQuantConfig("int4", group_size=32, **WEIGHT_ONLY),
}
# The quick tests run these; the others are of the same code.
QUICK_KINDS = ("dynamic int8", "static fp8", "emulated static int8", "weight-only int4")
# Largest error as a fraction of the largest output, of a net of two layers.
TOLERANCE = {"int8": 0.03, "fp8": 0.12, "int4": 0.25}


def tolerance(kind):
    return TOLERANCE[kind.split()[-1]]


def sample(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def two_layers(**kwargs):
    return keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(64, activation="relu", name="up", **kwargs),
            layers.Dense(32, name="down", **kwargs),
        ],
        name="net",
    )


def quantized(model, config, x=None, **kwargs):
    run = None if x is None else (lambda model: model(x))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The calibration data was not used")  # of some configs
        return fewbit.keras.quantize_model(model, config, run, progress=False, **kwargs)


def class_names(model):
    """The classes of layers that have variables, in order."""
    found = model._flatten_layers(include_self=False)
    return [
        type(layer).__name__
        for layer in found
        if layer._trainable_variables or layer._non_trainable_variables
    ]


def error_of(y, wanted):
    """The largest error as a fraction of the largest value."""
    y, wanted = (np.asarray(array, dtype="float64") for array in (y, wanted))
    return np.abs(y - wanted).max() / np.abs(wanted).max()
