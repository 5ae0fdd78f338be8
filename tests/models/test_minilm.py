"""A real sentence encoder, in float against a float64 oracle and in few bits against float."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import data
import numpy as np
import pytest
from scipy.special import erf

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "bench")]

import minilm  # noqa: E402
import sentences as bench_sentences  # noqa: E402

# Unit vectors after six layers in float32.
FLOAT32_EMBEDDING = 2e-5
# Mean cosine with the float embedding; plain rounding of this model gives 0.998, 0.982 and 0.961.
LEAST_COSINE = {"int8": 0.995, "static": 0.975, "int4": 0.955}
# Of the float parameters' bytes, with the table of words.
MOST_BYTES = {"int8": 0.27, "static": 0.27, "int4": 0.22}

WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext2-valid.txt"


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
    return data.fetch("minilm")


@pytest.fixture(scope="module")
def model(folder):
    return minilm.load(folder)


def license_sentences() -> list[str]:
    """English that is always here."""
    text = " ".join((ROOT / "LICENSE").read_text().split())
    return [s for s in re.split(r"(?<=[.;]) ", text) if 5 <= len(s.split()) <= 60]


def embed_in_float64(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """BERT and mean pooling, one row at a time, straight from the file's tensors."""
    from safetensors.numpy import load_file

    w = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return centred / deviation * w[name + ".weight"] + w[name + ".bias"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def embed(row):
        row = row[row != 0]
        e = "embeddings."
        x = w[e + "word_embeddings.weight"][row] + w[e + "token_type_embeddings.weight"][0]
        x = norm(x + w[e + "position_embeddings.weight"][: len(row)], e + "LayerNorm")
        for i in range(layers):
            at = f"encoder.layer.{i}."
            q, k, v = (
                np.split(linear(x, f"{at}attention.self.{part}"), heads, axis=-1)
                for part in ("query", "key", "value")
            )
            mixed = []
            for a, b, c in zip(q, k, v, strict=True):
                p = np.exp(a @ b.T / np.sqrt(a.shape[-1]))
                mixed.append(p / p.sum(-1, keepdims=True) @ c)
            out = linear(np.concatenate(mixed, -1), at + "attention.output.dense")
            x = norm(x + out, at + "attention.output.LayerNorm")
            h = linear(x, at + "intermediate.dense")
            h = 0.5 * h * (1 + erf(h / np.sqrt(2)))
            x = norm(x + linear(h, at + "output.dense"), at + "output.LayerNorm")
        mean = x.mean(0)
        return mean / np.linalg.norm(mean)

    return np.stack([embed(row) for row in tokens])


def test_float_model_equals_the_oracle(folder, model):
    tokens = minilm.Tokenizer(folder)(license_sentences()[:3])
    wanted = embed_in_float64(folder, np.asarray(tokens))
    found = bench_sentences.encode(model, [tokens])
    np.testing.assert_allclose(found, wanted, atol=FLOAT32_EMBEDDING)


def check(folder, model, name, text) -> None:
    tokenizer = minilm.Tokenizer(folder)
    step = 20
    compared, others = text[: len(text) // 2], text[len(text) // 2 :]
    batches = [tokenizer(compared[i : i + step]) for i in range(0, len(compared), step)]
    calibration = [tokenizer(others[i : i + step]) for i in range(0, len(others), step)]
    few = bench_sentences.quantized(model, name, batches[0], calibration)
    cosine = np.sum(
        bench_sentences.encode(model, batches) * bench_sentences.encode(few, batches), axis=-1
    )
    assert LEAST_COSINE[name] <= cosine.mean() < 1
    assert bench_sentences.size(few) <= MOST_BYTES[name] * bench_sentences.size(model)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_few_bits_stay_near_float(folder, model, name):
    check(folder, model, name, license_sentences()[:40])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(LEAST_COSINE))
def test_few_bits_on_200_sentences_of_wikitext(folder, model, name):
    if not WIKITEXT.exists():
        pytest.skip("WikiText-2 is not here; other sentences are compared in the quick tests")
    check(folder, model, name, bench_sentences.sentences(WIKITEXT.read_text())[:400])


def test_padding_does_not_change_an_embedding(folder, model):
    tokens = minilm.Tokenizer(folder)(["A short one.", "This one is quite a bit longer than that."])
    alone = tokens[:1, : int((tokens[0] != 0).sum())]
    padded, bare = (bench_sentences.encode(model, [t]) for t in (tokens, alone))
    np.testing.assert_allclose(padded[:1], bare, atol=FLOAT32_EMBEDDING)
