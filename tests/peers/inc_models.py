"""What Intel Neural Compressor makes of `keras_models.built()`. Runs where the peers are installed.

cd tests && python -m peers.inc_models <where to write the .npz>
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
from neural_compressor import jax as inc
from peers import cases, keras_models


def value_of(layer, name):
    """A variable's value, or a constant; None if there is none."""
    value = getattr(layer, name, None)
    return None if value is None else np.asarray(getattr(value, "value", value), np.float32)


def answer(answers, recipe):
    quantized, outputs = keras_models.quantized(inc, recipe)
    for branch, output in outputs.items():
        answers.put(f"{recipe}/outputs/{branch}", output)
    for path, layer in keras_models.each_layer(quantized).items():
        answers.say(f"{recipe}/class/{path}", type(layer).__name__)
        values = {name: value_of(layer, name) for name in ("a_scale", "a_zero_point", "w_scale")}
        kernel = value_of(layer, "_kernel_quant")
        if kernel is not None:
            values["kernel"] = kernel * values["w_scale"]
        for name, value in values.items():
            if value is not None:
                answers.put(f"{recipe}/layers/{path}/{name}", value)


if __name__ == "__main__":
    answers = cases.Results()
    for recipe in keras_models.RECIPES:
        answer(answers, recipe)
    for name, text in keras_models.config_texts(inc).items():
        answers.say(f"config/{name}", text)
    answers.save(sys.argv[1])
