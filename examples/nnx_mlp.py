"""A Flax NNX model: `quantize_model` takes the trained model and an example input."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fewbit


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.second = nnx.Linear(128, 128, rngs=rngs)
        self.out = nnx.Linear(128, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.second(nnx.relu(self.first(x)))))


@nnx.jit
def step(model, optimizer, x, target):
    grads = nnx.grad(lambda model: jnp.mean(jnp.square(model(x) - target)))(model)
    optimizer.update(model, grads)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (512, 64))
    target = jnp.sin(x[:, :4] + x[:, 4:8])
    model = Mlp(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(200):
        step(model, optimizer, x, target)

    # Weights in 4 bits with a scale for every 32 inputs; activations stay float.
    rules = [fewbit.QuantizationRule(weight_qtype="int4", tile_size=32)]
    print(fewbit.plan(model, rules, x))

    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules), x)
    quantized = fewbit.pack(quantized)  # for this CPU's kernels
    expected, actual = model(x), quantized(x)
    error = jnp.mean(jnp.abs(actual - expected)) / jnp.mean(jnp.abs(expected))
    print(f"relative error: {error:.4f}")


if __name__ == "__main__":
    main()
