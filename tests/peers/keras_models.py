"""A Keras model that fewbit and Intel Neural Compressor both quantize. Imports neither.

Its branches have nothing to do with each other, so that each output tells of one kind of layer.
"""

import json

import keras
import numpy as np
from keras import layers
from peers.cases import numbers

# Branch: the shape of its input, without the batch.
SHAPES = {"dense": (32,), "einsum": (5, 32), "convolution": (9, 9, 8), "attention": (7, 32)}
BATCH, CALIBRATION_BATCHES = 6, 2

# name: (class of the config, its fields)
RECIPES = {
    "static fp8": ("StaticQuantConfig", {}),
    "static int8": ("StaticQuantConfig", {"weight_dtype": "int8", "activation_dtype": "int8"}),
    "dynamic fp8": ("DynamicQuantConfig", {}),
    "dynamic int8 per channel": (
        "DynamicQuantConfig",
        {
            "weight_dtype": "int8",
            "activation_dtype": "int8",
            "weight_scale_granularity": "per_channel",
        },
    ),
}

# Fields that both know, for the files of configs.
CONFIGS = {
    "fields": (
        "StaticQuantConfig",
        {
            "weight_dtype": "fp8_e4m3",
            "activation_dtype": "fp8_e5m2",
            "const_scale": True,
            "const_weight": True,
            "weight_scale_granularity": "per_channel",
            "dot_product_attention_enable": True,
        },
    ),
    "lists": (
        "DynamicQuantConfig",
        {"white_list": [layers.Dense, "EinsumDense", "block/.*"], "exclude_list": ["head$"]},
    ),
}


def built():
    """The model, with weights that do not depend on Keras or its version."""
    inputs = {name: keras.Input(shape, name=name) for name, shape in SHAPES.items()}
    x = inputs["attention"]
    outputs = {
        "dense": layers.Dense(48, activation="relu", name="up")(inputs["dense"]),
        "einsum": layers.EinsumDense("abc,cde->abde", (None, 4, 16), bias_axes="de", name="split")(
            inputs["einsum"]
        ),
        "convolution": layers.Conv2D(16, 3, strides=2, padding="same", name="patch")(
            inputs["convolution"]
        ),
        "attention": layers.MultiHeadAttention(4, 8, name="heads")(x, x, x),
    }
    model = keras.Model(inputs, outputs, name="branches")
    for i, weight in enumerate(model.weights):
        factor = 1 / np.sqrt(max(1, np.prod(weight.shape[:-1])))
        weight.assign(numbers(weight.shape, 300 + i, factor=float(factor)))
    return model


def batch(seed):
    """Numbers on both sides of zero, more of them above."""
    return {
        name: np.asarray(numbers((BATCH, *shape), seed + i, offset=0.5))
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def calibrate(model):
    for seed in range(CALIBRATION_BATCHES):
        model(batch(400 + 10 * seed))


def quantized(library, recipe, **more):
    """The model quantized by the lines that people write, and its outputs."""
    name, fields = RECIPES[recipe]
    config = getattr(library, name)(**fields, **more)
    model = built()
    if name == "StaticQuantConfig":
        model = library.quantize_model(model, config, calibrate)
    else:
        model = library.quantize_model(model, config)
    return model, {name: np.asarray(y) for name, y in model(batch(500)).items()}


def each_layer(model):
    """{path, or name where there is none: layer}, those inside of others too."""
    return {layer.path or layer.name: layer for layer in model._flatten_layers(include_self=False)}


def config_texts(library):
    """{name: JSON} of configs as the library writes them, a sum of two among them."""
    made = {name: getattr(library, cls)(**fields) for name, (cls, fields) in CONFIGS.items()}
    made["sum"] = made["fields"] + library.DynamicQuantConfig(white_list=["Conv2D"])
    return {name: json.dumps(config.to_dict()) for name, config in made.items()}
