"""How long and how much memory does planning a 48-layer, 7-billion-parameter abstract decoder take?

    python bench/planning.py [linen|nnx]

No weight is allocated. Bars: 20 s and 1 GB. Also prints trace time with a plan over plain trace
time (bar: 2x).
"""

import argparse
import resource
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import fewbit

LAYERS, WIDTH, VOCABULARY, TOKENS = 48, 3456, 32000, 128
RULES = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=27, name="attention")(nn.RMSNorm()(x))
        h = nn.Dense(4 * WIDTH, use_bias=False, name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(nn.silu(h))


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCABULARY, WIDTH, name="table")
        x = table(ids)
        for i in range(LAYERS):
            x = LinenBlock(name=f"layers_{i}")(x)
        return table.attend(nn.RMSNorm()(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(27, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.silu(self.up(self.norms[1](x))))


class NnxDecoder(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.table.attend(x)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", nargs="?", default="linen", choices=("linen", "nnx"))
    kind = parser.parse_args().kind
    ids = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)

    start = time.perf_counter()
    if kind == "linen":
        model = LinenDecoder()
        variables = jax.eval_shape(model.init, jax.random.key(0), ids)
        jax.jit(model.apply).trace(variables, ids)
    else:
        model = nnx.eval_shape(lambda: NnxDecoder(nnx.Rngs(0)))
        graphdef, state = nnx.split(model)
        jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids)).trace(state, ids)
    plain_time, plain_peak = time.perf_counter() - start, peak_bytes()

    start = time.perf_counter()
    plan = fewbit.plan(model, RULES, ids)
    plan_time, plan_peak = time.perf_counter() - start, peak_bytes()

    print(plan)
    print()
    print(f"{kind}: plain init + trace {plain_time:.1f} s, plan {plan_time:.1f} s (bar: 20 s)")
    print(f"peak memory {plan_peak / 1e6:.0f} MB, of it {(plan_peak - plain_peak) / 1e6:.0f} MB")
    print("  added by planning (bar: 1,000 MB in all)")


if __name__ == "__main__":
    main()
