"""How fast, and in how much memory, does a float checkpoint become an int4 one, file to file?

    python bench/streaming.py [--gigabytes 1] [--dtype float32] [--rounds 2] [--folder DIR]

Makes up a llama-like checkpoint with PyTorch's names and layouts, quantizes it with
fewbit.quantize_checkpoint in a fresh process, and copies the same file beside it, in turns. The
source leaves the page cache before each. Bars: at most 600 MB above the interpreter's own memory
(jax and fewbit imported), and at least half as fast as the copy.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import fewbit
from fewbit._util._text import peak_memory
from fewbit.io._safetensors import SafetensorsWriter, dtype_name

WIDTH, HIDDEN, VOCABULARY = 4096, 11008, 32000
RULES = [fewbit.QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")]
NAMES = [
    (r"model\.embed\.weight", "embed"),
    (r"model\.layers\.{i}\.(\w+)\.weight", r"layers/{i}/\1", "T"),
    (r"model\.layers\.{i}\.(\w+)_norm", r"layers/{i}/\1_norm"),
    (r"lm_head\.weight", "head", "T"),
]
KERNELS = {
    **{name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
    **{"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)},
}


def parameters(layers, dtype):
    """The model's own parameters, as shapes; kernels are [in, out]."""

    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    tree = {"embed": struct(VOCABULARY, WIDTH), "head": struct(WIDTH, VOCABULARY), "layers": {}}
    for i in range(layers):
        norms = {"in_norm": struct(WIDTH), "out_norm": struct(WIDTH)}
        tree["layers"][str(i)] = {name: struct(*s) for name, s in KERNELS.items()} | norms
    return tree


def model(params, ids):
    x = params["embed"][ids]
    for layer in params["layers"].values():
        x = x * layer["in_norm"]
        y = (x @ layer["query"]) * (x @ layer["key"]) * (x @ layer["value"])
        x = (x + y @ layer["out"]) * layer["out_norm"]
        x = x + (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
    return x @ params["head"]


def make_plan(layers, dtype):
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return fewbit.plan(model, RULES, parameters(layers, dtype), ids)


def make_checkpoint(path, layers, dtype):
    """Random numbers, one block of them over and over: making them must not take the time."""
    tensors = {"model.embed.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for i in range(layers):
        for name, (rows, columns) in KERNELS.items():
            tensors[f"model.layers.{i}.{name}.weight"] = (columns, rows)
        for name in ("in_norm", "out_norm"):
            tensors[f"model.layers.{i}.{name}"] = (WIDTH,)
    kind = jnp.dtype(dtype)
    block = np.random.default_rng(0).normal(size=2**22).astype(kind).view(np.uint8)
    entries = [(name, dtype_name(kind), shape) for name, shape in tensors.items()]
    with SafetensorsWriter(path, entries) as writer:
        for name, shape in tensors.items():
            left = int(np.prod(shape)) * kind.itemsize
            while left:
                piece = block[: min(left, block.size)]
                writer.append(name, piece.data)
                left -= piece.size


def forget(path):
    """Out of the page cache, so that everybody reads from the disk."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(number)


def quantize_here(path, target, layers, dtype):
    """The measured process: memory before and after, and the seconds of the one call."""
    plan = make_plan(layers, dtype)
    before = peak_memory()
    start = time.perf_counter()
    info = fewbit.quantize_checkpoint(path, target, plan, NAMES)
    seconds = time.perf_counter() - start
    size = sum(leaf.bytes for leaf in info.leaves)
    print(json.dumps({"before": before, "peak": peak_memory(), "seconds": seconds, "size": size}))


def copy(path, target):
    start = time.perf_counter()
    shutil.copyfile(path, target)
    number = os.open(target, os.O_RDONLY)
    os.fsync(number)
    os.close(number)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default=None, help="where to make up to 2.2 times the size")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        quantize_here(given.run[0], given.run[1], int(given.run[2]), given.run[3])
        return
    item = jnp.dtype(given.dtype).itemsize
    layer = sum(rows * columns for rows, columns in KERNELS.values()) * item
    tables = 2 * VOCABULARY * WIDTH * item
    layers = max(1, round((given.gigabytes * 1e9 - tables) / layer))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        folder = pathlib.Path(folder)
        path = folder / "float.safetensors"
        make_checkpoint(path, layers, given.dtype)
        size = path.stat().st_size
        copies, runs = [], []
        for number in range(given.rounds):
            forget(path)
            copies.append(copy(path, folder / "copy"))
            (folder / "copy").unlink()
            forget(path)
            arguments = ["--run", path, folder / f"small{number}", str(layers), given.dtype]
            done = subprocess.run(
                [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, check=True
            )
            runs.append(json.loads(done.stdout))
            shutil.rmtree(folder / f"small{number}")
    report(size, layers, given.dtype, copies, runs)


def report(size, layers, dtype, copies, runs):
    pace = statistics.median(run["seconds"] for run in runs)
    ratios = [c / run["seconds"] for c, run in zip(copies, runs, strict=True)]
    print(
        f"source: {size / 1e9:.2f} GB of {dtype}, {layers} layers, largest tensor "
        f"{VOCABULARY * WIDTH * jnp.dtype(dtype).itemsize / 1e6:.0f} MB"
    )
    print(f"result: {runs[0]['size'] / 1e9:.2f} GB")
    print(f"quantize: {pace:.1f} s, {size / 1e6 / pace:.0f} MB/s of source")
    print(
        f"copy: {statistics.median(copies):.1f} s; quantizing is "
        f"{statistics.median(ratios):.2f} times as fast (bar: 0.5)"
    )
    above = max(run["peak"] - run["before"] for run in runs) / 1e6
    print(
        f"memory: {above:.0f} MB above the interpreter's {runs[0]['before'] / 1e6:.0f} MB "
        "(bar: 600 MB)"
    )


if __name__ == "__main__":
    main()
