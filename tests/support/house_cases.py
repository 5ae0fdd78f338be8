"""A dozen quantized models, each with its plan and the program that it lowers to.

What `test_house.py` holds still: how the library is built inside may change, these may not.
"""

import os
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import fewbit
from fewbit import LoraProvider, PtqProvider, QtProvider, QtRule, QuantizationRule

W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
INT4 = QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16")


class House(NamedTuple):
    plan: Any  # a Plan
    run: Any  # what is lowered, of `args`
    args: tuple


def normal(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).normal(size=shape) / 4
    return jnp.asarray(values, dtype)


X = normal(0, 4, 64)


# --- plain functions -----------------------------------------------------------------------------


def mlp(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"][None]) @ params["down"]


MLP = {"up": normal(1, 64, 128), "bias": normal(2, 128), "down": normal(3, 128, 64)}


def function_of(model, rules, params, *args, provider=PtqProvider):
    plan = fewbit.plan(model, provider(rules), params, *args)
    small = fewbit.quantize_params(params, plan)
    return House(plan, fewbit.quantize_model(model, provider(rules)), (small, *args))


def dense():
    return function_of(mlp, [W8A8], MLP, X)


def scanned():
    def model(params, x):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("bk,khd->bhd", x, w).reshape(x.shape)), None

        x, _ = lax.scan(jax.checkpoint(layer), params["table"][x], params["layers"])
        return x @ params["table"].T

    params = {"table": normal(4, 50, 64), "layers": normal(5, 3, 64, 4, 16)}
    return function_of(model, [INT4], params, jnp.array([1, 2, 3]))


def mixed():
    def model(params, x, sizes):
        y = lax.ragged_dot(x, params["experts"], sizes)
        image = y.reshape(1, 8, 8, 4)
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(image, params["conv"], (1, 1), "SAME", None, None, numbers)
        return jnp.einsum("bhwc,dc->bhwd", y, params["last"])

    params = {"experts": normal(6, 2, 64, 64), "conv": normal(7, 3, 3, 4, 8)}
    params["last"] = normal(8, 16, 8)
    rules = [
        QuantizationRule(op_names=("ragged_dot",), weight_qtype="nf4", tile_size=32),
        QuantizationRule(op_names=("conv_general_dilated",), weight_qtype="float8_e4m3fn"),
        W8A8,
    ]
    return function_of(model, rules, params, normal(9, 4, 64), jnp.array([1, 3]))


def static():
    rules = [W8A8.replace(act_static_scale=True)]
    stats = fewbit.calibrate(mlp, rules, MLP, [X, 2 * X], progress=False)
    plan = fewbit.plan(mlp, rules, MLP, X)
    small = fewbit.quantize_params(MLP, plan, stats)
    return House(plan, fewbit.quantize_model(mlp, PtqProvider(rules)), (small, X))


QT = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_weight_grad_tile_size=2)


def trained():
    step = fewbit.quantize_model(mlp, QtProvider([QT]))

    def loss(params, x):
        return jnp.square(step(params, x)).mean()

    return House(fewbit.plan(mlp, QtProvider([QT]), MLP, X), jax.grad(loss), (MLP, X))


def delayed():
    fp8 = dict(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2")
    methods = ("weight", "act", "bwd")
    rule = QtRule(**fp8, **{f"{m}_calibration_method": "delayed" for m in methods})
    step = fewbit.quantize_model(mlp, QtProvider([rule]))

    def loss(params, histories, x):
        return jnp.square(step(params, x, amax_history=histories)).mean()

    args = (MLP, step.init_amax_history(MLP, X), X)
    plan = fewbit.plan(mlp, QtProvider([rule]), MLP, X)
    return House(plan, jax.grad(loss, argnums=(0, 1)), args)


def lora():
    provider = LoraProvider(rank=4, alpha=8.0, weight_qtype="nf4", tile_size=32)
    plan = fewbit.plan(mlp, provider, MLP, X)
    base = fewbit.quantize_params(MLP, plan)
    params = fewbit.lora.init(plan, base, jax.random.key(0))
    return House(plan, fewbit.apply_lora_to_model(mlp, provider), (params, X))


# --- Flax ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a decoder, scanned and checkpointed."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y)
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x))), None


class Decoder(nn.Module):
    """Scan over remat, and one table for the look-up and the logits."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(40, 32)
        layers = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = layers()(table(tokens), None)
        return table.attend(x)


def linen_of(model, provider, x, stats=None):
    params = model.init(jax.random.key(0), x)["params"]
    plan = fewbit.plan(model, provider, x)
    small = fewbit.quantize_params(params, plan, stats)
    quantized = fewbit.quantize_model(model, provider)

    def run(params, x):
        return quantized.apply({"params": params}, x)

    return House(plan, run, (small, x))


def linen():
    rules = [W8A8.replace(module_path=".*(Dense|query|key|value|out).*"), INT4]
    return linen_of(Decoder(), PtqProvider(rules), jnp.array([[1, 2, 3, 4]]))


def linen_static():
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    rules = [W8A8.replace(act_static_scale=True)]
    params = model.init(jax.random.key(0), X)["params"]
    stats = fewbit.calibrate(model, rules, {"params": params}, [X], progress=False)
    return linen_of(model, PtqProvider(rules), X, stats)


class Net(nnx.Module):
    """A convolution, a normalization and two products."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)])

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        for layer in self.layers:
            x = layer(x)
        return x


IMAGES = normal(10, 2, 8, 8, 3)


def nnx_of(plan, model, *args):
    graph, state = nnx.split(model)

    def run(state, *args):
        return nnx.merge(graph, state)(*args)

    return House(plan, run, (state, *args))


def squared(model, x):
    return jnp.square(model(x)).mean()


def nnx_served():
    model = Net(nnx.Rngs(0))
    plan = fewbit.plan(model, [W8A8], IMAGES)
    small = fewbit.quantize_model(model, PtqProvider([W8A8]), IMAGES)
    return nnx_of(plan, small, IMAGES)


def nnx_trained():
    model = Net(nnx.Rngs(0))
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = fewbit.plan(model, QtProvider([rule]), IMAGES)
    step = fewbit.quantize_model(model, QtProvider([rule]), IMAGES)
    graph, state = nnx.split(step)

    def run(state, x):
        model = nnx.merge(graph, state)
        return nnx.grad(squared)(model, x), nnx.state(model)

    return House(plan, run, (state, IMAGES))


def nnx_lora():
    model = Net(nnx.Rngs(0))
    provider = LoraProvider(rank=2, alpha=2.0, weight_qtype="int4")
    plan = fewbit.plan(model, provider, IMAGES)
    adapted = fewbit.apply_lora_to_model(model, provider, IMAGES, rngs=nnx.Rngs(1))
    return nnx_of(plan, adapted, IMAGES)


# --- Keras ---------------------------------------------------------------------------------------


def keras_of(config):
    import keras

    import fewbit.keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    plan = fewbit.plan(net, config)
    is_static = isinstance(config, fewbit.keras.StaticQuantConfig)
    small = fewbit.keras.quantize_model(net, config, (lambda m: m(IMAGES)) if is_static else None)
    trained, rest = ([v.value for v in vs] for vs in split(small))

    def run(trained, rest, x):
        return small.stateless_call(trained, rest, x)[0]

    return House(plan, run, (trained, rest, IMAGES))


def split(model):
    return model.trainable_variables, model.non_trainable_variables


def keras_dynamic():
    from fewbit.keras import DynamicQuantConfig

    return keras_of(DynamicQuantConfig(weight_dtype="int8", activation_dtype="int8"))


def keras_static():
    from fewbit.keras import StaticQuantConfig

    return keras_of(StaticQuantConfig(weight_dtype="fp8_e4m3", activation_dtype="fp8_e4m3"))


HOUSES = {
    make.__name__: make
    for make in (
        *(dense, scanned, mixed, static, trained, delayed, lora),
        *(linen, linen_static, nnx_served, nnx_trained, nnx_lora, keras_dynamic, keras_static),
    )
}
