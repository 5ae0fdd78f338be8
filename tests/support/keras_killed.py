"""Keras models that are saved over and over until the process is killed (see killed.py).

All that is written tells a number: two files of one preset tell the same one.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from killed import say

import fewbit.keras

INT8 = fewbit.keras.DynamicQuantConfig("int8")


def numbered(variables, number):
    for variable in variables:
        variable.assign(np.full(variable.shape, number, "float32"))


def number_in(*variables):
    """The number that all of them hold, and nothing else."""
    (number,) = {float(x) for variable in variables for x in np.ravel(variable.value)}
    return int(number)


class File:
    """A file of half a megabyte."""

    job = "keras_killed:save"

    def __init__(self):
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024)])
        self.model = fewbit.keras.quantize_model(model, INT8, progress=False)
        self.told = [self.model.layers[0].bias]

    def save(self, path, number):
        numbered(self.told, number)
        self.model.save(path)

    def read(self, path):
        """The number in a file, which is whole."""
        fewbit.keras.check_saved(path)
        self.model.load_weights(path)
        return number_in(*self.told)

    def loaded(self, path):
        return number_in(keras.saving.load_model(path).layers[0].bias)


@keras.saving.register_keras_serializable("killed")
class Net(keras.Model):
    """What has presets without KerasHub, which takes long to import."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layer = keras.layers.Dense(1024)

    def call(self, inputs):
        return self.layer(inputs)

    def save_to_preset(self, folder):
        os.makedirs(folder)
        for name in ("model.weights.h5", "task.weights.h5"):
            self.save_weights(os.path.join(folder, name))


class Folder:
    """Two files, of a megabyte each."""

    job = "keras_killed:folder"

    def __init__(self):
        self.model = Net()
        self.model(np.zeros((1, 256), np.float32))
        self.told = [self.model.layer.bias]

    def save(self, path, number):
        numbered(self.told, number)
        fewbit.keras.save_to_preset(self.model, path)

    def read(self, path):
        found = []
        for name in ("model.weights.h5", "task.weights.h5"):
            self.model.load_weights(os.path.join(path, name))
            found.append(number_in(*self.told))
        (number,) = set(found)
        return number

    loaded = read


class Preset:
    """A classifier of KerasHub: a backbone, and a head of its own."""

    job = "keras_killed:preset"

    def __init__(self):
        import keras_hub

        backbone = keras_hub.models.ViTBackbone(
            **{"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 1, "num_heads": 2},
            **{"hidden_dim": 64, "mlp_dim": 128},
        )
        model = keras_hub.models.ViTImageClassifier(backbone, num_classes=512, preprocessor=None)
        rules = [fewbit.QuantizationRule(module_path=".*predictions", weight_qtype="int8")]
        self.model = fewbit.keras.quantize_model(model, rules, progress=False)

    @staticmethod
    def told(model):
        norms = [w for w in model.backbone.weights if w.name == "beta"]
        return [model.output_dense.bias, *norms]

    def save(self, path, number):
        numbered(self.told(self.model), number)
        self.model.save_to_preset(str(path))

    def read(self, path):
        fewbit.keras.check_saved(path)
        self.model.load_task_weights(os.path.join(path, "task.weights.h5"))
        self.model.backbone.load_weights(os.path.join(path, "model.weights.h5"))
        return number_in(*self.told(self.model))

    def loaded(self, path):
        import keras_hub

        found = keras_hub.models.ImageClassifier.from_preset(str(path))
        return number_in(*self.told(found))


def for_ever(what):
    def run(path, first):
        made = what()
        made.save(
            os.path.join(os.path.dirname(path), "aside.keras"), first
        )  # what is saved for the first time is proved, too
        say("ready")
        number = first
        while True:
            made.save(path, number)
            number = first + 1 - (number - first)

    return run


JOBS = {each.job.partition(":")[2]: for_ever(each) for each in (File, Folder, Preset)}
