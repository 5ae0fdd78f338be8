"""Memory while a Keras model is quantized in place, read from the system in a new process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from fewbit import kernels

pytestmark = [
    pytest.mark.skipif(
        not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
    ),
    pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="no /proc here"),
]
ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST = 1.3  # of the float model's bytes
LEFT = 0.6
COMPILING = 64e6  # bytes for predict, of however wide a model

CHILD = """
import ctypes, gc, json, sys, time
import numpy as np
import keras
import fewbit.keras
from fewbit.keras import DynamicQuantConfig, StaticQuantConfig

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def model_of(words, width):
    inputs = keras.Input((8,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(words, width)
    x = table(inputs)
    for _ in range(6):
        x = keras.layers.Dense(width)(keras.layers.Dense(2 * width)(x))
    return keras.Model(inputs, table(x, reverse=True))

def measured(words, width):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    model = model_of(words, width)
    floats = sum(variable.value.block_until_ready().nbytes for variable in model.variables)
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the high-water mark begins here
    fewbit.keras.quantize_model(model, config, calibrate, progress=False)
    stored = sum(variable.value.nbytes for variable in model.variables)
    peak = status("VmHWM") - before
    time.sleep(2)  # XLA gives up a program's arguments on a thread of its own
    return floats, stored, peak, status("VmRSS") - before

def calibrate(model):
    for _ in range(2):
        model.predict(np.ones((1, 8), "int32"), verbose=0)

fields = json.loads(sys.argv[1])
config = (StaticQuantConfig if fields.pop("static", False) else DynamicQuantConfig)(**fields)
measured(32000, 512)  # compiled programs are there before anything is counted
print(json.dumps(measured(32000, 512)))
"""


@pytest.mark.parametrize(
    "config",
    [
        {"weight_dtype": "int8", "activation_dtype": "int8"},
        {"weight_dtype": "int8", "activation_dtype": "int8", "static": True},
        pytest.param(
            {"weight_dtype": "int4", "activation_dtype": None, "group_size": 32},
            marks=pytest.mark.long,
        ),
        pytest.param({}, marks=pytest.mark.long),
    ],
    ids=["int8", "static", "int4", "fp8"],
)
def test_quantizing_in_place_stays_near_the_float_model(config):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(config)],
        **dict(capture_output=True, text=True, cwd=ROOT, timeout=300),
        env={**os.environ, "XLA_FLAGS": ""},  # one device
    )
    assert done.returncode == 0, done.stderr
    floats, stored, peak, after = json.loads(done.stdout.splitlines()[-1])
    assert floats > 80e6
    assert stored < 0.35 * floats
    peak -= COMPILING * config.get("static", False)
    assert peak < MOST * floats, f"{peak / floats:.2f} times the float model"
    assert after < LEFT * floats, f"{after / floats:.2f} times the float model are still held"
