"""Layers that are called on inputs of several ranks: a range of a whole tensor has none."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import error_of, quantized, sample

import fewbit
import fewbit.keras
from fewbit.keras import StaticQuantConfig

X = sample(4, 3, 32)
STATIC = StaticQuantConfig("int8")


class TwoRanks(keras.Model):
    """One Dense on tokens and on their mean, as experts and their gates are."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(32, name="dense")

    def build(self, input_shape):
        self.dense.build(self.rank_built(input_shape))
        self.built = True

    def rank_built(self, shape):
        return shape

    def call(self, x, training=None):
        pooled = self.dense(keras.ops.mean(x, axis=1), training=training)
        return self.dense(x, training=training) + pooled[:, None]


class BuiltFlat(TwoRanks):
    """Built on the last axis alone, as layers of KerasHub's ViTDet are."""

    def rank_built(self, shape):
        return shape[-1:]


@pytest.mark.parametrize("cls", [TwoRanks, BuiltFlat])
@pytest.mark.parametrize(
    "config",
    [
        STATIC,
        StaticQuantConfig(),
        StaticQuantConfig("int8", emulate=True),
        StaticQuantConfig("int8", act_calibration_method="percentile,99.9"),
        StaticQuantConfig("int8", act_static_reduction="mean"),
    ],
    ids=["int8", "fp8", "emulated", "histogram", "mean"],
)
def test_one_static_range_for_every_rank(cls, config):
    keras.utils.set_random_seed(0)
    model = cls(name="net")
    wanted = np.asarray(model(X))
    quantized(model, config, X)
    assert type(model.dense).__name__ == "QStaticDense" and model.dense.a_scale.shape[-1] == 1
    coarse = config.weight_dtype == "fp8_e4m3" or config.act_static_reduction == "mean"  # clips
    assert error_of(model(X), wanted) < (0.2 if coarse else 0.05)


def test_a_rank_that_calibration_never_saw():
    model = TwoRanks(name="net")
    wanted = np.asarray(model(X))
    fewbit.keras.quantize_model(model, STATIC, lambda model: model.dense(X), progress=False)
    assert error_of(model(X), wanted) < 0.05
    assert error_of(model.dense(X[0, 0][None]), model.dense(X)[0, 0][None]) < 1e-6


def test_training_with_static_ranges_on_two_ranks():
    model = TwoRanks(name="net")
    wanted = np.asarray(model(X))
    rules = [fewbit.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    fewbit.quantize_model(model, fewbit.QtProvider(rules))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, wanted, verbose=0)
    trained = model.predict(X, verbose=0)
    assert error_of(trained, wanted) < 0.05
    served = fewbit.to_ptq(model).predict(X, verbose=0)
    np.testing.assert_array_equal(served, trained)
