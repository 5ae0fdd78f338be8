"""A ViT of the base shape classifying images with Keras: int8 against float32, batch 1 and 8.

Random weights and images. `dynamic` measures each activation at every call, `static` takes ranges
that calibration stored. Every row runs once per round; speeds are medians of per-round ratios.

    python bench/keras_vit.py [--small] [--budget 40] [--only static]
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
import jax.numpy as jnp
import keras
import numpy as np

import fewbit
import fewbit.keras

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "keras"))

import _random_models  # noqa: E402

BASE = "float32"
BATCHES = (1, 8)
int8 = {"weight_dtype": "int8", "weight_scale_granularity": "per_channel"}
CONFIGS = {
    BASE: None,
    "int8 dynamic": fewbit.keras.DynamicQuantConfig(**int8),
    "int8 static": fewbit.keras.StaticQuantConfig(**int8),
}


def compiled(model: keras.Model) -> Any:
    """The model as one compiled function of its input, weights as arguments."""
    forward = jax.jit(lambda variables, x: model.stateless_call(*variables, x, training=False)[0])
    variables = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )
    return functools.partial(forward, variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, nothing written")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="rows with one of the words")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of rounds per batch")
    args = parser.parse_args()
    shape = "tiny" if args.small else "base"
    images = {}
    for batch in BATCHES:
        size = (batch, *_random_models.VIT[shape]["image_shape"])
        images[batch] = jax.random.uniform(jax.random.key(batch), size, jnp.float32)
    programs: dict[str, Any] = {}
    weights: dict[str, int] = {}
    logits: dict[str, np.ndarray] = {}
    for name, config in CONFIGS.items():
        if args.only and config is not None and not any(word in name for word in args.only):
            continue
        model = _random_models.random_vit(shape)
        if config is not None:
            samples = [np.asarray(images[max(BATCHES)])]
            is_static = isinstance(config, fewbit.keras.StaticQuantConfig)
            calibration = (samples,) if is_static else ()
            fewbit.keras.quantize_model(model, config, *calibration, progress=False)
        programs[name] = compiled(model)
        weights[name] = sum(v.value.nbytes for v in model.variables)
        logits[name] = np.asarray(programs[name](images[max(BATCHES)]), np.float64)
    info = fewbit.kernels.info()
    packages = _measure.versions("jax", "jaxlib", "keras", "keras-hub")
    facts = _measure.machine(isa=info.isa, versions=packages)
    rows: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        calls = {
            name: lambda run=run, x=images[batch]: jax.block_until_ready(run(x))
            for name, run in programs.items()
        }
        for call in calls.values():
            call()
        times = _measure.interleave(calls, budget=2.0 if args.small else args.budget, least=3)
        for name, row in _measure.summary(times, BASE).items():
            ours, float32 = (logits[n].ravel() for n in (name, BASE))
            row["cosine"] = round(
                float(ours @ float32 / np.sqrt((ours @ ours) * (float32 @ float32))), 5
            )
            row["weights_mb"] = round(weights[name] / 1e6, 1)
            rows[f"{name}, batch {batch}"] = row
    facts["load"].append(_measure.load())
    lines = [
        _measure.headline(facts),
        f"ViT {shape}, random weights",
        f"{'':28}{'ms':>10}{'x float32':>11}{'cosine':>10}{'weights MB':>12}",
    ]
    lines += [
        f"{name:28}{row['ms']:10.1f}{row['speed']:11.2f}{row['cosine']:10.5f}"
        f"{row['weights_mb']:12.1f}"
        for name, row in rows.items()
    ]
    text = "\n".join(lines)
    print(text)
    if args.small or args.only:
        return
    name = f"keras-vit-{info.isa}"
    print(f"written: {_measure.write(name, {'machine': facts, 'rows': rows}).name}; "
          f"{_page.put(name, text)}")  # fmt: skip


if __name__ == "__main__":
    main()
