"""What an eager call of a quantized NNX model costs against the float model's.

Both are called without any jit around them, on 24 small blocks where dispatch is all the cost. The
calls are interleaved so that a busy machine slows both; printed is the median of the ratios.

    python bench/eager_call.py [--blocks 24] [--rounds 30]
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx

import fewbit


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, blocks: int, width: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds(call, x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(x))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    model, x = Model(options.blocks, 32, nnx.Rngs(0)), jnp.ones((1, 32))
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules), x)
    for _ in range(2):
        seconds(model, x), seconds(quantized, x)
    pairs = [(seconds(model, x), seconds(quantized, x)) for _ in range(options.rounds)]
    ratios = [after / before for before, after in pairs]
    float_ms, int8_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"eager call, {options.blocks} blocks: float {float_ms:.1f} ms, int8 {int8_ms:.1f} ms")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}); the bar is 1.5")


if __name__ == "__main__":
    main()
