"""A Flax Linen model: its plan, quantized parameters from float ones, and the familiar `apply`."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import fewbit


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128, name="first")(x))
        x = nn.relu(nn.Dense(128, name="second")(x))
        return nn.Dense(4, name="out")(x)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (512, 64))
    target = jnp.sin(x[:, :4] + x[:, 4:8])
    model = Mlp()
    params = model.init(jax.random.key(1), x)["params"]

    @jax.jit
    def step(params):
        loss = lambda params: jnp.mean(jnp.square(model.apply({"params": params}, x) - target))  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    for _ in range(200):
        params = step(params)

    # An earlier rule without a weight type keeps a layer in float.
    rules = [
        fewbit.QuantizationRule(module_path="out"),
        fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    ]
    print(fewbit.plan(model, rules, x))

    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    template = jax.eval_shape(quantized.init, jax.random.key(1), x)["params"]
    qparams = fewbit.quantize_params(params, template)
    expected = model.apply({"params": params}, x)
    actual = quantized.apply({"params": qparams}, x)
    error = jnp.mean(jnp.abs(actual - expected)) / jnp.mean(jnp.abs(expected))
    print(f"relative error: {error:.4f}")


if __name__ == "__main__":
    main()
