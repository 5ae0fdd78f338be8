"""What XLA makes of quantized products on this CPU, as ratios against float32 (above 1 is faster).

    python bench/xla_products.py [--rounds 15] [--size 2048]

Each product is called once per round; medians of per-round ratios. The plan's word "slow" rests on
this table.
"""

import argparse
import statistics
import time

import jax

import fewbit
from fewbit import PtqProvider, QuantizationRule

RULES = {
    "int8 x int8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "int8 weight-only": QuantizationRule(weight_qtype="int8"),
    "int4 g32 weight-only": QuantizationRule(weight_qtype="int4", tile_size=32),
    "fp8 x fp8": QuantizationRule(weight_qtype="fp8", act_qtype="fp8"),
    "nf4 g64 weight-only": QuantizationRule(weight_qtype="nf4", tile_size=64),
}


def product(params, x):
    return x @ params["w"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2048)
    args = parser.parse_args()
    params = {"w": jax.random.normal(jax.random.key(0), (args.size, args.size))}
    counts = (1, 8, 64, 512)
    print(f"{args.size}x{args.size}, rows:{'':9}" + "".join(f"{rows:>8}" for rows in counts))
    columns = []
    for rows in counts:
        x = jax.random.normal(jax.random.key(1), (rows, args.size))
        calls = {"float32": (jax.jit(product), params)}
        for name, rule in RULES.items():
            plan = fewbit.plan(product, [rule], params, x)
            model = jax.jit(fewbit.quantize_model(product, PtqProvider([rule])))
            calls[name] = (model, fewbit.quantize_params(params, plan))
        for call, p in calls.values():
            jax.block_until_ready(call(p, x))
        times = []
        for _ in range(args.rounds):
            seconds = {}
            for name, (call, p) in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call(p, x))
                seconds[name] = time.perf_counter() - start
            times.append(seconds)
        columns.append({n: statistics.median(t["float32"] / t[n] for t in times) for n in RULES})
    for name in RULES:
        print(f"{name:25}" + "".join(f"{column[name]:8.2f}" for column in columns))


if __name__ == "__main__":
    main()
