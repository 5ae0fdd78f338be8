"""Programs written for Neural Compressor's JAX backend run as they are."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest
from neural_compressor_away import installed as installed

import fewbit.keras
from fewbit.as_neural_compressor import MODULES, NAME, REFUSED, install

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_function_of_the_library_is_the_runner_s():
    assert fewbit.keras.install_as_neural_compressor is install


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_table_is_there(installed, module):
    made = importlib.import_module(f"{NAME}.{module}".rstrip("."))
    for name in MODULES[module]:
        assert getattr(made, name) is not None, name
    refused = REFUSED.get(module, {})
    for name in refused.keys() - {""}:
        with pytest.raises(NotImplementedError, match=f"{NAME}, and has no {module}.{name}: "):
            getattr(made, name)()


@pytest.mark.parametrize("module", [m for m, names in REFUSED.items() if "" in names])
def test_modules_that_are_not_there_can_be_imported(installed, module):
    made = importlib.import_module(f"{NAME}.{module}")
    with pytest.raises(NotImplementedError, match=re.escape(REFUSED[module][""])):
        made.anything("x")


def test_classes_of_layers_are_those_that_quantizing_makes(installed):
    from neural_compressor.jax.quantization.layers_dynamic import QDynamicConv2D, QDynamicDense
    from neural_compressor.jax.quantization.layers_static import QStaticConv2d

    model = keras.Sequential([keras.Input((9, 9, 3)), keras.layers.Conv2D(4, 3)])
    fewbit.keras.quantize_model(model, fewbit.keras.DynamicQuantConfig("int8"), progress=False)
    assert isinstance(model.layers[0], QDynamicConv2D)
    assert not isinstance(model.layers[0], QDynamicDense | QStaticConv2d)


PREPARE = """
import os
import sys

assert "keras" not in sys.modules  # so that this has an effect
os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from neural_compressor.jax import StaticQuantConfig, quantize_model
from neural_compressor.jax.utils.utility import print_model

model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(8, name="up")])
config = StaticQuantConfig(weight_dtype="int8", activation_dtype="int8")
small = quantize_model(model, config, lambda model: model(np.ones((4, 32), "float32")))
print_model(small)
keras.models.save_model(small, sys.argv[1])
print("output", np.asarray(small(np.ones((1, 32)))).tolist())
"""
USE = """
import sys

import keras
import numpy as np

import neural_compressor.jax{below}

model = keras.models.load_model(sys.argv[1])
print("output", np.asarray(model(np.ones((1, 32)))).tolist(), type(model.layers[0]).__name__)
"""


def test_a_program_runs_and_what_it_saved_loads_in_another(tmp_path):
    (tmp_path / "prepare.py").write_text(PREPARE)
    (tmp_path / "use.py").write_text(USE.format(below=".quantization"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "jax"}
    found = []
    for program in (["prepare.py"], ["-m", "use"]):
        command = [sys.executable, "-m", "fewbit.as_neural_compressor", *program, "q.keras"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout)
    prepared, used = found
    assert re.search(r"QStaticDense \.up a_scale=\[.*\] w_scale=", prepared)
    output = prepared[prepared.index("output") :].strip()
    assert used.strip() == f"{output} QStaticDense"
