"""Fields and rules that a Keras model cannot follow: nothing is left out without a word."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import sample, two_layers

import fewbit
import fewbit.keras as fk

FUSED = fk.DynamicQuantConfig("int8", dot_product_attention_enable=True)
TRAINING = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


def attention():
    x = keras.Input((6, 32))
    hidden = layers.MultiHeadAttention(2, 16, name="first")(x, x)
    return keras.Model(x, layers.MultiHeadAttention(2, 16, name="second")(hidden, hidden))


@pytest.mark.parametrize("run", [fk.quantize_model, fewbit.quantize_model, fk.plan, fewbit.plan])
@pytest.mark.parametrize(
    "rules", [[TRAINING], (fewbit.QuantizationRule(module_path="net/up"), TRAINING)]
)
def test_a_list_of_training_rules_names_the_provider(run, rules):
    model = two_layers()
    with pytest.raises(TypeError) as error:
        run(model, rules)
    text = str(error.value)
    assert text.startswith(f"{TRAINING!r} says how a model trains")
    assert "quantize_model(model, fewbit.QtProvider(rules)), fit, then fewbit.to_ptq(model)" in text
    assert "fewbit.PtqProvider(rules)" in text
    assert type(model.layers[0]) is layers.Dense


def test_what_the_message_says_works():
    x = sample(4, 32)
    trains = fk.quantize_model(two_layers(), fewbit.QtProvider([TRAINING]), progress=False)
    assert type(trains.layers[0]).__name__ == "QTrainDense"
    serves = fk.quantize_model(two_layers(), fewbit.PtqProvider([TRAINING]), progress=False)
    assert type(serves.layers[0]).__name__ == "QDynamicDense"
    assert np.isfinite(serves(x)).all()


def test_a_field_about_attention_that_stays_float_is_told():
    with pytest.warns(UserWarning) as caught:
        fk.quantize_model(attention(), FUSED, progress=False)
    (text,) = [str(each.message) for each in caught]
    assert "dot_product_attention_enable=True decides nothing" in text
    assert "those of 'first' and 1 more stay float" in text
    assert "quantize_attention=True" in text
    with pytest.warns(UserWarning, match="is one of attention. Leave the field out"):
        fk.plan(two_layers(), FUSED)


@pytest.mark.parametrize("field", ["quantize_attention", "emulate"])
def test_a_field_that_decides_is_not_told_of(field):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = fk.plan(attention(), FUSED.replace(**{field: True}))
    assert {row.site.path for row in made.sites} > {"first", "second"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (fk.DynamicQuantConfig("int8", "int8"), "DynamicQuantConfig takes no range from data"),
        ([fewbit.QuantizationRule(weight_qtype="int8")], "this list of rules takes no range"),
        (fewbit.QtProvider([TRAINING]), "QtProvider takes no range from data"),
    ],
)
def test_data_that_nothing_needs_is_told(config, named):
    with pytest.warns(UserWarning, match=named):
        fk.quantize_model(two_layers(), config, sample(4, 32), progress=False)
