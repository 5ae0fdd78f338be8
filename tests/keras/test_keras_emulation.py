"""Emulated int8 against Neural Compressor's formulas, written out in float64, and where it differs.

The library itself is run beside fewbit in test_peers_keras.py.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import error_of, quantized, sample

import fewbit.keras as fk

CONFIGS = [
    fk.StaticQuantConfig("int8", emulate=True),
    fk.DynamicQuantConfig("int8", emulate=True),
]
BOTH = pytest.mark.parametrize("config", CONFIGS, ids=["static", "dynamic"])


def with_zero_point(x, low=None, high=None):
    """scale = (max - min) / 255, zero point = round(-128 - min / scale): its activations."""
    x = np.asarray(x, "float64")
    low, high = x.min() if low is None else low, x.max() if high is None else high
    scale = np.float64(np.float32((high - low) / 255))
    zero = np.round(-128 - low / scale)
    return (np.clip(np.round(x / scale) + zero, -128, 127) - zero) * scale


def symmetric(x):
    """scale = max|x| / 127: its weights, and the operands of Gemma3's attention."""
    x = np.asarray(x, "float64")
    scale = np.float64(np.float32(np.abs(x).max() / 127))
    return np.clip(np.round(x / scale), -128, 127) * scale


def dense_on(x, config):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, use_bias=False)])
    kernel = np.asarray(model.layers[0].kernel)
    return np.asarray(quantized(model, config, x)(x)), symmetric(kernel)


@BOTH
@pytest.mark.parametrize("kind", ["both signs", "relu", "negative relu"])
def test_activations_around_zero(config, kind):
    x = sample(6, 32)
    x = {"both signs": x, "relu": np.maximum(x, 0), "negative relu": np.minimum(x, 0)}[kind]
    y, kernel = dense_on(x, config)
    assert error_of(y, with_zero_point(x) @ kernel) < 2e-5


@BOTH
@pytest.mark.parametrize("sign", [1, -1])
def test_activations_away_from_zero_have_a_range_that_holds_it(config, sign):
    x = sign * np.random.default_rng(0).uniform(1, 2, (6, 32)).astype("float32")
    y, kernel = dense_on(x, config)
    edges = {"low": min(x.min(), 0.0), "high": max(x.max(), 0.0)}
    assert error_of(y, with_zero_point(x, **edges) @ kernel) < 2e-5
    assert error_of(y, with_zero_point(x) @ kernel) > 1e-4  # the reference's, which is finer


@BOTH
def test_constant_activations_are_kept(config):
    x = np.full((6, 32), 3.0, "float32")  # there scale 0, and zeros out
    y, kernel = dense_on(x, config)
    assert error_of(y, np.float64(x) @ kernel) < 2e-5


class _Attends(layers.Layer):
    def build(self, shape):
        super().build(shape)

    def call(self, x):
        scores = keras.ops.softmax(keras.ops.einsum("btd,bsd->bts", x, x))
        return keras.ops.einsum("bts,bsd->btd", scores, x)


class CachedGemma3Attention(_Attends):
    """By its name, which is all that is known of it, KerasHub's."""


class PlainAttention(_Attends):
    """A layer of somebody's own."""


def attend(x, rounded):
    scores = np.einsum("btd,bsd->bts", rounded(x), rounded(x))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    return np.einsum("bts,bsd->btd", rounded(scores), rounded(x))


@BOTH
@pytest.mark.parametrize(
    "cls, rounded", [(CachedGemma3Attention, symmetric), (PlainAttention, with_zero_point)]
)
def test_operands_of_attention(config, cls, rounded):
    x = 3 * sample(2, 5, 16)  # values far outside of the softmax's range
    model = keras.Sequential([keras.Input((5, 16)), cls(), layers.Dense(4, name="out")])
    layer = model.layers[0]
    quantized(model, config, x)
    assert type(layer).__name__.endswith(cls.__name__) and type(layer) is not cls
    wanted = attend(np.float64(x), rounded)
    # In float32 a score between two codes may go to the other one.
    assert error_of(layer(x), wanted) < (2e-3 if rounded is symmetric else 1e-2)
    assert error_of(layer(x), attend(np.float64(x), lambda x: x)) > 1e-4


def test_a_method_that_is_given_is_taken():
    model = keras.Sequential([keras.Input((5, 16)), CachedGemma3Attention(), layers.Dense(4)])

    def method(config):
        made = fk.plan(model, config)
        site = next(row for row in made.sites if row.site.op == "einsum")
        return made.rules[site.rule].act_calibration_method

    assert method(CONFIGS[1]).startswith("absmax,1.0039")
    assert method(CONFIGS[1].replace(act_calibration_method="minmax")) == "minmax"
