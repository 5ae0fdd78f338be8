"""A product with its bias and activation in one call, against one after the other.

python bench/fused.py [--seconds 4]
"""

import argparse

import jax
from _measure import Shape, interleave, load, summary

from fewbit.kernels import ACTIVATIONS, panel_product
from fewbit.qarray import quantize
from fewbit.qarray._panels import to_panels

SHAPES = (Shape(1, 2048, 8192), Shape(8, 2048, 8192), Shape(512, 2048, 2048))
NAMES = (None, "relu", "silu", "gelu", "gelu_exact")


def calls_for(shape: Shape, name: str | None) -> dict:
    w = jax.random.normal(jax.random.key(0), (shape.k, shape.n)) / shape.k**0.5
    packed = to_panels(quantize(w, "int8", channelwise_axes=(1,)), "kn")
    x = jax.random.normal(jax.random.key(1), (shape.rows, shape.k))
    bias = jax.random.normal(jax.random.key(2), (shape.n,))

    def fused(x, packed, bias):
        return panel_product(x, packed, act="dynamic", bias=bias, activation=name)

    def apart(x, packed, bias):
        out = panel_product(x, packed, act="dynamic") + bias[None]
        return out if name is None else ACTIVATIONS[name](out)

    def timed(function):
        run = jax.jit(function).lower(x, packed, bias).compile()
        run(x, packed, bias).block_until_ready()
        return lambda: jax.block_until_ready(run(x, packed, bias))

    return {"apart": timed(apart), "fused": timed(fused)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    print(f"int8 rows and weights; load {load()}")
    print(
        f"{'shape':20}{'after the bias':>16}{'apart ms':>10}{'fused ms':>10}{'times':>8}  quartiles"
    )
    for shape in SHAPES:
        for name in NAMES:
            calls = calls_for(shape, name)
            found = summary(interleave(calls, budget=args.seconds), "apart")
            low, high = found["fused"]["speed_quartiles"]
            print(
                f"{str(shape):20}{name or 'nothing':>16}{found['apart']['ms']:10.3f}"
                f"{found['fused']['ms']:10.3f}{found['fused']['speed']:8.2f}  {low:.2f}-{high:.2f}"
            )


if __name__ == "__main__":
    main()
