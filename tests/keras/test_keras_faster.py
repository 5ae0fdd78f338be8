"""What makes a quantized Gemma3 generate faster does not change what it says."""

import jax
import keras
import keras_hub
import numpy as np
import pytest
from keras_models import generated, prompt_batch, random_gemma3, step_logits

import fewbit.keras
from fewbit import kernels
from fewbit.keras.generate import _cache
from fewbit.keras.generate._cache import FloatCacheAttention, PromptInPieces

CONFIG = fewbit.keras.DynamicQuantConfig("int8", activation_dtype=None)
LENGTH = 180
native = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)


def quantized(**changes):
    model = random_gemma3("tiny", sequence_length=None, num_layers=2, **changes)
    return fewbit.keras.quantize_model(model, CONFIG, progress=False)


@pytest.fixture(scope="module")
def model():
    return quantized()


@pytest.fixture
def as_keras_hub(monkeypatch):
    """Switches off what is faster, one by one."""

    def off(attention=False, prompt=False):
        if attention:
            monkeypatch.setattr(_cache, "_one_token", lambda *args: False)
        if prompt:
            monkeypatch.setattr(_cache, "_FIRST", LENGTH)

    return off


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


def test_who_gets_it(model):
    assert isinstance(model, PromptInPieces) and isinstance(model, keras_hub.models.Gemma3CausalLM)
    assert isinstance(model.backbone.transformer_layers[0].attention, FloatCacheAttention)

    class Mine(keras_hub.models.Gemma3CausalLM):
        pass

    backbone = random_gemma3("tiny", sequence_length=None, num_layers=1).backbone
    own = Mine(backbone=backbone, preprocessor=None)
    fewbit.keras.quantize_model(own, CONFIG, progress=False)
    assert not isinstance(own, PromptInPieces)  # which may do other things with its cache


@native
@pytest.mark.parametrize(
    "changes",
    ({}, dict(use_sliding_window_attention=False, attention_logit_soft_cap=5.0)),
    ids=("sliding window", "soft cap"),
)
def test_one_token_over_a_float_cache(changes, as_keras_hub, monkeypatch):
    model = quantized(**changes)
    inputs = prompt_batch(60, (5, 30))
    calls = []
    attention = kernels.cached_attention
    monkeypatch.setattr(
        kernels, "cached_attention", lambda *a, **k: calls.append(a) or attention(*a, **k)
    )
    logits, cache = step_logits(model, inputs, steps=20)
    assert len(calls) == 2  # layers, in the one trace of a step
    as_keras_hub(attention=True)
    expected, float_cache = step_logits(model, inputs, steps=20)
    near(logits, expected)
    jax.tree.map(near, cache, float_cache)


@pytest.mark.parametrize("sizes", ((3, 9), (32, 31), (33, 2), (170, 70), (180, 180)))
def test_prompts_in_pieces(model, sizes, as_keras_hub):
    inputs = prompt_batch(LENGTH, sizes)
    mask = inputs["padding_mask"]

    def passed():
        out = model._build_cache(inputs["token_ids"], None, None, mask, None)
        return [np.asarray(x)[mask] for x in (out[0], *(a for pair in out[1] for a in pair))]

    found = passed()
    as_keras_hub(prompt=True)
    for one, other in zip(found, passed(), strict=True):
        near(one, other)


def test_short_prompts_pass_over_few_tokens(model, monkeypatch):
    tokens = []
    whole = keras_hub.models.Gemma3CausalLM.call_with_cache

    def count(self, token_ids, *args, **kwargs):
        tokens.append(token_ids.shape[1])
        return whole(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(keras_hub.models.Gemma3CausalLM, "call_with_cache", count)
    inputs = prompt_batch(LENGTH, (5, 20))
    model._build_cache(inputs["token_ids"], None, None, inputs["padding_mask"], None)
    assert tokens == [32, 128]  # traced; the loop around the second makes no trip
    tokens.clear()
    short = prompt_batch(50, (5, 20))
    model._build_cache(short["token_ids"], None, None, short["padding_mask"], None)
    assert tokens == [50]


@pytest.mark.parametrize("int8_cache", (False, True))
def test_generated_tokens(model, int8_cache, as_keras_hub):
    inputs = prompt_batch(100, (5, 40))
    try:
        fewbit.keras.quantize_kv_cache(model, "int8" if int8_cache else None)
        tokens = generated(model, keras_hub.samplers.GreedySampler(), inputs)
        as_keras_hub(attention=True, prompt=not int8_cache)
        expected = generated(model, keras_hub.samplers.GreedySampler(), inputs)
    finally:
        fewbit.keras.quantize_kv_cache(model, None)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_loaded_models_have_it(tmp_path):
    model = quantized()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    assert isinstance(loaded, PromptInPieces)
    assert isinstance(loaded.backbone.transformer_layers[1].attention, FloatCacheAttention)
    inputs, sampler = prompt_batch(80, (5, 40)), keras_hub.samplers.GreedySampler()
    np.testing.assert_array_equal(
        generated(loaded, sampler, inputs), generated(model, sampler, inputs)
    )


def test_other_types_take_keras_hub_s_way():
    model = quantized(dtype="bfloat16")
    logits, cache = step_logits(model, prompt_batch(70, (5, 40)))
    assert np.isfinite(logits).all() and cache[0][0].dtype == "bfloat16"
