"""Quantized KerasHub models generate: strings, batches, samplers, stop tokens, an int8 cache."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras_models import cosine, generated, prompt_batch, random_gemma3, step_logits

import fewbit.keras
from fewbit.keras.generate._cache import as_codes, grouped, scores_of, updated, weighted
from fewbit.ops._take import LONG

ROOT = pathlib.Path(__file__).parents[2]
INT8 = fewbit.keras.DynamicQuantConfig("int8", weight_scale_granularity="per_channel")
INT4 = fewbit.keras.DynamicQuantConfig("int4", group_size=32, scale_dtype="float16")
LENGTH = 24


@pytest.fixture(scope="module")
def quantized():
    model = random_gemma3("tiny", sequence_length=LENGTH, num_layers=1)
    return fewbit.keras.quantize_model(model, INT8, progress=False)


@pytest.fixture(scope="module")
def greedy(quantized):
    """What it generates with KerasHub's own sampler after `prompt_batch()`."""
    return generated(quantized, keras_hub.samplers.GreedySampler())


@pytest.fixture
def strict():
    """What Keras cannot run under, but our own code does."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


# generate


def test_strings_in_strings_out(quantized):
    quantized.compile(sampler=fewbit.keras.GreedySampler())
    one = quantized.generate("Hello", max_length=LENGTH)
    assert isinstance(one, str) and one.startswith("Hello") and len(one) > len("Hello")
    assert quantized.generate({"prompts": "Hello"}, max_length=LENGTH) == one
    assert quantized.generate(["Hello"], max_length=LENGTH, strip_prompt=True) == [one[5:]]
    short = quantized.generate("Hello", max_length=9)
    assert short != one and one.startswith(short)


def test_prompts_of_a_batch_do_not_disturb_each_other(quantized):
    quantized.compile(sampler="greedy")
    prompts = ["Hi", "A long prompt"]
    alone = [quantized.generate([p, p], max_length=LENGTH)[0] for p in prompts]
    assert quantized.generate({"prompts": prompts}, max_length=LENGTH) == alone


def test_it_stops_at_stop_tokens(quantized, greedy):
    inputs = prompt_batch()
    sizes = inputs["padding_mask"].sum(axis=1)
    stops = [int(greedy[0, sizes[0] + 3]), int(greedy[1, sizes[1] + 2])]
    quantized.compile(sampler="greedy")
    out = quantized.make_generate_function()(dict(inputs), stop_token_ids=stops)
    tokens, mask = np.asarray(out["token_ids"]), np.asarray(out["padding_mask"])
    last = []
    for row, free, size in zip(range(2), greedy, sizes, strict=True):
        end = size + int(np.argmax(np.isin(free[size:], stops)))
        np.testing.assert_array_equal(tokens[row, : end + 1], free[: end + 1])
        assert mask[row, : end + 1].all() and not mask[row, end + 1 :].any()
        last.append(end)
    # What would come after both have ended is never generated: the buffer stays as it was.
    after = slice(max(last) + 1, None)
    assert tokens[:, after].size
    np.testing.assert_array_equal(tokens[:, after], inputs["token_ids"][:, after])


def test_another_sampler_of_keras_hub(quantized):
    inputs = prompt_batch()
    out = generated(quantized, keras_hub.samplers.TopPSampler(p=0.9, k=50, seed=1), inputs)
    mask = inputs["padding_mask"]
    np.testing.assert_array_equal(out[mask], inputs["token_ids"][mask])
    assert out.shape == mask.shape and out.min() >= 0 and out.max() < 512
    assert not np.array_equal(out, inputs["token_ids"])


@pytest.mark.long
def test_int4_groups_generate():
    model = random_gemma3("tiny", sequence_length=LENGTH, num_layers=1)
    fewbit.keras.quantize_model(model, INT4, progress=False)
    model.compile(sampler="greedy")
    assert model.generate("abc", max_length=8).startswith("abc")


# samplers


def test_greedy_tokens_are_those_of_keras_hub(quantized, greedy):
    ours = generated(quantized, fewbit.keras.GreedySampler())
    np.testing.assert_array_equal(ours, greedy)


def test_top_k_tokens_are_those_of_keras_hub(quantized):
    theirs = generated(quantized, keras_hub.samplers.TopKSampler(k=5, seed=3, temperature=0.7))
    ours = generated(quantized, fewbit.keras.TopKSampler(k=5, seed=3, temperature=0.7))
    np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    length=st.sampled_from([7, LONG, LONG + 11]),
    kind=st.sampled_from(["normal", "ties", "nan", "inf", "bfloat16"]),
)
def test_greedy_is_argmax(seed, length, kind):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, length)).astype(np.float32)
    if kind == "ties":
        logits = rng.integers(0, 3, logits.shape).astype(np.float32)
    elif kind == "nan":
        logits[:, rng.integers(0, length, 2)] = np.nan
    elif kind == "inf":
        logits[:, rng.integers(0, length, 2)] = np.inf
    given_logits = jnp.asarray(logits, jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
    sampler = fewbit.keras.GreedySampler()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        token = sampler.get_next_token(sampler.compute_probabilities(given_logits))
    np.testing.assert_array_equal(token, np.argmax(np.asarray(given_logits, np.float32), axis=-1))


def test_top_k_draws_from_the_k_likeliest_in_proportion(strict):
    sampler = fewbit.keras.TopKSampler(k=3, seed=0, temperature=2.0)
    logits = jnp.tile(jnp.array([[0.0, 3.0, -1.0, 1.0, 2.0]]), (4000, 1))
    drawn = np.asarray(sampler.get_next_token(sampler.compute_probabilities(logits)))
    share = np.bincount(drawn, minlength=5) / drawn.size
    expected = np.exp(np.array([3.0, 1.0, 2.0]) / 2)
    np.testing.assert_allclose(share[[1, 3, 4]], expected / expected.sum(), atol=0.03)
    assert share[[0, 2]].sum() == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fewbit.keras.GreedySampler(temperature=0), "a temperature is a number above 0"),
        (lambda: fewbit.keras.TopKSampler(temperature="1"), "TopKSampler(temperature='1')"),
        (lambda: fewbit.keras.TopKSampler(k=0), "k is the number of tokens to choose from"),
    ],
)
def test_bad_settings_of_samplers(make, sentence):
    with pytest.raises(ValueError) as caught:
        make()
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "sampler",
    [fewbit.keras.GreedySampler(temperature=0.5), fewbit.keras.TopKSampler(k=7, seed=2)],
    ids=["greedy", "top_k"],
)
def test_samplers_are_serializable(sampler):
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(sampler)))
    again = keras.saving.deserialize_keras_object(stored)
    assert type(again) is type(sampler) and again.get_config() == sampler.get_config()
    assert keras_hub.samplers.get(stored).get_config() == sampler.get_config()


def test_keras_hub_is_not_loaded_before_it_is_needed():
    code = """
import sys, fewbit.keras
try:
    fewbit.keras.GreedySampler2
except AttributeError as error:
    print(error, sorted({"keras_hub", "tensorflow"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'GreedySampler2' []" in done.stdout


# The int8 cache


def float_attention(query, keys, values, mask):
    """Grouped attention in float64, head by head; masks as booleans [batch, new, length]."""
    batch, new, heads, dim = query.shape
    group = heads // keys.shape[2]
    out = np.zeros((batch, new, heads, dim))
    for b in range(batch):
        for t in range(new):
            for n in range(heads):
                scores = keys[b, :, n // group] @ query[b, t, n]
                scores = np.where(mask[b, t], scores, -np.inf)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values[b, :, n // group] / weights.sum()
    return out


@pytest.mark.parametrize(
    ("batch", "length", "key_heads", "group"), [(1, 1, 1, 1), (1, 160, 1, 4), (2, 23, 3, 2)]
)
def test_attention_over_codes_is_close_to_float(strict, batch, length, key_heads, group):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(batch, 1, key_heads * group, 16)).astype(np.float32)
    keys, values = rng.normal(size=(2, batch, length, key_heads, 16)).astype(np.float32)
    mask = rng.random((batch, 1, length)) < 0.7
    mask[:, :, 0] = True
    scores = scores_of(grouped(jnp.asarray(query), key_heads), as_codes(jnp.asarray(keys)))
    scores = jnp.where(mask[:, None, None], scores, jnp.float32(-1e9))
    out = weighted(jax.nn.softmax(scores, axis=-1), as_codes(jnp.asarray(values)))
    expected = float_attention(*(x.astype(np.float64) for x in (query, keys, values)), mask)
    np.testing.assert_allclose(out.reshape(query.shape), expected, atol=0.12)
    assert cosine(out, expected) > 0.999


def test_the_cache_takes_what_the_mask_lets_in(strict):
    kept = as_codes(jnp.ones((2, 4, 1, 8)))
    new = jnp.full((2, 1, 1, 8), 2.0)
    codes, scale = updated(kept, new, jnp.int32(2), jnp.array([[True], [False]]))
    np.testing.assert_allclose(scale[0, :, 0] * 127, [1, 1, 2, 1], rtol=0.01)
    np.testing.assert_allclose(scale[1, :, 0] * 127, 1, rtol=0.01)
    assert codes.dtype == jnp.int8 and codes.shape == (2, 4, 1, 8)


def test_zeros_stay_zeros(strict):
    codes, scale = as_codes(jnp.zeros((1, 3, 1, 8)))
    assert not np.asarray(codes).any() and np.isfinite(scale).all()


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {}),
        ("float32", {"use_sliding_window_attention": False, "attention_logit_soft_cap": 5.0}),
        ("bfloat16", {}),
    ],
    ids=["float32", "soft cap", "bfloat16"],
)
def test_an_int8_cache_gives_nearly_the_logits_of_a_float_one(dtype, changes):
    model = random_gemma3("tiny", sequence_length=None, num_layers=1, dtype=dtype, **changes)
    expected, float_cache = step_logits(model)
    assert fewbit.keras.quantize_kv_cache(model) is model
    logits, cache = step_logits(model)
    assert not np.array_equal(logits, expected)
    assert cosine(logits, expected) > (0.9995 if dtype == "float32" else 0.998)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(cache)} == {"int8", "int32"}
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(c)) for c in (cache, float_cache)]
    # Codes of one byte, and four bytes of scale for the 32 of a head.
    assert sizes[0] / sizes[1] == (1 + 4 / 32) / jnp.dtype(dtype).itemsize
    fewbit.keras.quantize_kv_cache(model, None)
    layer = model.backbone.transformer_layers[0].attention
    assert type(layer).__name__ == "CachedGemma3Attention"


def test_a_quantized_model_generates_with_an_int8_cache(quantized):
    try:
        fewbit.keras.quantize_kv_cache(quantized)
        fewbit.keras.quantize_kv_cache(quantized)  # twice is once
        layer = quantized.backbone.transformer_layers[0].attention
        assert type(layer).__name__ == "Int8CacheQuantizedCachedGemma3Attention"
        assert isinstance(layer, type(layer)._fewbit_float_cache)
        quantized.compile(sampler="top_k")
        out = quantized.generate(["Hi", "A long prompt"], max_length=LENGTH)
        assert out[0].startswith("Hi") and out[1].startswith("A long prompt")
    finally:
        fewbit.keras.quantize_kv_cache(quantized, None)


def test_models_without_such_a_cache():
    dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    with pytest.raises(ValueError, match="has no cache that quantize_kv_cache knows"):
        fewbit.keras.quantize_kv_cache(dense)
    with pytest.raises(TypeError, match="Give it the Gemma3CausalLM itself"):
        fewbit.keras.quantize_kv_cache(3)
    with pytest.raises(ValueError, match="kept as 'int8', or as float with None"):
        fewbit.keras.quantize_kv_cache(dense, "int4")
