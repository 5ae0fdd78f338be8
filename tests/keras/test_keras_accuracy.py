"""Accuracy that quantized Keras models keep: trained image models, random Gemma3 logits."""

import keras_trained as nets
import numpy as np
import pytest

import fewbit.keras
from fewbit.keras import StaticQuantConfig

MODELS = pytest.mark.parametrize("make", [nets.cnn, nets.transformer])


@pytest.mark.parametrize("make", [nets.cnn, pytest.param(nets.transformer, marks=pytest.mark.long)])
def test_digits(make):
    train, test = nets.digits()
    model = nets.trained(make, train, epochs=20 if make is nets.cnn else 30)
    exact, lost = nets.lost_points(model, train, test)
    assert exact > 95
    assert {name: points for name, points in lost.items() if points > nets.points(name)} == {}


@pytest.mark.long
@MODELS
def test_fashion_mnist(make):
    train, test = nets.fashion_mnist()
    model = nets.trained(make, train, epochs=3)
    exact, lost = nets.lost_points(model, train, test)
    assert exact > 75  # three epochs of 12,000 images
    assert {name: points for name, points in lost.items() if points > nets.points(name)} == {}


@pytest.mark.long
def test_gemma3_logits():
    bars = {name: bar for name, (_, bar) in nets.GEMMA.items()}
    found = nets.gemma_cosines()
    assert {name: cosine for name, cosine in found.items() if not cosine >= bars[name]} == {}


def tiny_gemma3():
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=128,
        image_size=None,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=128,
        head_dim=32,
        vision_encoder=None,
    )
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


@pytest.mark.parametrize("attention", [pytest.param(False, marks=pytest.mark.long), True])
def test_calibration_by_generate(attention):
    import keras_hub

    model = tiny_gemma3()
    prompt = nets.tokens(2, 12, 128)
    prompt["padding_mask"][:, 6:] = False

    def calibrate(model):
        model.compile(sampler="greedy", run_eagerly=False)
        model.make_generate_function()(prompt, stop_token_ids=None)

    exact = np.asarray(model(nets.tokens(2, 12, 128)), "float64")
    config = StaticQuantConfig(
        "int8", weight_scale_granularity="per_channel", quantize_attention=attention
    )
    twin = fewbit.keras.quantize_model(model, config, calibrate, inplace=False, progress=False)
    assert isinstance(twin, keras_hub.models.Gemma3CausalLM) and twin is not model
    made = [layer for layer in twin._flatten_layers() if hasattr(layer, "_fewbit")]
    assert len(made) == 8 + attention  # the table, q k v o, gate up down; the attention
    for layer in made:
        assert layer._fewbit.scales, layer.path
        for scale in layer._fewbit.scales.values():
            assert np.isfinite(np.asarray(scale)).all() and (np.asarray(scale) > 0).all()
    logits = np.asarray(twin(nets.tokens(2, 12, 128)), "float64")
    cosine = (exact * logits).sum() / np.linalg.norm(exact) / np.linalg.norm(logits)
    assert cosine > 0.995
    assert np.array_equal(np.asarray(model(nets.tokens(2, 12, 128)), "float64"), exact)
    out = twin.make_generate_function()(prompt, stop_token_ids=None)
    assert np.array_equal(np.asarray(out["token_ids"])[:, :6], prompt["token_ids"][:, :6])
