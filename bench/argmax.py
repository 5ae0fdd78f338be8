"""argmax over a vocabulary: XLA's own against two levels, medians of per-round ratios.

python bench/argmax.py [--rounds 50]
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from fewbit.ops._take import argmax

SHAPES = ((1, 8192), (1, 32000), (8, 32000), (1, 50257), (1, 151936), (1, 262144))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    calls = {
        "xla": jax.jit(lambda x: jax.lax.argmax(x, 1, jnp.int32)),
        "two levels": jax.jit(lambda x: argmax(x, 1)),
    }
    print(f"{'rows x length':16}{'xla us':>10}{'two levels us':>16}{'ratio':>8}")
    for shape in SHAPES:
        x = jax.random.normal(jax.random.key(0), shape)
        for call in calls.values():
            call(x).block_until_ready()
        rounds = []
        for _ in range(args.rounds):
            seconds = {}
            for name, call in calls.items():
                start = time.perf_counter()
                call(x).block_until_ready()
                seconds[name] = time.perf_counter() - start
            rounds.append(seconds)
        times = [1e6 * statistics.median(r[name] for r in rounds) for name in calls]
        ratio = statistics.median(r["xla"] / r["two levels"] for r in rounds)
        print(f"{f'{shape[0]} x {shape[1]}':16}{times[0]:10.0f}{times[1]:16.0f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
