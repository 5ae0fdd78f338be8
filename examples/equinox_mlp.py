"""An Equinox model is a pytree of its weights: it is quantized as a plain function of itself."""

import equinox as eqx
import jax
import jax.numpy as jnp

import fewbit


def forward(model, x):
    return jax.vmap(model)(x)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (512, 64))
    target = jnp.sin(x[:, :4] + x[:, 4:8])
    model = eqx.nn.MLP(in_size=64, out_size=4, width_size=128, depth=2, key=jax.random.key(1))
    # Activation functions are leaves, too: the arrays are the parameters, the rest is the program.
    params, program = eqx.partition(model, eqx.is_array)

    def f(params, x):
        return forward(eqx.combine(params, program), x)

    @jax.jit
    def step(params):
        loss = lambda params: jnp.mean(jnp.square(f(params, x) - target))  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    for _ in range(200):
        params = step(params)

    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = fewbit.plan(f, rules, params, x)
    print(plan)

    quantized = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
    expected, actual = f(params, x), quantized(fewbit.quantize_params(params, plan), x)
    error = jnp.mean(jnp.abs(actual - expected)) / jnp.mean(jnp.abs(expected))
    print(f"relative error: {error:.4f}")


if __name__ == "__main__":
    main()
