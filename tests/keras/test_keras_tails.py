"""Keras: static ranges that a few huge activations set are named, with a config that cures them."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import fewbit
import fewbit.keras as fk

RNG = np.random.default_rng(0)
X = RNG.normal(size=(512, 32)).astype("float32")
MASSIVE = X.copy()
MASSIVE[0, 5] = 800.0
STATIC = fk.StaticQuantConfig("int8")
RULE = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def net():
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(64, activation="tanh", name="up"), layers.Dense(32, name="down")]
    return keras.Sequential([keras.Input((32,)), *hidden], name="net")


def heard(config, data):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = fk.quantize_model(net(), config, [data], progress=False)
    return model, [str(each.message) for each in found]


@pytest.mark.parametrize("config", [STATIC, [RULE]])
def test_ordinary_ranges_are_not_named(config):
    assert heard(config, X)[1] == []


def test_a_far_range_is_named_and_the_config_in_the_message_cures_it():
    model, (text,) = heard(STATIC, MASSIVE)
    assert text.startswith("1 of 2 static ranges lies far beyond almost all of the values")
    assert "net/up" in text
    assert "±800, but 99.9 % within ±" in text
    cure = re.search(r"Measure each batch there: (config \+ .*?\]\))\.", text)
    scope = {"config": STATIC, "DynamicQuantConfig": fk.DynamicQuantConfig}
    cured, quiet = heard(eval(cure[1], scope), MASSIVE)
    assert quiet == []
    kinds = {layer.name: type(layer).__name__ for layer in cured.layers}
    assert kinds == {"up": "QDynamicDense", "down": "QStaticDense"}
    wanted = np.asarray(net()(X[1:]))
    worse, better = (np.abs(np.asarray(m(X[1:])) - wanted).max() for m in (model, cured))
    assert better < worse / 10


def test_rules_are_told_a_rule():
    _, (text,) = heard([RULE], MASSIVE)
    assert "Measure each batch there: put QuantizationRule(module_path='net/up'" in text


def test_clipped_ranges_are_not_named():
    clipped = fk.StaticQuantConfig("int8", act_calibration_method="percentile,99.9")
    assert heard(clipped, MASSIVE)[1] == []
