"""A quantized model's trace time over the plain model's, and its eager call over the float one.

    python bench/trace_time.py [--rounds 7]

A 24-layer Linen decoder, everything interleaved, medians of per-round ratios. Bars: trace 2x with
an empty plan; eager call 1.5x.
"""

import argparse
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp

import fewbit


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.RMSNorm()(x))
        return x + nn.Dense(64)(nn.silu(nn.Dense(256)(nn.RMSNorm()(x))))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(512, 64)
        x = table(ids)
        for _ in range(24):
            x = Block()(x)
        return table.attend(x)


def seconds(call) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def trace(apply, variables, ids) -> float:
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(lambda v, x: apply(v, x)).trace(variables, ids)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    model, ids = Decoder(), jnp.arange(16, dtype=jnp.int32)[None]
    variables = model.init(jax.random.key(0), ids)
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    empty = fewbit.quantize_model(model, fewbit.PtqProvider([]))
    int8 = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    params = fewbit.quantize_params(variables["params"], fewbit.plan(model, rules, ids))
    rows = {
        "float": (model.apply, variables),
        "empty plan": (empty.apply, variables),
        "int8": (int8.apply, {"params": params}),
    }
    traces = [{n: trace(*row, ids) for n, row in rows.items()} for _ in range(rounds)]
    for apply, v in rows.values():
        apply(v, ids)
    calls = [
        {n: seconds(lambda r=row: r[0](r[1], ids)) for n, row in rows.items()}
        for _ in range(rounds)
    ]
    print(f"{'':12}{'trace s':>9}{'ratio':>8}{'eager s':>10}{'ratio':>8}")
    for name in rows:
        values = []
        for table in (traces, calls):
            values.append(statistics.median(r[name] for r in table))
            values.append(statistics.median(r[name] / r["float"] for r in table))
        print(f"{name:12}{values[0]:9.3f}{values[1]:8.2f}{values[2]:10.4f}{values[3]:8.2f}")


if __name__ == "__main__":
    main()
