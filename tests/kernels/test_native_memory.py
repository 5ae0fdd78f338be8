"""Resident memory of packed weights, read from the system in a process of its own."""

import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import fewbit
from fewbit import QuantizationRule, kernels

pytestmark = [
    pytest.mark.skipif(
        not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
    ),
    pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="no /proc here"),
]

K, N = 4096, 16384
RULES = {
    "int8": dict(weight_qtype="int8", act_qtype="int8"),
    "int4": dict(weight_qtype="int4", tile_size=32, scale_dtype="float16", act_qtype="int8"),
    "int3": dict(weight_qtype="int3", tile_size=128, scale_dtype="float16"),
}
BITS = {"int8": 8 + 32 / K, "int4": 4.5, "int3": 3.125}  # per weight, scales included

CHILD = """
import ctypes, gc, pickle, sys
import jax, jax.numpy as jnp
import fewbit

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

def f(params, x):
    return x @ params["w"]

rules, small, file = pickle.load(open(sys.argv[1], "rb")), sys.argv[2], sys.argv[3]
model = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
load = lambda name: jax.tree.map(jnp.array, pickle.load(open(name, "rb")))
for rows in (1, 64):  # compiled code, threads and scratch are there before anything is counted
    tiny = load(small)
    model(tiny, jnp.ones((rows, tiny["w"].array.shape[0]))).block_until_ready()
before = resident()
params = jax.block_until_ready(load(file))
loaded = resident()
peaks = []
for rows in (1, 64, 1):
    model(params, jnp.ones((rows, params["w"].array.shape[0]))).block_until_ready()
    peaks.append(resident())
print(loaded - before, max(peaks) - loaded)
"""


@pytest.mark.parametrize(
    "name", ["int4", *(pytest.param(n, marks=pytest.mark.long) for n in ("int8", "int3"))]
)
def test_weights_are_resident_at_their_width_and_once(name, tmp_path):
    rules = [QuantizationRule(**RULES[name])]

    def save(file, k, n):
        params = {"w": normal(0, k, n)}
        plan = fewbit.plan(lambda p, x: x @ p["w"], rules, params, jnp.ones((1, k)))
        packed = fewbit.quantize_params(params, plan)
        assert packed["w"].array.layout == "panels"
        file.write_bytes(pickle.dumps(jax.tree.map(np.asarray, packed)))
        return sum(leaf.nbytes for leaf in jax.tree.leaves(packed))

    save(tmp_path / "small", 256, 128)
    stored = save(tmp_path / "large", K, N)
    (tmp_path / "rules").write_bytes(pickle.dumps(rules))
    assert stored * 8 / (K * N) == pytest.approx(BITS[name], rel=1e-3)
    files = [str(tmp_path / each) for each in ("rules", "small", "large")]
    command = [sys.executable, "-c", CHILD, *files]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    loaded, run = map(int, output.split())
    megabyte = 2**20
    assert stored * 0.9 < loaded < stored + 6 * megabyte, (loaded, stored)
    # Results, scratch and the code for new shapes, whatever the format; a copy would be more.
    assert run < 20 * megabyte < stored, run
