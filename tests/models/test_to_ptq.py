"""What serves computes what was trained, to the last bit, in every format and front end."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import fewbit
from fewbit import QtProvider, QtRule

RULES = {
    "int8": QtRule(weight_qtype="int8", act_qtype="int8"),
    "int8_bwd": QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"),
    "int8_groups": QtRule(weight_qtype="int8", act_qtype="int8", tile_size=64),
    "int8_weights": QtRule(weight_qtype="int8"),
    "int4_groups": QtRule(weight_qtype="int4", act_qtype="int8", tile_size=32),
    "int4_weights": QtRule(weight_qtype="int4", tile_size=32, scale_dtype="float16"),
    "nf4_weights": QtRule(weight_qtype="nf4", tile_size=64),
    "fp8": QtRule(weight_qtype="fp8", act_qtype="fp8", bwd_qtype="float8_e5m2"),
}
WIDE = 256  # wide enough for panels: what `pack=True` makes, native kernels read
# relu, because two programs of XLA need not compute one gelu to the same bit.
X = jax.random.normal(jax.random.key(1), (33, WIDE))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDE, name="down")(nn.relu(nn.Dense(2 * WIDE, name="up")(x)))


class NnxNet(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(WIDE, 2 * WIDE, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(2 * WIDE, WIDE, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def function(params, x):
    hidden = jax.nn.relu(jnp.einsum("bk,kn->bn", x, params["up"]))
    return jax.lax.dot_general(hidden, params["down"], (((1,), (0,)), ((), ())))


def of_linen(rule, **options):
    model = fewbit.quantize_model(Net(), QtProvider([rule]))
    params = Net().init(jax.random.key(0), X)["params"]
    trained = jax.jit(lambda p, x: model.apply({"params": p}, x))(params, X)
    served = fewbit.to_ptq(model, params, None, X, **options)
    again = jax.jit(lambda p, x: served.model.apply({"params": p}, x))(served.params, X)
    return trained, again


def of_nnx(rule, **options):
    model = fewbit.quantize_model(NnxNet(), QtProvider([rule]), X)
    call = nnx.jit(lambda m, x: m(x))
    return call(model, X), call(fewbit.to_ptq(model, None, None, X, **options), X)


def of_function(rule, **options):
    model = fewbit.quantize_model(function, QtProvider([rule]))
    keys = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(keys[0], (WIDE, 2 * WIDE)) / 16,
        "down": jax.random.normal(keys[1], (2 * WIDE, WIDE)) / 16,
    }
    served = fewbit.to_ptq(model, params, None, X, **options)
    return jax.jit(model)(params, X), jax.jit(served.model)(served.params, X)


def keras_model(rule, dtype=None):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(2 * WIDE, activation="relu", dtype=dtype),
        keras.layers.Dense(WIDE, dtype=dtype),
    ]
    model = keras.Sequential([keras.Input((WIDE,)), *layers])
    return fewbit.quantize_model(model, QtProvider([rule]))


def of_keras(rule, dtype=None, **options):
    model = keras_model(rule, dtype)
    x = np.asarray(X)
    trained = model.predict(x, verbose=0)
    served = fewbit.to_ptq(model, progress=False, **options)
    return trained, served.predict(x, verbose=0)


FRONT_ENDS = [of_linen, of_nnx, of_function, of_keras]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", RULES)
def test_the_forward_pass_is_that_of_training(name, front_end):
    trained, served = front_end(RULES[name])
    assert float(jnp.abs(trained).max()) > 0.1
    np.testing.assert_array_equal(served, trained)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", RULES)
def test_mixed_precision_of_keras_changes_nothing_of_that(name, policy):
    trained, served = of_keras(RULES[name], policy)
    assert trained.dtype == served.dtype == policy.removeprefix("mixed_")
    np.testing.assert_array_equal(served, trained)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", ["int8", "int4_groups", "fp8"])
def test_kernels_come_close(name, front_end):
    trained, served = front_end(RULES[name], pack=True)
    # Floats in another order, and so now and then another code of a hidden activation.
    error = np.linalg.norm(np.asarray(served - trained)) / np.linalg.norm(np.asarray(trained))
    assert error < 2e-3


def layouts(model):
    return {
        stored.value().array.layout
        for layer in model.layers
        for stored in layer._fewbit.stored.values()
    }


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("pack", [False, True])
def test_a_saved_keras_model_stays_as_it_was_made(pack, dtype, tmp_path):
    model = fewbit.to_ptq(keras_model(RULES["int4_groups"], dtype), pack=pack, progress=False)
    assert ("panels" in layouts(model)) == pack
    model.save(tmp_path / "served.keras")
    loaded = keras.models.load_model(tmp_path / "served.keras")
    assert layouts(loaded) == layouts(model)
    x = np.asarray(X)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
