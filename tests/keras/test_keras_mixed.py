"""Keras models under mixed precision policies: the cast comes after quantization, as in serving."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import error_of, sample, two_layers
from keras_remembering import DELAYED, STATIC

import fewbit
import fewbit.keras
from fewbit import QtProvider, QtRule

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
POLICIES = ["mixed_bfloat16", "mixed_float16"]
RULES = {
    "qat": QtRule(weight_qtype="int8", act_qtype="int8"),
    "full": QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"),
    "groups": QtRule(weight_qtype="int4", act_qtype="int8", tile_size=32),
    "static": STATIC,
    "delayed": DELAYED,
}


def of_dense(policy):
    x = keras.Input((4, 32))
    y = layers.Dense(64, activation="relu", dtype=policy)(x)
    y = layers.EinsumDense("btd,dhk->bthk", (None, 2, 32), bias_axes="hk", dtype=policy)(y)
    return keras.Model(x, y), sample(8, 4, 32)


def of_images(policy):
    x = keras.Input((8, 8, 32))
    y = layers.Conv2D(32, 3, activation="relu", dtype=policy)(x)
    y = layers.BatchNormalization(dtype=policy)(y)
    y = layers.DepthwiseConv2D(3, dtype=policy)(y)
    return keras.Model(x, y), sample(8, 8, 8, 32)


def of_words(policy):
    x = keras.Input((8,), dtype="int32")
    y = layers.Embedding(50, 64, dtype=policy)(x)
    # JAX has no fused attention of float16 on a CPU, and Keras has none with dropout.
    dropout = 0.1 if policy == "mixed_float16" else 0.0
    y = layers.MultiHeadAttention(2, 32, dropout=dropout, dtype=policy)(y, y)
    y = layers.Dense(32, dtype=policy)(y)
    return keras.Model(x, y), np.arange(64, dtype="int32").reshape(8, 8) % 50


NETS = {"dense": of_dense, "images": of_images, "words": of_words}


def trained(make, policy, rule):
    keras.utils.set_random_seed(0)
    model, x = make(policy)
    model = fewbit.quantize_model(model, QtProvider([rule]))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    target = sample(*model(x).shape, seed=1)
    losses = model.fit(x, target, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    return model, x


def same(model, x, wanted):
    found = model.predict(x, verbose=0)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("rule", RULES)
def test_what_serves_is_what_was_trained(rule, net, policy):
    model, x = trained(NETS[net], policy, RULES[rule])
    wanted = model.predict(x, verbose=0)
    assert wanted.dtype == policy.removeprefix("mixed_") and np.abs(wanted).max() > 0.02
    same(fewbit.to_ptq(model, progress=False), x, wanted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["groups", "static", "delayed"])
def test_files_change_nothing(rule, policy, tmp_path):
    model, x = trained(of_dense, policy, RULES[rule])
    wanted = model.predict(x, verbose=0)
    model.save(tmp_path / "trained.keras")
    model = keras.saving.load_model(tmp_path / "trained.keras")
    same(model, x, wanted)
    model = fewbit.to_ptq(model, progress=False)
    same(model, x, wanted)
    model.save(tmp_path / "served.keras")
    same(keras.saving.load_model(tmp_path / "served.keras"), x, wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_after_and_during_training_weights_are_quantized_alike(policy):
    keras.utils.set_random_seed(0)
    rule, x = RULES["groups"], sample(4, 32)
    model = two_layers(dtype=policy)
    later = fewbit.keras.clone_model(model)
    later = fewbit.keras.quantize_model(later, [fewbit.QuantizationRule(**of_serving(rule))])
    now = fewbit.to_ptq(fewbit.quantize_model(model, QtProvider([rule])), pack=True, progress=False)
    same(later, x, now.predict(x, verbose=0))


def of_serving(rule):
    return dict(weight_qtype=rule.weight_qtype, act_qtype=rule.act_qtype, tile_size=rule.tile_size)


@pytest.mark.parametrize("make", [QtProvider, fewbit.PtqProvider], ids=["training", "serving"])
def test_the_batch_that_planning_looks_at_is_like_any_other(make):
    model, x = two_layers(dtype="mixed_bfloat16"), sample(4, 32)
    wanted = model(x)
    model = fewbit.quantize_model(model, make([RULES["qat"]]))
    one, all_of_them = model(x[:1]), model(x)
    assert one.dtype == all_of_them.dtype == "bfloat16"
    np.testing.assert_array_equal(one, all_of_them[:1])
    assert error_of(all_of_them, wanted) < 0.04


@keras.saving.register_keras_serializable("fewbit-tests")
class Outer(layers.Layer):
    """Mixed precision outside, full precision inside."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 32), name="kernel")
        self.inner = layers.Dense(32, dtype="float32", name="inner")
        self.inner.build(input_shape)

    def call(self, x):
        return keras.ops.matmul(x, self.kernel), self.inner(x)


def test_a_layer_inside_keeps_its_own_precision():
    x = keras.Input((32,))
    model = keras.Model(x, Outer(dtype="mixed_bfloat16", name="outer")(x))
    x = sample(4, 32)
    wanted = model.predict(x, verbose=0)
    rule = RULES["qat"].replace(module_path="outer")
    model = fewbit.quantize_model(model, QtProvider([rule]))
    trains = model.predict(x, verbose=0)
    serves = fewbit.to_ptq(model, progress=False).predict(x, verbose=0)
    assert 0 < error_of(trains[0], wanted[0]) < 0.04
    np.testing.assert_array_equal(serves[0], trains[0])
    for found in (trains[1], serves[1]):
        assert found.dtype == "float32"
        np.testing.assert_array_equal(found, wanted[1])
