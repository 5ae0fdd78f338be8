"""Scripts as the documentation of Neural Compressor's JAX backend has them run as they are.

Models, presets and pictures are small and made here: no hub can be reached.
"""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from neural_compressor_away import installed as installed

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What libraries that scripts use warn about is theirs to mend.
pytestmark = pytest.mark.filterwarnings("default")

# Saving one needs its class registered, and nothing else.
HELLO = """
import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import jax.numpy as jnp
import keras

from neural_compressor.jax import StaticQuantConfig, quantize_model


@keras.saving.register_keras_serializable(package="EXAMPLE", name=None)
class Hello(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dense1 = keras.layers.Dense(10, activation="linear")
        self.dense2 = keras.layers.Dense(1, activation="linear")

    def call(self, inputs):
        return self.dense2(self.dense1(inputs))


def print_layers(title, model):
    print(title, [type(layer).__name__ for layer in model._flatten_layers()])


def calib_function(model):
    model(jnp.zeros((1, 32)))
    model(15 * jnp.ones((1, 32)))


if __name__ == "__main__":
    keras.utils.set_random_seed(473)
    model = Hello()
    data = 5 * jax.random.normal(jax.random.PRNGKey(0), (1, 32))
    print("before:", float(model(data)[0, 0]))
    print_layers("float", model)
    config = StaticQuantConfig(weight_dtype="fp8_e4m3", activation_dtype="fp8_e4m3")
    q_model = quantize_model(model, config, calib_function)
    print_layers("quantized", q_model)
    after = q_model(data)
    print("after:", float(after[0, 0]))
    keras.models.save_model(q_model, "./qmodel.keras")
    loaded = keras.models.load_model("./qmodel.keras")
    print_layers("loaded", loaded)
    print("config:", q_model._quant_config)
    print("loaded config:", loaded._quant_config)
    print("match:", jnp.allclose(after, loaded(data)))
"""
CONFIGS = """
import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import jax
import keras

from neural_compressor.jax import (
    DynamicQuantConfig, JaxBaseConfig, StaticQuantConfig, quantize_model,
)


class Four(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sizes = {"dense1": 6, "dense2": 4, "dense3": 4, "dense4": 2}
        self.parts = [keras.layers.Dense(size, name=name) for name, size in sizes.items()]

    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def calib_function(model):
    model(10 * jax.random.normal(jax.random.PRNGKey(1), (1, 32)))


def show(title, model):
    classes = {layer.name: type(layer).__name__ for layer in model.parts}
    print(title, classes, model(data).shape)


parser = argparse.ArgumentParser()
parser.add_argument("--quant_config_file", required=True)
args = parser.parse_args()
keras.utils.set_random_seed(473)
model = Four()
data = 5 * jax.random.normal(jax.random.PRNGKey(0), (1, 32))
model(data)

fields = dict(
    weight_dtype="fp8_e4m3", activation_dtype="fp8_e4m3", const_scale=True, const_weight=True,
    weight_scale_granularity="per_tensor", dot_product_attention_enable=False,
)
static = StaticQuantConfig(**fields)
show("static", quantize_model(model, static, calib_function, inplace=False))
dynamic = DynamicQuantConfig(**fields)
show("dynamic", quantize_model(model, dynamic, inplace=False))
first = StaticQuantConfig(**fields, white_list=["dense.*"], exclude_list=["dense3"])
second = DynamicQuantConfig(
    weight_dtype="fp8_e5m2", activation_dtype="fp8_e5m2", white_list=["dense3", "dense4"]
)
show("sum", quantize_model(model, first + second, calib_function, inplace=False))
config = JaxBaseConfig.from_json_file(args.quant_config_file)
show("file", quantize_model(model, config, calib_function, inplace=True))
"""
GEMMA = """
import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

from keras_hub.models import Gemma3CausalLM
from neural_compressor.jax import DynamicQuantConfig, quantize_model
from neural_compressor.jax.utils.utility import print_model

parser = argparse.ArgumentParser("Quantize and use Gemma3CausalLM model")
parser.add_argument("-p", "--precision", default="fp8_e4m3", choices=["fp8_e4m3", "fp8_e5m2"])
parser.add_argument("-m", "--model_path", default="gemma3_instruct_270m")
args = parser.parse_args()
gemma_lm = Gemma3CausalLM.from_preset(args.model_path)
print_model(gemma_lm)
prompt = {"prompts": "Describe the city of Rome"}
print("before:", repr(gemma_lm.generate(prompt, max_length=40)))
config = DynamicQuantConfig(weight_dtype=args.precision, activation_dtype=args.precision)
gemma_lm = quantize_model(gemma_lm, config)
print_model(gemma_lm)
print("after:", repr(gemma_lm.generate(prompt, max_length=40)))
"""
GEMMA_PREPARE = """
import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

from keras_hub.models import Gemma3CausalLM
from neural_compressor.jax import quantize_model, StaticQuantConfig

parser = argparse.ArgumentParser("Quantize and run Gemma3CausalLM model")
parser.add_argument("-p", "--precision", default="fp8_e4m3", type=str)
parser.add_argument("-m", "--model_path", default="gemma3_instruct_270m", type=str)
parser.add_argument("-q", "--quantized_path", required=True, type=str)
args = parser.parse_args()
gemma_lm = Gemma3CausalLM.from_preset(args.model_path)
gemma_lm.summary()
config = StaticQuantConfig(weight_dtype=args.precision, activation_dtype=args.precision)


def calib_function(model):
    model.generate({"prompts": "Describe the city of Rome"}, max_length=40)
    model.generate({"prompts": "What is a monkey?"}, max_length=40)


gemma_lm = quantize_model(gemma_lm, config, calib_function)
gemma_lm.summary()
gemma_lm.save_to_preset(args.quantized_path)
print("output:", repr(gemma_lm.generate({"prompts": "Who are you?"}, max_length=40)))
"""
GEMMA_USE = """
import os

os.environ["KERAS_BACKEND"] = "jax"

from keras_hub.models import Gemma3CausalLM
import argparse
import neural_compressor.jax  # all that loading needs

parser = argparse.ArgumentParser("Run statically quantized Gemma3CausalLM model")
parser.add_argument("-q", "--quantized_path", required=True, type=str)
args = parser.parse_args()
gemma_lm = Gemma3CausalLM.from_preset(args.quantized_path)
gemma_lm.summary()
print("config:", gemma_lm._quant_config)
print("output:", repr(gemma_lm.generate({"prompts": "Who are you?"}, max_length=40)))
"""
PICTURE = """
import numpy as np
import tensorflow as tf


def load_image(path):
    img = tf.io.read_file(path)
    img = tf.image.decode_jpeg(img, channels=3)
    img = tf.image.resize(img, [64, 64], method=tf.image.ResizeMethod.BILINEAR)
    return tf.cast(img, tf.uint8)


def print_predictions(title, preds):
    print(title, np.argsort(preds[0])[::-1][:4].tolist(), preds[0, :4].tolist())


img = tf.expand_dims(load_image("./beach.jpg"), axis=0)
"""
VIT = f"""
import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import keras
from keras_hub.models import ViTImageClassifier
from neural_compressor.jax import quantize_model, StaticQuantConfig
from neural_compressor.jax.utils.utility import print_model

parser = argparse.ArgumentParser("Quantize, use and save ViT model")
parser.add_argument("-p", "--precision", default="fp8_e4m3", type=str)
parser.add_argument("-m", "--model_path", default="vit.keras", type=str)
parser.add_argument("-q", "--quantized_path", required=True, type=str)
args = parser.parse_args()
{PICTURE}
vit_model = keras.models.load_model(args.model_path)
print_model(vit_model)
print_predictions("before:", vit_model.predict(img))
config = StaticQuantConfig(weight_dtype=args.precision, activation_dtype=args.precision)


def calib_function(model):
    model.predict(img)


vit_model = quantize_model(vit_model, config, calib_function)
print_model(vit_model)
vit_model.summary()
print_predictions("output:", vit_model.predict(img))
if args.quantized_path.endswith(".keras"):
    keras.models.save_model(vit_model, args.quantized_path)
else:
    vit_model.save_to_preset(args.quantized_path)
"""
VIT_USE = f"""
import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import keras
import neural_compressor.jax.quantization  # all that loading needs
from keras_hub.models import ViTImageClassifier

parser = argparse.ArgumentParser("Run statically quantized ViT model")
parser.add_argument("-q", "--quantized_path", required=True, type=str)
args = parser.parse_args()
{PICTURE}
if args.quantized_path.endswith(".keras"):
    vit_model = keras.models.load_model(args.quantized_path)
else:
    vit_model = ViTImageClassifier.from_preset(args.quantized_path)
vit_model.summary()
print_predictions("output:", vit_model.predict(img))
"""
SCRIPTS = {
    **{"hello.py": HELLO, "configs.py": CONFIGS, "gemma.py": GEMMA, "vit.py": VIT},
    **{"gemma_prepare.py": GEMMA_PREPARE, "gemma_use.py": GEMMA_USE, "vit_use.py": VIT_USE},
}


def written(kind, dtype, names):
    fields = {"weight_dtype": dtype, "activation_dtype": dtype, "white_list": names}
    return {"quantization_type": kind, "config": fields}


FIRST = written("dynamic_quant", "fp8_e4m3", ["dense1", "dense2"])
FILES = {
    "dynamic": FIRST,
    "static": written("static_quant", "int8", ["Dense"]),
    "composable": {
        "quantization_type": "composable",
        "configs": [FIRST, written("static_quant", "int8", ["dense3", "dense4"])],
    },
}
MADE = {
    "dynamic": ["QDynamicDense", "QDynamicDense", "Dense", "Dense"],
    "static": ["QStaticDense"] * 4,
    "composable": ["QDynamicDense", "QDynamicDense", "QStaticDense", "QStaticDense"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    for name, fields in FILES.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def gemma(folder):
    from keras_models import random_gemma3

    model = random_gemma3("tiny", sequence_length=48, num_layers=1)
    model.save_to_preset(str(folder / "gemma"))
    return "gemma"


@pytest.fixture(scope="module")
def vit(folder):
    import numpy as np
    import tensorflow as tf
    from keras_models import random_vit

    random_vit("tiny", classes=10).save(folder / "vit.keras")
    colours = np.random.default_rng(0).integers(0, 256, (48, 80, 3)).astype("uint8")
    tf.io.write_file(str(folder / "beach.jpg"), tf.io.encode_jpeg(colours))
    return "vit.keras"


def run(folder, *words):
    """What a script prints that runs as a user runs it, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("KERAS_BACKEND", None)  # scripts say it themselves
    flags = environment.get("XLA_FLAGS", "").split()  # one device, as a user has
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    command = [sys.executable, "-m", "fewbit.as_neural_compressor", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def run_here(installed, folder, monkeypatch, capsys):
    """The same in this process, which saves importing KerasHub again."""
    monkeypatch.chdir(folder)

    def call(script, *words):
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return call


def said(out, word):
    return re.search(rf"^{word}: (.+)$", out, re.MULTILINE)[1]


def test_a_first_model_is_quantized_saved_and_loaded(folder):
    out = run(folder, "hello.py")
    assert re.search(r"^float \['\w+', 'Dense', 'Dense'\]$", out, re.MULTILINE)
    for title in ("quantized", "loaded"):
        assert re.search(rf"^{title} \['\w+', 'QStaticDense', 'QStaticDense'\]$", out, re.MULTILINE)
    before, after = float(said(out, "before")), float(said(out, "after"))
    assert before != after and abs(after - before) < 0.1 * abs(before)
    config = "StaticQuantConfig(weight_dtype='fp8_e4m3', activation_dtype='fp8_e4m3')"
    assert said(out, "config") == said(out, "loaded config") == config
    assert said(out, "match") == "True"


@pytest.mark.long
@pytest.mark.parametrize("name", MADE)
def test_configs_in_the_program_and_in_a_file(folder, name):
    out = run(folder, "configs.py", "--quant_config_file", f"{name}.json")
    static, dynamic = "QStaticDense", "QDynamicDense"
    wanted = {
        "static": [static] * 4,
        "dynamic": [dynamic] * 4,
        "sum": [static, static, dynamic, dynamic],
        "file": MADE[name],
    }
    for title, classes in wanted.items():
        made = {f"dense{number}": cls for number, cls in enumerate(classes, start=1)}
        assert f"{title} {made} (1, 2)" in out


def test_a_gemma_is_prepared_and_used(run_here, gemma):
    prepared = run_here("gemma_prepare.py", "-p", "int8", "-m", gemma, "-q", "here")
    used = run_here("gemma_use.py", "-q", "here")
    assert said(used, "output") == said(prepared, "output")
    assert "Who are you?" in said(used, "output")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp8_e4m3", "fp8_e5m2"])
def test_a_gemma_is_prepared_and_used_elsewhere(folder, gemma, precision):
    preset = f"gemma_{precision}"
    prepared = run(folder, "gemma_prepare.py", "-p", precision, "-m", gemma, "-q", preset)
    used = run(folder, "gemma_use.py", "-q", preset)
    assert said(used, "output") == said(prepared, "output")
    config = f"StaticQuantConfig(weight_dtype={precision!r}, activation_dtype={precision!r})"
    assert said(used, "config") == config


@pytest.mark.long
def test_a_gemma_is_quantized_and_answers(folder, gemma):
    out = run(folder, "gemma.py", "-m", gemma)
    assert "Describe the city of Rome" in said(out, "before")
    assert "Describe the city of Rome" in said(out, "after")
    assert re.search(r"^QDynamicEinsumDense \.\S+\.query w_scale=", out, re.MULTILINE)


def check_vit(seen, used):
    assert said(used, "output") == said(seen, "output") != said(seen, "before")
    assert re.search(r"^QStaticDense \.\S+ a_scale=\S+ .*w_scale=", seen, re.MULTILINE)


def test_a_vit_is_prepared_and_used(run_here, vit):
    seen = run_here("vit.py", "-p", "int8", "-m", vit, "-q", "here.keras")
    check_vit(seen, run_here("vit_use.py", "-q", "here.keras"))


@pytest.mark.long
@pytest.mark.parametrize("target", ["vit_quantized.keras", "vit_quantized"])
def test_a_vit_is_prepared_and_used_elsewhere(folder, vit, target):
    seen = run(folder, "vit.py", "-m", vit, "-q", target)
    check_vit(seen, run(folder, "vit_use.py", "-q", target))
