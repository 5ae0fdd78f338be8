"""What each format costs a real model in loss: stories15M on its own stories.

Samples tokens from the float model (temperature 1, fixed seed) and prints the mean next-token loss,
in nats, of the float model and of its quantized forms on them. On its own samples the float model's
loss is the entropy of its text, so a difference is the divergence that quantization adds; the noise
of a finite sample mostly cancels.

    python bench/stories15m_loss.py                  # 10,000 tokens
    python bench/stories15m_loss.py --tokens 2000 --only W8A8 "int4 g32 mse"
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import time

import jax
import numpy as np

import fewbit

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import data  # noqa: E402
import llama  # noqa: E402

TOKENS_PER_STORY = 250


def linear(weight_qtype: str, **fields) -> list[fewbit.QuantizationRule]:
    """Weight-only rules for the linear layers; the embedding, tied to the logits, stays float."""
    rule = fewbit.QuantizationRule
    return [rule(module_path="layers.*", weight_qtype=weight_qtype, **fields)]


def both(qtype: str, **fields) -> list[fewbit.QuantizationRule]:
    """Every product with a weight, activations too, the tied logits included.

    The model's einsums multiply activations with activations: a rule without types skips them.
    """
    rule = fewbit.QuantizationRule
    return [rule(op_names=("einsum",)), rule(weight_qtype=qtype, act_qtype=qtype, **fields)]


# name -> (rules, the most its loss may exceed the float model's)
ROWS = {
    "W8A8": (both("int8"), 0.01),
    "int4 g32 absmax": (linear("int4", tile_size=32), 0.15),
    "int4 g32 absmax f16 scales": (linear("int4", tile_size=32, scale_dtype="float16"), 0.15),
    "int4 g32 mse": (linear("int4", tile_size=32, weight_calibration_method="mse"), 0.12),
    "nf4 g64": (linear("nf4", tile_size=64), 0.12),
    "fp8": (both("float8_e4m3fn"), 0.02),
    "mxfp4": (linear("mxfp4", tile_size=32), 0.2),
    "nvfp4": (linear("nvfp4", tile_size=16), 0.12),
}


def stories(n_tokens: int) -> tuple[llama.Config, llama.Params, jax.Array]:
    """The model and its own stories, `n_tokens` sampled tokens in all."""
    config, params = llama.load(data.locate("stories15m") / "stories15M.bin")
    batch = -(-n_tokens // TOKENS_PER_STORY)
    tokens = llama.sample(params, config, batch=batch, length=TOKENS_PER_STORY, seed=0)
    return config, params, tokens


def quantized_losses(config, params, tokens, rules) -> tuple[np.ndarray, int]:
    """Token losses of the model under `rules`, and the bytes of its parameters."""
    forward = functools.partial(llama.forward, config=config)
    plan = fewbit.plan(forward, rules, params, tokens[:, :-1])
    qparams = fewbit.pack(fewbit.quantize_params(params, plan))
    qforward = fewbit.quantize_model(forward, fewbit.PtqProvider(rules))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(qparams))
    return llama.token_losses(qforward, qparams, tokens), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=list(ROWS))
    args = parser.parse_args()

    config, params, tokens = stories(args.tokens)
    forward = functools.partial(llama.forward, config=config)
    expected = llama.token_losses(forward, params, tokens)
    float_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(f"{expected.size} tokens sampled from the model itself")
    print(f"{'format':28}{'loss':>8}{'change':>9}{'noise':>8}{'at most':>9}{'MB':>7}{'s':>6}")
    print(f"{'float32':28}{expected.mean():8.4f}{'':>26}{float_bytes / 1e6:7.1f}")
    for name in args.only or ROWS:
        rules, most = ROWS[name]
        started = time.perf_counter()
        losses, size = quantized_losses(config, params, tokens, rules)
        seconds = time.perf_counter() - started
        change = losses - expected
        noise = change.std() / change.size**0.5  # one standard error of the paired difference
        print(
            f"{name:28}{losses.mean():8.4f}{change.mean():+9.4f}{noise:8.4f}{most:9.2f}"
            f"{size / 1e6:7.1f}{seconds:6.1f}"
        )


if __name__ == "__main__":
    main()
