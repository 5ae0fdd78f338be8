"""Training on quantized Keras models: adapters train, the rest is refused with what to do."""

import keras
import numpy as np
import pytest
from keras import layers as L

import fewbit.keras as fk
from fewbit.keras.layers._variables import own_variables
from fewbit.qarray import dequantize

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 32)).astype("float32")
Y = (X @ RNG.normal(size=(32, 4))).astype("float32")
INT8 = fk.DynamicQuantConfig("int8", weight_scale_granularity="per_channel")


def net(compiled=True):
    layers = [keras.Input((32,)), L.Dense(48, activation="relu", name="up"), L.Dense(4, name="out")]
    model = keras.Sequential(layers)
    if compiled:
        model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    return model


def quantized(model, config=INT8, samples=X):
    data = [samples] if isinstance(config, fk.StaticQuantConfig) else None
    return fk.quantize_model(model, config, data, progress=False)


def codes(layer):
    return np.asarray(layer._fewbit.stored["kernel"].value().array.qvalue)


def test_fit_says_what_to_do_and_evaluation_works():
    model = quantized(net())
    for train in (lambda: model.fit(X, Y), lambda: model.train_on_batch(X, Y)):
        with pytest.raises(ValueError) as error:
            train()
        text = str(error.value)
        assert text.startswith("Sequential 'sequential")
        assert "is quantized, and the weights of 'sequential" in text
        assert "/up' and 1 more layers are stored on few" in text
        assert "layer.enable_lora(rank=4)" in text and "backbone.enable_lora(rank=4)" in text
        assert "layer.trainable = False" in text
        assert "fewbit.QtProvider(rules)), fit, then fewbit.to_ptq(model)" in text
    assert model.evaluate(X, Y, verbose=0) > 0 and model.predict(X, verbose=0).shape == (64, 4)


def functional(compiled=True):
    inputs = keras.Input((32,))
    return keras.Model(inputs, L.Dense(4, name="head")(net(False)(inputs)))


@pytest.mark.parametrize("make", [net, functional])
def test_fit_of_a_loaded_model_says_the_same(make, tmp_path):
    saved = quantized(make(compiled=False))
    saved.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert all(isinstance(each, type(make())) for each in (saved, model))
    model.compile(loss="mse")
    first = [layer for layer in model._flatten_layers() if hasattr(layer, "_fewbit")][0]
    words = "is quantized, and the weights of '.*' and [12] more layers are stored on few"
    for train in (lambda: model.fit(X, Y), lambda: model.train_on_batch(X, Y)):
        with pytest.raises(ValueError, match=words):
            train()
    np.testing.assert_array_equal(model.predict(X, verbose=0), saved.predict(X, verbose=0))
    assert model.evaluate(X, Y, verbose=0) > 0
    first.enable_lora(2)
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    losses = model.fit(X, Y, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_what_is_float_around_frozen_quantized_layers_trains():
    model = keras.Sequential([keras.Input((32,)), L.Dense(48, name="up"), L.Dense(4, name="head")])
    config = fk.DynamicQuantConfig("int8", exclude_list=["head"])
    model = quantized(model, config)
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    with pytest.raises(ValueError, match="weights of '.*up' are stored"):
        model.fit(X, Y)
    model.get_layer("up").trainable = False
    losses = model.fit(X, Y, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "config",
    [
        INT8,
        fk.StaticQuantConfig("fp8"),
        fk.DynamicQuantConfig("int4", activation_dtype=None, group_size=16),
    ],
    ids=["int8", "static fp8", "int4 weights"],
)
def test_adapters_train_beside_weights_that_stay(config):
    model = quantized(net(), config)
    before = model.predict(X, verbose=0)
    for layer in model.layers:
        layer.enable_lora(4)
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    np.testing.assert_array_equal(before, model.predict(X, verbose=0))  # B starts as zeros
    kept = [codes(layer) for layer in model.layers]
    assert {v.name for v in model.trainable_variables} == {
        *("bias", "lora_kernel_a", "lora_kernel_b")
    }
    losses = model.fit(X, Y, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    for old, layer in zip(kept, model.layers, strict=True):
        np.testing.assert_array_equal(old, codes(layer))


def merged(layer, name="kernel"):
    """The float weight that a layer with its adapter stands for, in float64."""
    q = layer._fewbit.stored[name].value().array
    a, b = (np.asarray(getattr(layer, f"lora_{name}_{end}"), np.float64) for end in "ab")
    return np.asarray(dequantize(q), np.float64) + layer.lora_alpha / layer.lora_rank * (a @ b)


WEIGHTS = fk.DynamicQuantConfig("int8", activation_dtype=None)


@pytest.mark.parametrize(
    ("layer", "product"),
    [
        (L.Dense(4), "ab,bc->ac"),
        (L.EinsumDense("ab,cb->ac", 4), "ab,cb->ac"),
        (L.EinsumDense("ab,bcd->acd", (2, 8)), "ab,bcd->acd"),
    ],
    ids=["Dense", "EinsumDense, last axis summed", "EinsumDense"],
)
def test_an_adapter_is_added_to_the_weight(layer, product):
    model = keras.Sequential([keras.Input((32,)), layer])
    fk.quantize_model(model, WEIGHTS, progress=False)
    layer.enable_lora(3, lora_alpha=6, b_initializer="he_uniform")
    expected = np.einsum(product, X.astype(np.float64), merged(layer))
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=0, atol=2e-5)


def test_an_adapter_of_a_table_is_added_to_look_ups_and_logits():
    ids = keras.Input((6,), dtype="int32")
    table = L.ReversibleEmbedding(40, 32, logit_soft_cap=5.0)
    model = keras.Model(ids, [rows := table(ids), table(rows, reverse=True)])
    fk.quantize_model(model, WEIGHTS, progress=False)
    table.enable_lora(3, b_initializer="he_uniform")
    batch = RNG.integers(0, 40, (3, 6)).astype("int32")
    found, logits = model.predict(batch, verbose=0)
    weight = merged(table, "embeddings")
    np.testing.assert_allclose(found, weight[batch], rtol=0, atol=2e-5)
    capped = 5 * np.tanh(weight[batch] @ weight.T / 5)
    np.testing.assert_allclose(logits, capped, rtol=0, atol=2e-4)


def test_a_layer_with_an_adapter_can_be_quantized():
    model = net()
    model.get_layer("up").enable_lora(4, b_initializer="he_uniform")
    before = model.predict(X, verbose=0)
    quantized(model)
    layer = model.get_layer("up")
    assert type(layer).__name__ == "QDynamicDense"
    assert [v.name for v in own_variables(layer) if v.trainable] == [
        *("bias", "lora_kernel_a", "lora_kernel_b")
    ]
    error = np.linalg.norm(model.predict(X, verbose=0) - before) / np.linalg.norm(before)
    assert 0 < error < 0.03


def test_a_twin_is_its_own_when_it_trains():
    model = net()
    twin = fk.quantize_model(model, INT8, inplace=False, progress=False)
    before = model.predict(X, verbose=0)
    twin.layers[0].enable_lora(2)
    twin.compile(optimizer="sgd", loss="mse")
    twin.fit(X, Y, epochs=1, verbose=0)
    np.testing.assert_array_equal(before, model.predict(X, verbose=0))
    assert [layer.path for layer in twin.layers] == [layer.path for layer in model.layers]


@pytest.mark.parametrize("alpha", [None, 9.0])
def test_adapters_are_saved_beside_the_weights(alpha, tmp_path):
    model = quantized(net(compiled=False))
    for layer in model.layers:
        layer.enable_lora(3, lora_alpha=alpha, b_initializer="he_uniform")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [layer.lora_alpha for layer in loaded.layers] == [alpha or 3] * 2
    np.testing.assert_array_equal(model.predict(X, verbose=0), loaded.predict(X, verbose=0))
    loaded.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    losses = loaded.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")  # KerasHub says it of every fit
def test_adapters_of_a_keras_hub_backbone_train():
    from keras_models import prompt_batch, random_gemma3

    model = random_gemma3("tiny", sequence_length=None)
    config = fk.DynamicQuantConfig("int8", weight_scale_granularity="per_channel")
    fk.quantize_model(model, config, progress=False)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    batch = prompt_batch(sizes=(20, 20))
    targets = np.roll(batch["token_ids"], -1, axis=1)
    with pytest.raises(ValueError, match="backbone.enable_lora"):
        model.fit(batch, targets)
    model.backbone.enable_lora(4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, sampler="greedy")
    assert all("lora" in variable.name for variable in model.trainable_variables)
    losses = model.fit(batch, targets, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.05
