"""Haiku transforms a model into a pure function of its parameters; that function is quantized."""

import haiku as hk
import jax
import jax.numpy as jnp

import fewbit


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (512, 64))
    target = jnp.sin(x[:, :4] + x[:, 4:8])
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, 128, 4])(x)))
    params = model.init(jax.random.key(1), x)

    @jax.jit
    def step(params):
        loss = lambda params: jnp.mean(jnp.square(model.apply(params, x) - target))  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    for _ in range(200):
        params = step(params)

    rules = [fewbit.QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn")]
    plan = fewbit.plan(model.apply, rules, params, x)
    print(plan)

    quantized = fewbit.quantize_model(model.apply, fewbit.PtqProvider(rules))
    expected = model.apply(params, x)
    actual = quantized(fewbit.quantize_params(params, plan), x)
    error = jnp.mean(jnp.abs(actual - expected)) / jnp.mean(jnp.abs(expected))
    print(f"relative error: {error:.4f}")


if __name__ == "__main__":
    main()
