"""Masks reach quantized layers and come out of them; attention takes the way the config says."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import class_names, error_of, quantized, sample

import fewbit
from fewbit.keras import DynamicQuantConfig, StaticQuantConfig

INT8 = DynamicQuantConfig("int8")
PRODUCTS = StaticQuantConfig("int8", quantize_attention=True)
IDS = np.array([[1, 2, 3, 0], [4, 0, 0, 0]], "int32")
KNOWN = IDS != 0


@pytest.mark.parametrize("table", [layers.Embedding, layers.ReversibleEmbedding])
def test_masks_of_tables_reach_what_reads_them(table):
    ids = keras.Input((None,), dtype="int32")
    embedding = table(10, 32, mask_zero=True)
    model = keras.Model(ids, layers.LSTM(16)(embedding(ids)))
    wanted = np.asarray(model(IDS))
    quantized(model, INT8)
    assert error_of(model(IDS), wanted) < 0.05
    assert error_of(model.predict(IDS, verbose=0), wanted) < 0.05
    unpadded = np.asarray(model(np.array([[1, 2, 3]], "int32")))
    assert error_of(np.asarray(model(IDS))[:1], unpadded) < 1e-5


class Seen(layers.Layer):
    """Remembers the mask that it was called with."""

    supports_masking = True

    def call(self, x, mask=None):
        self.seen = mask
        return x


@pytest.mark.parametrize("config", [INT8, PRODUCTS, StaticQuantConfig("int8", emulate=True)])
def test_attention_with_padding(config):
    ids = keras.Input((4,), dtype="int32")
    hidden = layers.Embedding(10, 32, mask_zero=True)(ids)
    attended = layers.MultiHeadAttention(2, 16)(hidden, hidden)
    seen = Seen()
    model = keras.Model(ids, seen(layers.Dense(32)(attended)))
    wanted, mask = np.asarray(model(IDS)), np.asarray(seen.seen)
    quantized(model, config, IDS)
    assert ("QStaticMultiHeadAttention" in [type(x).__name__ for x in model.layers]) == (
        config is not INT8
    )
    y = np.asarray(model(IDS))
    assert np.array_equal(np.asarray(seen.seen), mask) and np.array_equal(mask, KNOWN)
    assert error_of(y[KNOWN], wanted[KNOWN]) < 0.05


def test_attention_with_masks_of_its_own_and_scores():
    x, mask = keras.Input((6, 32)), keras.Input((6, 6), dtype="bool")
    layer = layers.MultiHeadAttention(2, 16)
    model = keras.Model([x, mask], layer(x, x, attention_mask=mask, use_causal_mask=True))
    inputs = [sample(2, 6, 32), np.broadcast_to(~np.eye(6, k=-1, dtype=bool), (2, 6, 6))]
    wanted = np.asarray(model(inputs))
    quantized(model, PRODUCTS, inputs)
    assert error_of(model(inputs), wanted) < 0.05
    out, scores = layer(inputs[0], inputs[0], return_attention_scores=True)
    assert out.shape == (2, 6, 32) and scores.shape == (2, 2, 6, 6)
    np.testing.assert_allclose(np.asarray(scores).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "GroupQueryAttention"])
@pytest.mark.parametrize("enable", [False, True])
def test_dot_product_attention_enable(kind, enable, monkeypatch):
    calls = []
    original = keras.ops.dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(keras.ops, "dot_product_attention", counted)
    x = keras.Input((6, 32))
    layer = (
        layers.MultiHeadAttention(2, 16)
        if kind == "MultiHeadAttention"
        else layers.GroupQueryAttention(16, 4, 2)
    )
    model = keras.Model(x, layer(x, x, use_causal_mask=True))
    data = sample(2, 6, 32)
    wanted = np.asarray(model(data))
    calls.clear()
    config = DynamicQuantConfig(
        "int8", quantize_attention=True, dot_product_attention_enable=enable
    )
    quantized(model, config)
    assert error_of(model(data), wanted) < 0.05
    assert bool(calls) == enable == layer.dot_product_attention_enable
    assert f"QDynamic{kind.replace('Group', 'Grouped')}" in [type(x).__name__ for x in model.layers]
    assert "_compute_attention" not in vars(layer)


def test_projections_alone_by_default():
    x = keras.Input((6, 32))
    model = keras.Model(x, layers.MultiHeadAttention(2, 16)(x, x))
    assert set(class_names(quantized(model, INT8))) == {"QDynamicEinsumDense"}
    assert not any(
        type(layer).__name__.startswith(("QStatic", "QDynamic")) for layer in model.layers
    )


class Rotated(layers.Layer):
    """Attention of its own, with angles from a layer inside: products of positions stay float."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.angles = Angles()

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(32, 32), name="kernel")

    def call(self, x):
        turned = keras.ops.cos(self.angles(x)) * keras.ops.matmul(x, self.kernel)
        return keras.ops.einsum("btd,bsd->bts", turned, x)


class Angles(layers.Layer):
    def call(self, x):
        positions = keras.ops.arange(x.shape[1], dtype="float32") * 1000.0
        return keras.ops.einsum("t,d->td", positions, keras.ops.ones(32))


def test_products_inside_a_sublayer_are_not_the_layers_own():
    x = sample(2, 5, 32)
    layer = Rotated(name="rotated")
    wanted = np.asarray(layer(x))
    sites = [row.site for row in fewbit.plan(layer, INT8).sites]
    assert [site.path for site in sites] == ["rotated"] * len(sites)
    quantized(layer, INT8)
    assert error_of(layer(x), wanted) < 0.05  # a rounded angle of thousands would be any angle
    assert "call" not in vars(layer.angles)


def test_a_table_that_is_only_looked_up():
    ids = keras.Input((4,), dtype="int32")
    table = layers.ReversibleEmbedding(64, 32)
    model = keras.Model(ids, layers.Dense(32)(table(ids)))
    quantized(model, StaticQuantConfig("int8"), IDS)
    assert class_names(model) == ["QStaticReversibleEmbedding", "QStaticDense"]
    assert table.a_scale is None
    with pytest.raises(ValueError, match="has act_static_scale=True, but there is no"):
        table(sample(1, 4, 32), reverse=True)


@pytest.mark.parametrize("asked", [False, True])
def test_rotary_angles_stay_float_unless_asked(asked):
    keras_hub = pytest.importorskip("keras_hub")
    x = keras.Input((6, 32))
    heads = layers.Reshape((6, 2, 16))(layers.Dense(32)(x))
    model = keras.Model(x, keras_hub.layers.RotaryEmbedding(name="rotary")(heads))
    data = np.random.default_rng(0).normal(size=(2, 6, 32)).astype("float32")
    wanted = model(data)
    config = StaticQuantConfig(
        "int8", weight_scale_granularity="per_channel", quantize_rotary=asked
    )
    fewbit.keras.quantize_model(model, config, [data], progress=False)
    name = "QStaticRotaryEmbedding" if asked else "RotaryEmbedding"
    assert type(model.get_layer("rotary")).__name__ == name
    assert error_of(model(data), wanted) < 0.05
