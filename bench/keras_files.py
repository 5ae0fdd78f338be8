"""Files of a quantized Gemma3CausalLM of the 270M shape: size and load time against float32.

    python bench/keras_files.py            # 270M, random weights: int8, then int4 in groups of 32
    python bench/keras_files.py --small    # the same on a small model, for a quick look

Each preset is loaded in a new process that imported everything before the clock starts; float32 is
loaded there too, so the ratios come from one run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

SHAPE = {
    **{"image_size": None, "vision_encoder": None, "num_query_heads": 4, "num_key_value_heads": 1},
    **{"vocabulary_size": 262144, "num_layers": 18, "hidden_dim": 640, "intermediate_dim": 2048},
    **{"head_dim": 256, "query_head_dim_normalize": True, "use_query_key_norm": True},
    "sliding_window_size": 512,
}
SMALL = {**SHAPE, "vocabulary_size": 8000, "num_layers": 2}
RULES = {
    "int8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4 g32": {"weight_qtype": "int4", "tile_size": 32, "scale_dtype": "float16"},
}
LOAD = """
import json, sys, time
import keras_hub, fewbit.keras
fewbit.kernels.native_available()
began = time.perf_counter()
model = keras_hub.models.Gemma3CausalLM.from_preset(sys.argv[1])
for variable in model.variables:
    variable.value.block_until_ready()
seconds = time.perf_counter() - began
bytes_ = sum(v.value.nbytes for v in model.variables)
status = open("/proc/self/status").read()  # of this program, not of the one that started it
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"seconds": seconds, "resident": bytes_, "peak": peak}))
"""


def model_of(shape):
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(**shape)
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


def quantize(model, rule):
    import fewbit.keras

    fewbit.keras.quantize_model(model, [fewbit.QuantizationRule(**rule)], progress=False)


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(model, folder):
    began = time.perf_counter()
    model.save_to_preset(str(folder))
    saved = time.perf_counter() - began
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], check=True, capture_output=True, text=True
    )
    return {"size": size_of(folder), "save": saved, **json.loads(done.stdout.splitlines()[-1])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model instead")
    shape = SMALL if parser.parse_args().small else SHAPE
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rule in {"float32": None, **RULES}.items():
            model = model_of(shape)
            if rule is not None:
                quantize(model, rule)
            results[name] = measure(model, pathlib.Path(folder) / name.replace(" ", "_"))
            del model
    columns = f"{'save s':>7} {'load s':>7} {'resident':>9} {'peak MB':>8}"
    print(f"{'':10} {'MB':>8} {'of f32':>7} {columns}")
    whole = results["float32"]
    for name, r in results.items():
        print(
            f"{name:10} {r['size'] / 1e6:8.1f} {r['size'] / whole['size']:7.3f} {r['save']:7.2f} "
            f"{r['seconds']:7.2f} {r['resident'] / whole['resident']:7.3f} {r['peak'] / 1e6:8.0f}"
        )


if __name__ == "__main__":
    main()
