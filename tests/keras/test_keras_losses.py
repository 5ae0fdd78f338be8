"""Regularizers, activity regularizers and `add_loss` of Keras models, quantized and trained so."""

import keras
import numpy as np
import pytest
from keras import layers as L

import fewbit
import fewbit.keras as fk

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 16)).astype("float32")
Y = RNG.normal(size=(16, 4)).astype("float32")
INT8 = fk.DynamicQuantConfig("int8", weight_scale_granularity="per_channel")
QAT = fewbit.QtProvider([fewbit.QtRule(weight_qtype="int8", act_qtype="int8")])


def regularized():
    keras.utils.set_random_seed(0)
    first = L.Dense(
        32,
        kernel_regularizer="l2",
        bias_regularizer="l1",
        bias_initializer="ones",
        activity_regularizer=keras.regularizers.L2(0.5),
        name="up",
    )
    second = L.Dense(4, kernel_regularizer=keras.regularizers.L1(0.1), name="down")
    return compiled(keras.Sequential([keras.Input((16,)), first, second]))


def recurrent():
    keras.utils.set_random_seed(0)
    cell = L.LSTM(8, kernel_regularizer="l2", recurrent_regularizer="l1")
    inputs = keras.Input((16,))
    return compiled(keras.Model(inputs, L.Dense(4)(cell(L.Reshape((4, 4))(inputs)))))


def compiled(model):
    model.compile(loss="mse", optimizer="sgd")
    return model


def quantized(model, config=INT8, **kwargs):
    return compiled(fk.quantize_model(model, config, progress=False, **kwargs))


def total(model):
    return float(sum(map(np.asarray, model.losses)))


@keras.saving.register_keras_serializable(package="fewbit_tests")
class Router(L.Layer):
    """A layer that adds losses of its own, as mixtures of experts do, inside and outside."""

    def build(self, input_shape):
        self.kernel = self.add_weight(name="kernel", shape=(input_shape[-1], 4))
        self.inner = L.Dense(4, activity_regularizer=keras.regularizers.L2(0.5), name="inner")
        self.inner.build(input_shape)

    def call(self, x):
        out = keras.ops.matmul(x, self.kernel)
        self.add_loss(keras.ops.mean(keras.ops.square(out)))
        return out + self.inner(x)


def routed():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    return compiled(keras.Model(inputs, Router(name="router")(inputs)))


@pytest.mark.parametrize("make", [regularized, recurrent])
@pytest.mark.parametrize("constant", [False, True])
def test_regularizers_of_quantized_weights_count(make, constant, tmp_path):
    model = make()
    config = fk.DynamicQuantConfig("int8", const_weight=constant)
    small = quantized(model, config, inplace=False)
    assert len(small.losses) == len(model.losses)
    assert total(small) == pytest.approx(total(model), rel=0.02)
    wanted = model.evaluate(X, Y, verbose=0)
    assert small.evaluate(X, Y, verbose=0) == pytest.approx(wanted, rel=0.02)
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    assert total(loaded) == total(small)
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(small.evaluate(X, Y, verbose=0))


def test_the_loss_is_that_of_the_decoded_weight():
    small = quantized(regularized())
    up, down = (np.asarray(layer.kernel.value, np.float64) for layer in small.layers)
    bias = np.asarray(small.layers[0].bias.value, np.float64)
    wanted = sorted([0.01 * (up**2).sum(), 0.1 * np.abs(down).sum(), 0.01 * np.abs(bias).sum()])
    np.testing.assert_allclose(sorted(map(float, small.losses)), wanted, rtol=1e-5)


def test_frozen_layers_add_no_regularizer_as_in_keras():
    model = regularized()
    small = quantized(model, inplace=False)
    for each in (model, small):
        each.layers[0].trainable = False
    assert len(small.losses) == len(model.losses) == 1
    for each in (model, small):
        each.layers[1].enable_lora(2)
        adapter = each.layers[1].lora_kernel_a.value  # to which Keras gives the kernel's
        np.testing.assert_allclose(each.losses, [0.1 * np.abs(adapter).sum(), 0], rtol=1e-5)


@pytest.mark.parametrize("provider", [INT8, QAT])
def test_losses_of_a_call_are_kept(provider, tmp_path):
    model = routed()
    wanted = model.evaluate(X, Y, verbose=0)
    small = quantized(model, provider, inplace=False)
    assert type(small.get_layer("router")).__name__.endswith("Router")
    assert type(small.get_layer("router")) is not Router
    assert small.evaluate(X, Y, verbose=0) == pytest.approx(wanted, rel=0.03)
    model(X), small(X)
    assert len(small.losses) == len(model.losses) == 2
    assert total(small) == pytest.approx(total(model), rel=0.03)
    small(X)
    assert len(small.losses) == 2
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(small.evaluate(X, Y, verbose=0))


def test_training_quantized_trains_on_the_losses():
    model, small = regularized(), quantized(regularized(), QAT)
    assert total(small) == pytest.approx(total(model))
    wanted = model.fit(X, Y, epochs=2, verbose=0).history["loss"]
    found = small.fit(X, Y, epochs=2, verbose=0).history["loss"]
    assert found == pytest.approx(wanted, rel=0.02)
    assert total(small) < 0.999 * total(regularized())
    served = compiled(fewbit.to_ptq(small))
    assert total(served) == pytest.approx(total(small), rel=0.02)


def test_losses_of_a_call_train():
    model, small = routed(), quantized(routed(), QAT)
    wanted = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    found = small.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert found == pytest.approx(wanted, rel=0.03) and found[-1] < found[0]
