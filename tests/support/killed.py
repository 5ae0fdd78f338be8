"""Saves, streams, calibrates over and over until it is killed, for tests that kill it.

Each line of the input, `["<job>", "<folder>", <number>]`, starts such a child; its process id is
printed, and how it ended. Starting Python anew for every kill would take most of the time. Nothing
here may start JAX's runtime before the fork. Jobs of other files are named as '<module>:<job>'.
"""

import importlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import fewbit

SHARD_BYTES = 200_000


def say(what):
    """In one piece: parent and child share the pipe."""
    os.write(1, f"{what}\n".encode())


def tree(number):
    """Of `number` alone: several leaves of half a megabyte."""
    rng = np.random.default_rng(number)
    leaves = {f"w{i}": rng.integers(0, 255, (512, 1024), np.uint8) for i in range(4)}
    return {**leaves, "number": number}


def content_matches(params):
    """Whether every leaf is that of the number the tree says it is."""
    wanted = tree(params["number"])
    return all((np.asarray(params[key]) == wanted[key]).all() for key in wanted)


def save_for_ever(folder, first):
    trees = [tree(first), tree(first + 1)]
    fewbit.save(f"{folder}.aside", trees[0])  # JAX has started: every kill is one of a save
    say("ready")
    while True:
        for one in trees:
            fewbit.save(folder, one, shard_bytes=1_000_000)


# --- quantize_checkpoint --------------------------------------------------------------------------


def layers(params, x):
    for name in params:
        x = x @ params[name]
    return x


LAYERS = {f"w{i}": jax.ShapeDtypeStruct((512, 512), "float32") for i in range(6)}


def stream(folder, name):
    """`<folder>/a.safetensors` quantized into `<folder>/<name>`; goes on where a run was killed."""
    rules = [fewbit.QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")]
    plan = fewbit.plan(layers, rules, LAYERS, jax.ShapeDtypeStruct((1, 512), "float32"))
    source, target = os.path.join(folder, "a.safetensors"), os.path.join(folder, name)
    fewbit.quantize_checkpoint(source, target, plan, progress=False, shard_size=SHARD_BYTES)


def stream_for_ever(folder, number):
    """Every second child has compiled all it needs, so that it is killed while it writes."""
    if number % 2:
        stream(folder, f"aside-{number}")
    say("ready")
    while True:
        stream(folder, "out")


# --- calibrate ------------------------------------------------------------------------------------


def calibrate(path, batches):
    """Statistics of so many batches, from nothing to the file."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)}
    data = [jnp.asarray(rng.normal(size=(8, 64)), jnp.float32) for _ in range(batches)]
    rule = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    found = fewbit.calibrate(
        layers, [rule], params, data, observers=("range", "hessian"), progress=False
    )
    found.save(path)


def calibrate_for_ever(path, number):
    if number % 2:
        calibrate(f"{path}.aside", 2)
    say("ready")
    while True:
        for batches in (3, 4):
            calibrate(path, batches)


# --- save_adapters --------------------------------------------------------------------------------


def adapted(number):
    """(parameters, plan) of `number` alone, half a megabyte of adapters; alpha tells it too."""
    base = {name: jnp.zeros((512, 512), "float32") for name in ("w0", "w1")}
    alpha = float(number + 1)
    plan = fewbit.plan(layers, fewbit.LoraProvider(rank=64, alpha=alpha), base, jnp.ones((1, 512)))
    rng = np.random.default_rng(number)
    values = {
        name: jnp.asarray(rng.normal(size=shape), "float32")
        for adapter in plan.adapters
        for name, shape in adapter.shapes.items()
    }
    return fewbit.lora.with_adapters(fewbit.lora.init(plan, base, jax.random.key(0)), values), plan


def adapters_for_ever(folder, first):
    both = [adapted(first), adapted(first + 1)]
    say("ready")
    while True:
        for params, plan in both:
            fewbit.save_adapters(folder, params, plan)


JOBS = {
    "save": save_for_ever,
    "stream": stream_for_ever,
    "calibrate": calibrate_for_ever,
    "adapters": adapters_for_ever,
}


def serve():
    for line in sys.stdin:
        name, place, number = json.loads(line)
        module, _, job = name.rpartition(":")
        jobs = importlib.import_module(module).JOBS if module else JOBS
        child = os.fork()
        if not child:
            try:
                jobs[job](place, number)
            finally:
                os._exit(1)
        say(child)
        _, status = os.waitpid(child, 0)
        say(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else status)


if __name__ == "__main__":
    serve()
