"""A Gemma3 of the 270M shape generating with KerasHub: tokens per second at batch 1.

Random weights, a prompt of 32 tokens, 128 new ones. `KerasHub` rows use its own greedy sampler,
`ours` fewbit.keras.GreedySampler, `int8 cache` also fewbit.keras.quantize_kv_cache. Every row
generates once per round; speeds are medians of per-round ratios against float32 with KerasHub's
sampler. The time includes the pass over the prompt. Weights are the bytes of all variables.
`--peers` adds llama.cpp on random weights of the same shapes, in its own process and float16 cache.

    python bench/keras_generate.py [--small] [--budget 120] [--only int8]
    python bench/keras_generate.py --peers .venv-bench-llama/bin/python   # `make bench-llama`
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import _measure
import _page
import jax
import keras
import keras_hub
import numpy as np
from _remote import Remote

import fewbit
import fewbit.keras

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "keras"))

import _random_models  # noqa: E402

PROMPT, NEW = 32, 128
BASE = "float32 KerasHub"
int4 = functools.partial(
    fewbit.keras.DynamicQuantConfig, "int4", group_size=32, scale_dtype="float16"
)
CONFIGS = {
    "float32": None,
    "int8": fewbit.keras.DynamicQuantConfig("int8", weight_scale_granularity="per_channel"),
    "int4 g32, int8 activations": int4("int8"),
    "int4 g32 weight-only": int4(None),
}


def samplers() -> dict[str, Any]:
    """A sampler, and whether the cache is int8."""
    theirs, ours = keras_hub.samplers.GreedySampler(), fewbit.keras.GreedySampler()
    return {"KerasHub": (theirs, False), "ours": (ours, False), "ours, int8 cache": (ours, True)}


def inputs(new: int, vocabulary: int) -> dict[str, np.ndarray]:
    tokens = np.zeros((1, PROMPT + new), np.int32)
    tokens[:, :PROMPT] = np.random.default_rng(0).integers(1, vocabulary, PROMPT)
    return {"token_ids": tokens, "padding_mask": np.arange(PROMPT + new)[None] < PROMPT}


def generators(model: keras.Model, given: dict[str, np.ndarray]) -> dict[str, Any]:
    """A call per sampler, compiled."""
    calls = {}
    for name, (sampler, int8_cache) in samplers().items():
        fewbit.keras.quantize_kv_cache(model, "int8" if int8_cache else None)
        model.compile(sampler=sampler)
        generate = model.make_generate_function()

        def call(generate: Any = generate) -> Any:
            out = generate({k: v.copy() for k, v in given.items()}, stop_token_ids=None)
            return jax.block_until_ready(out["token_ids"])

        call()  # later calls run what is compiled now, whatever becomes of the layers' classes
        calls[name] = call
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two layers, nothing written")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="types with one of the words")
    parser.add_argument("--new", type=int, default=NEW, help="tokens generated per call")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of rounds")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of .venv-bench-llama")
    args = parser.parse_args()
    shape = "2 layers" if args.small else "270m"
    given = inputs(args.new, _random_models.GEMMA3[shape]["vocabulary_size"])
    make = functools.partial(_random_models.random_gemma3, shape, sequence_length=None)
    calls: dict[str, Any] = {}
    weights: dict[str, int] = {}
    for kind, config in CONFIGS.items():
        if args.only and config is not None and not any(word in kind for word in args.only):
            continue
        model = make()
        if config is not None:
            fewbit.keras.quantize_model(model, config, progress=False)
        size = sum(v.value.nbytes for v in model.variables)
        for sampler, call in generators(model, given).items():
            calls[f"{kind} {sampler}"] = call
            weights[f"{kind} {sampler}"] = size
    task = {
        "config": _random_models.GEMMA3[shape],
        "prompt": given["token_ids"][0, :PROMPT].tolist(),
        "new": args.new,
    }
    remotes = Remote.all_of(args.peers, "generate") if args.peers else []
    for remote in remotes:
        for name, size in remote.prepare(task).items():
            calls[name], weights[name] = functools.partial(remote.call, name), size
    info = fewbit.kernels.info()
    packages = _measure.versions("jax", "jaxlib", "keras", "keras-hub")
    packages |= {k: v for remote in remotes for k, v in remote.versions.items()}
    facts = _measure.machine(isa=info.isa, versions=packages)
    times = _measure.interleave(calls, budget=args.budget, least=2 if args.small else 3)
    for remote in remotes:
        remote.close()
    facts["load"].append(_measure.load())
    rows = _measure.summary(times, BASE)
    for name, row in rows.items():
        row["tokens_per_s"] = round(1e3 * args.new / row["ms"], 1)
        row["weights_mb"] = round(weights[name] / 1e6, 1)
        row["weights_ratio"] = round(weights[name] / weights[BASE], 4)
    lines = [
        _measure.headline(facts),
        f"Gemma3 {shape}, random weights, batch 1, prompt {PROMPT}, {args.new} new tokens",
        f"{'':46}{'tokens/s':>10}{'x float32':>11}{'weights MB':>12}{'x float32':>11}",
    ]
    lines += [
        f"{name:46}{row['tokens_per_s']:10.1f}{row['speed']:11.2f}{row['weights_mb']:12.1f}"
        f"{row['weights_ratio']:11.3f}"
        for name, row in rows.items()
    ]
    text = "\n".join(lines)
    print(text)
    if args.small or args.only or args.new != NEW:
        return
    name = f"keras-generate-{info.isa}" + "-peers" * bool(remotes)
    whole = {"machine": facts, "prompt": PROMPT, "new": args.new, "rows": rows}
    print(f"written: {_measure.write(name, whole).name}; {_page.put(name, text)}")


if __name__ == "__main__":
    main()
