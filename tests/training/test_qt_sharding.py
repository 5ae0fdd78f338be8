"""Quantized training on several devices: the same losses, and codes on the wires."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fewbit
from fewbit import QtProvider, QtRule

FULL = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
D, H, STEPS = 64, 128, 20
SPECS = {
    "up": P("fsdp", "tensor"),
    "down": P("tensor", "fsdp"),
    "out": P("fsdp", None),
}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def start():
    return {
        "up": normal(0, D, H) / 8,
        "down": normal(1, H, D) / 11,
        "out": normal(2, D, 16) / 8,
    }


def net(params, x):
    return (x + jnp.tanh(x @ params["up"]) @ params["down"]) @ params["out"]


X, Y = normal(3, 32, D), normal(4, 32, 16)


def train(rules, place, steps=STEPS, **kwargs):
    f = fewbit.quantize_model(net, QtProvider(rules))
    params = jax.device_put(start(), place(SPECS))
    x, y = (jax.device_put(v, place(P(("data", "fsdp")))) for v in (X, Y))

    @jax.jit
    def step(params, x, y, key):
        keys = {k: key for k in kwargs}
        loss = lambda p: jnp.mean(jnp.square(f(p, x, **keys) - y))  # noqa: E731
        value, g = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, d: w - 0.2 * d, params, g), value

    losses = []
    for k in range(steps):
        params, loss = step(params, x, y, jax.random.key(k))
        losses.append(float(loss))
    return losses, step, (params, x, y, jax.random.key(0))


def on_mesh(*shape):
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    is_spec = lambda s: isinstance(s, P)  # noqa: E731
    return lambda specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)


def alone(specs):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda s: one, specs, is_leaf=lambda s: isinstance(s, P))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_twenty_steps_on_eight_devices(shape):
    single, *_ = train([FULL], alone)
    several, *_ = train([FULL], on_mesh(*shape))
    assert single[-1] < 0.7 * single[0]
    # On the way a sum in another order may turn a code, which the next steps make good.
    np.testing.assert_allclose(several[0], single[0], atol=1e-4)
    np.testing.assert_allclose(several[-1], single[-1], atol=1e-3)


def collectives(text):
    """The element types of what each kind of collective moves."""
    found = re.findall(r"= \(?(\w+)\[[^\n]*? (all-gather|all-to-all|collective-permute)\(", text)
    return {(kind, dtype) for dtype, kind in found}


def test_sharded_weights_are_gathered_as_codes():
    _, step, args = train([FULL], on_mesh(1, 8, 1), steps=1)
    moved = collectives(step.lower(*args).compile().as_text())
    assert ("all-gather", "s8") in moved
    floats = [text for text in moved if text == ("all-gather", "f32")]
    text = step.lower(*args).compile().as_text()
    wide = re.findall(r"= f32\[([\d,]+)\][^\n]* all-gather\(", text)
    sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in wide]
    assert max(sizes, default=0) < D * H / 8, (floats, wide)  # scales at most, no weight


def test_noise_does_not_depend_on_the_devices():
    rule = FULL.replace(bwd_stochastic_rounding="uniform", channelwise_noise_axes=(0, 1))
    single, *_ = train([rule], alone, steps=3, stochastic_rounding=True)
    several, *_ = train([rule], on_mesh(2, 2, 2), steps=3, stochastic_rounding=True)
    np.testing.assert_allclose(several, single, atol=1e-3)


def test_shards_of_a_shard_map_have_noise_of_their_own():
    rule = FULL.replace(
        bwd_qtype="int4", bwd_stochastic_rounding="uniform", channelwise_noise_axes=(0, 1)
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def f(params, x):
        return jax.shard_map(
            lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
        )(params["w"], x)

    params, x = {"w": normal(5, D, D)}, jnp.tile(normal(6, 4, D), (8, 1))  # the same on each shard
    q = fewbit.quantize_model(f, QtProvider([rule]))
    g = jax.grad(lambda x: jnp.sum(jnp.sin(q(params, x, stochastic_rounding=jax.random.key(0)))))(x)
    parts = np.asarray(g).reshape(8, 4, D)
    assert all(not np.array_equal(parts[0], part) for part in parts[1:])
