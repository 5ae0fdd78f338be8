"""A training with delayed scales that can be stopped: also run in a process of its own.

`python delayed_run.py <file> <steps>` goes on from a file and writes what it ends with.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import serialization
from flax.training.train_state import TrainState

import fewbit

RULE = fewbit.QtRule(
    weight_qtype="float8_e4m3fn",
    act_qtype="float8_e4m3fn",
    bwd_qtype="float8_e5m2",
    weight_calibration_method="delayed,4",
    act_calibration_method="delayed,4",
    bwd_calibration_method="delayed,4",
)
LAYERS = 3


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(8)(x)), None


class Tower(nn.Module):
    """Layers in a scan, each recomputed in the backward pass, and a head."""

    remat: bool = True

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = nn.scan(block, length=LAYERS, **axes)(name="layers")(x, None)
        return nn.Dense(4, name="head")(x)


def tower(remat=True):
    return fewbit.quantize_model(Tower(remat), fewbit.QtProvider([RULE]))


def batch(number):
    x, y = (
        jax.random.normal(jax.random.key(10 * number + k), (16, n)) for k, n in ((0, 8), (1, 4))
    )
    return x * (1 + number % 3), y


def start(model):
    variables = model.init(jax.random.key(0), batch(0)[0])
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    return TrainState.create(apply_fn=model.apply, params=variables, tx=tx)


def train(state, steps):
    @jax.jit
    def step(state, x, y):
        def loss(variables):
            return jnp.mean(jnp.square(state.apply_fn(variables, x) - y))

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(steps):
        state = step(state, *batch(int(state.step)))
    return state


if __name__ == "__main__":
    path, steps = sys.argv[1], int(sys.argv[2])
    with open(path, "rb") as file:
        restored = serialization.from_bytes(start(tower()), file.read())
    with open(path, "wb") as file:
        file.write(serialization.to_bytes(train(restored, steps)))
