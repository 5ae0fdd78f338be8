"""QLoRA of a small transformer: it learns, its base stays bit for bit, at few bits a weight."""

import functools
import pathlib
import re
import sys

import data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import run
from tolerances import QLORA_LOSS

import fewbit

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import llama
import qlora_stories as example

CONFIG = llama.Config(64, 128, 2, 4, 4, 128, 32)


def random_model():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    attn = {name: draw(2, 64, 64) for name in ("wq", "wk", "wv", "wo")}
    mlp = {"gate": draw(2, 64, 128), "up": draw(2, 64, 128), "down": draw(2, 128, 64)}
    norms = {"norm": jnp.ones((2, 64))}
    layers = {"attn": attn | norms, "mlp": mlp | norms}
    return {"embed": draw(128, 64), "layers": layers, "norm": jnp.ones(64)}


def is_stored(value):
    return isinstance(value, fewbit.WithAux)


def test_qlora_trains_the_adapters_alone():
    forward = functools.partial(llama.forward, config=CONFIG)
    params = random_model()
    tokens = np.frombuffer(example.HAMLET.encode() * 4, np.uint8).astype(np.int32)
    train = example.batches(tokens, 30, 4, 24, seed=1)
    lora = dict(rank=8, alpha=16.0)
    after = {}
    for name, rule in {"float": lora, "nf4": lora | example.NF4}.items():
        provider = fewbit.LoraProvider([example.OFF, fewbit.LoraRule(**rule)])
        plan = fewbit.plan(forward, provider, params, train[0][:, :-1])
        start = fewbit.lora.init(plan, fewbit.quantize_params(params, plan), jax.random.key(0))
        model = fewbit.apply_lora_to_model(forward, provider)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            end, before, after[name] = example.fine_tune(model, start, train, train[:4], 1e-2)
        assert after[name] < before - 0.5
        adapters = set(fewbit.lora.adapters(start))
        assert adapters == set(fewbit.lora.adapters(end)) and len(adapters) == 2 * 8
        paths = [
            (jax.tree_util.keystr(path, simple=True, separator="/"), a, b)
            for (path, a), b in zip(
                jax.tree_util.tree_leaves_with_path(start), jax.tree.leaves(end), strict=True
            )
        ]
        for path, a, b in paths:  # bit for bit
            assert np.array_equal(np.asarray(a), np.asarray(b)) != (path in adapters), path
    assert example.base_bits(end) <= 4.6
    stored = [v for v in jax.tree.leaves(end, is_leaf=is_stored) if is_stored(v)]
    assert len(stored) == 8
    if fewbit.kernels.native_available():  # the layout that this machine's kernels read
        assert all(v.array.layout == "panels" for v in stored)
        measured = 8 * sum(part.nbytes for v in stored for part in jax.tree.leaves(v))
        assert measured / sum(v.array.size for v in stored) <= 4.6
    assert abs(after["nf4"] - after["float"]) < QLORA_LOSS


def test_the_example_encodes_as_its_tokenizer_does():
    folder = data.fetch("stories15m")
    encoder = example.Encoder(folder / "tokenizer.bin", 32000)
    text = "Once upon a time, there was a little girl."
    # The ids that every llama tokenizer gives this sentence.
    known = [9038, 2501, 263, 931, 29892, 727, 471, 263, 2217, 7826, 29889]
    assert encoder.encode(text)[:-1].tolist() == known
    decoded = llama.Tokenizer(folder / "tokenizer.bin", 32000).decode(encoder.encode("naïve  ab"))
    assert decoded == "naïve  ab\n"


@pytest.mark.long
def test_the_example_runs():
    folder = data.fetch("stories15m")
    out = run(
        "examples/qlora_stories.py",
        str(folder / "stories15M.bin"),
        str(folder / "tokenizer.bin"),
        *("--steps", "3", "--batch", "1", "--length", "16", "--validation", "1"),
        timeout=900,
    )
    bits = float(re.search(r"base: ([\d.]+) bits a weight", out)[1])
    assert bits <= 4.6
    assert re.search(r"QLoRA - LoRA: [+-]\d\.\d+ nats", out)
