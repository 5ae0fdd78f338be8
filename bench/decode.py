"""stories15M telling stories: tokens per second at batch 1, and how often few bits change a token.

Greedy decoding under one `jit`, the cache included, in float32 and in few bits, by the native
kernels and through XLA on the same numbers. Every row decodes once per round; speeds are medians of
per-round ratios against float32. Agreement is measured on the model's own text, token by token with
the text so far given: the share of tokens at which a row's first choice is the float model's.
Temporary memory is what XLA sets aside to run the whole loop, the cache included.

    python bench/decode.py [--quick] [--tokens 128] [--only int8 float32]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import sys
from typing import Any

import _measure
import _page
import jax
import jax.numpy as jnp
import numpy as np

import fewbit

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import data  # noqa: E402
import llama  # noqa: E402

BASE = "float32"
TOKENS_PER_STORY = 250

rule = fewbit.QuantizationRule
int4 = functools.partial(rule, weight_qtype="int4", tile_size=32, scale_dtype="float16")
# The einsums of attention multiply activations with activations: a rule without types skips them.
RULES = {
    "int8": [rule(op_names=("einsum",)), rule(weight_qtype="int8", act_qtype="int8")],
    "int4 g32, int8 activations": [rule(op_names=("einsum",)), int4(act_qtype="int8")],
    "int4 g32, int8 table": [
        rule(op_names=("einsum",)),
        int4(module_path="layers.*", act_qtype="int8"),
        rule(weight_qtype="int8", act_qtype="int8"),
    ],
    "int4 g32 weight-only": [rule(op_names=("einsum",)), int4()],
}


@functools.partial(jax.jit, static_argnames=("step", "length", "config"))
def greedy(params: Any, *, step: Any, length: int, config: llama.Config) -> jax.Array:
    """`length` tokens after the beginning of a story, each the likeliest."""

    def one(carry, position):
        cache, token = carry
        logits, cache = step(params, cache, token, position)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (cache, token), token

    first = jnp.full((1,), llama.BOS, jnp.int32)
    start = llama.empty_cache(config, 1, length), first
    return jax.lax.scan(one, start, jnp.arange(length))[1][:, 0]


def quantized(params: Any, config: llama.Config, rules: Any) -> tuple[Any, Any, Any]:
    """The packed parameters, and the decoding step and the whole forward pass that take them."""
    step = llama.float_step(config)
    example = llama.empty_cache(config, 1, 1), jnp.full((1,), llama.BOS, jnp.int32), jnp.int32(0)
    packed = fewbit.quantize_params(params, fewbit.plan(step, rules, params, *example))
    provider = fewbit.PtqProvider(rules)
    forward = functools.partial(llama.forward, config=config)
    return packed, fewbit.quantize_model(step, provider), fewbit.quantize_model(forward, provider)


def choices(forward: Any, params: Any, stories: jax.Array) -> np.ndarray:
    """The likeliest next token at every place of the stories."""
    pick = jax.jit(lambda params, tokens: jnp.argmax(forward(params, tokens), axis=-1))
    return np.concatenate([pick(params, story[None, :-1]) for story in stories])


def backend_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Plain codes have native products too, so rows named XLA ask for XLA."""
    return fewbit.kernels.backend("xla") if name.endswith("XLA") else contextlib.nullcontext()


def decode(program: Any, tree: Any) -> jax.Array:
    return program(tree).block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing written")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="rows with one of the words")
    parser.add_argument("--tokens", type=int, default=128, help="decoded per call")
    parser.add_argument("--text", type=int, default=2000, help="tokens of text for the agreement")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of rounds")
    args = parser.parse_args()
    config, params = llama.load(data.locate("stories15m") / "stories15M.bin")
    batch = -(-args.text // TOKENS_PER_STORY)
    stories = llama.sample(params, config, batch=batch, length=TOKENS_PER_STORY, seed=0)
    expected = choices(functools.partial(llama.forward, config=config), params, stories)

    def size(tree: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    info = fewbit.kernels.info()
    rows: dict[str, dict[str, Any]] = {BASE: {"mb": size(params) / 1e6, "agreement": 1.0}}
    programs = {BASE: (params, llama.float_step(config))}
    for name, rules in RULES.items():
        if args.only and not any(word in name for word in args.only):
            continue
        packed, step, forward = quantized(params, config, rules)
        for place, tree in (("native", packed), ("XLA", fewbit.unpack(packed))):
            with backend_of(place):
                agree = float(np.mean(choices(forward, tree, stories) == expected))
            rows[f"{name} {place}"] = {"mb": size(packed) / 1e6, "agreement": agree}
            programs[f"{name} {place}"] = tree, step

    calls = {}
    for name, (tree, step) in programs.items():
        with backend_of(name):
            lowered = greedy.lower(tree, step=step, length=args.tokens, config=config)
            program = lowered.compile()
        memory = program.memory_analysis()
        rows[name]["temporary_mb"] = round(memory.temp_size_in_bytes / 1e6, 1)
        calls[name] = functools.partial(decode, program, tree)
        calls[name]()
    facts = _measure.machine(isa=info.isa, versions=_measure.versions("jax", "jaxlib"))
    times = _measure.interleave(calls, budget=5.0 if args.quick else args.budget, least=3)
    facts["load"].append(_measure.load())
    for name, numbers in _measure.summary(times, BASE).items():
        rows[name] |= numbers | {"tokens_per_s": round(1e3 * args.tokens / numbers["ms"], 1)}
        rows[name]["agreement"] = round(rows[name]["agreement"], 4)
        rows[name]["mb"] = round(rows[name]["mb"], 1)
    lines = [
        _measure.headline(facts),
        f"stories15M, batch 1, {args.tokens} tokens; agreement on {expected.size} tokens",
        f"{'':36}{'tokens/s':>10}{'x float32':>11}{'agreement':>11}{'weights MB':>12}"
        f"{'temporary MB':>14}",
    ]
    lines += [
        f"{name:36}{row['tokens_per_s']:10.0f}{row['speed']:11.2f}"
        f"{100 * row['agreement']:10.2f}%{row['mb']:12.1f}"
        f"{row['temporary_mb']:14.1f}"
        for name, row in rows.items()
    ]
    text = "\n".join(lines)
    print(text)
    if args.quick or args.only:
        return
    whole = {"machine": facts, "tokens": args.tokens, "text": int(expected.size), "rows": rows}
    name = f"decode-{info.isa}"
    print(f"written: {_measure.write(name, whole).name}; {_page.put(name, text)}")


if __name__ == "__main__":
    main()
