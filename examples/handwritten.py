"""A model written by hand: a plain function of nested parameters, trained, planned, quantized."""

import jax
import jax.numpy as jnp

import fewbit


def forward(params, x):
    for layer in params["hidden"]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params["out"]["w"] + params["out"]["b"]


def make_params(key, sizes=(64, 128, 128, 4)):
    def dense(key, n_in, n_out):
        return {"w": jax.random.normal(key, (n_in, n_out)) * n_in**-0.5, "b": jnp.zeros((1, n_out))}

    keys = jax.random.split(key, len(sizes) - 1)
    layers = [dense(*each) for each in zip(keys, sizes[:-1], sizes[1:], strict=True)]
    return {"hidden": layers[:-1], "out": layers[-1]}


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (512, 64))
    target = jnp.sin(x[:, :4] + x[:, 4:8])
    params = make_params(jax.random.key(1))

    @jax.jit
    def step(params):
        loss = lambda params: jnp.mean(jnp.square(forward(params, x) - target))  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    for _ in range(200):
        params = step(params)

    # The hidden layers in 4 bits, a scale for every 32 inputs; the last layer stays more exact.
    rules = [
        fewbit.QuantizationRule(module_path="out.*", weight_qtype="int8"),
        fewbit.QuantizationRule(weight_qtype="int4", tile_size=32),
    ]
    plan = fewbit.plan(forward, rules, params, x)
    print(plan)

    quantized = fewbit.quantize_model(forward, fewbit.PtqProvider(rules))
    expected, actual = forward(params, x), quantized(fewbit.quantize_params(params, plan), x)
    error = jnp.mean(jnp.abs(actual - expected)) / jnp.mean(jnp.abs(expected))
    print(f"relative error: {error:.4f}")


if __name__ == "__main__":
    main()
