"""Memory while a Gemma3 of the 270M shape is quantized in place: peak over the float model's bytes.

    python bench/keras_memory.py [--small] [--only int8]

Each type has a process of its own. The peak is the high-water mark of its resident memory, from the
moment that the float model is there, above what the process held before it made the model; so what
compiling takes and what the allocator keeps is counted too.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "jax")

TYPES = {
    "int8 per channel": {"weight_dtype": "int8", "weight_scale_granularity": "per_channel"},
    "int8 per tensor": {"weight_dtype": "int8"},
    "int4 g32": {"weight_dtype": "int4", "activation_dtype": None, "group_size": 32},
    "fp8": {},
    "int8 static": {"weight_dtype": "int8", "activation_dtype": "int8", "static": True},
}
PROMPT = 32


def status(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def calibrate(model: Any) -> None:
    """One prompt through the float model, compiled: call by call Keras would turn the table."""
    tokens = np.random.default_rng(0).integers(1, 1000, (1, PROMPT)).astype("int32")
    model.predict({"token_ids": tokens, "padding_mask": np.ones((1, PROMPT), bool)}, verbose=0)


def measure(shape: str, fields: dict) -> dict:
    import keras

    import fewbit.keras

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "keras"))
    import _random_models

    fields = dict(fields)
    static = fields.pop("static", False)
    tiny = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    if static:
        config = fewbit.keras.StaticQuantConfig(**fields)
        numbers = np.ones((1, 64), "float32")
        fewbit.keras.quantize_model(tiny, config, lambda m: m(numbers), progress=False)
    else:
        config = fewbit.keras.DynamicQuantConfig(**fields)
        fewbit.keras.quantize_model(tiny, config, progress=False)  # what is loaded once
    _random_models.random_gemma3("2 layers", sequence_length=None)
    before = status("VmRSS")
    model = _random_models.random_gemma3(shape, sequence_length=None)
    floats = sum(v.value.block_until_ready().nbytes for v in model.variables)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    began = time.perf_counter()
    fewbit.keras.quantize_model(model, config, calibrate if static else None, progress=False)
    seconds = time.perf_counter() - began
    stored = sum(v.value.nbytes for v in model.variables)
    peak = status("VmHWM") - before
    return {"floats": floats, "stored": stored, "peak": peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two layers")
    parser.add_argument("--only", metavar="WORD", help="types with this word")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure("2 layers" if args.small else "270m", TYPES[args.one])))
        return
    print(f"{'':18}{'float MB':>10}{'stored':>8}{'peak':>7}{'s':>7}")
    for name in TYPES:
        if args.only and args.only not in name:
            continue
        words = [sys.executable, __file__, "--one", name, *["--small"] * args.small]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        r = json.loads(done.stdout.splitlines()[-1])
        ratios = f"{r['stored'] / r['floats']:8.2f}{r['peak'] / r['floats']:7.2f}"
        print(f"{name:18}{r['floats'] / 1e6:10.0f}{ratios}{r['seconds']:7.1f}")


if __name__ == "__main__":
    main()
