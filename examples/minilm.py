"""A sentence encoder (all-MiniLM-L6-v2, a BERT) in Flax NNX, in float or in few bits.

The model reads the original safetensors file and tokenizer and knows nothing about quantization:
`fewbit` is given the model and rules. Sentences that mean the same have a cosine near one:

    python examples/minilm.py <folder with model.safetensors and tokenizer.json> --quantize int8 \
        "A man is eating pasta." "Someone has noodles." "The lobster is blue."
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_LONGEST = 256  # tokens; what the model was trained for


class Config(NamedTuple):
    """The fields of config.json that shape the model."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        split = (batch, time, self.heads, width // self.heads)
        q, k, v = (f(x).reshape(split) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // self.heads) ** -0.5
        hidden = jnp.broadcast_to(~mask[:, None, None, :], scores.shape)
        weights = jax.nn.softmax(jnp.where(hidden, -1e9, scores), axis=-1)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class Layer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config, rngs)
        self.attention_norm = nnx.LayerNorm(width, epsilon=eps, rngs=rngs)
        self.up = nnx.Linear(width, config.intermediate_size, rngs=rngs)
        self.down = nnx.Linear(config.intermediate_size, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=eps, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    """Token ids `[batch, time]`, 0 where a row has ended, to unit vectors `[batch, width]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width = config.hidden_size
        self.words = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, width, rngs=rngs)
        self.kinds = nnx.Embed(config.type_vocab_size, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=config.layer_norm_eps, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = tokens != 0
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x = self.words(tokens) + self.positions(positions) + self.kinds(jnp.zeros_like(tokens))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        kept = mask[..., None].astype(x.dtype)
        mean = jnp.sum(x * kept, axis=1) / jnp.sum(kept, axis=1)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def _names(config: Config) -> dict[str, str]:
    """Where each module of the file stands in the model."""
    names = {
        "embeddings.word_embeddings": "words",
        "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "kinds",
        "embeddings.LayerNorm": "norm",
    }
    inside = {
        "attention.self.query": "attention/query",
        "attention.self.key": "attention/key",
        "attention.self.value": "attention/value",
        "attention.output.dense": "attention/out",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "up",
        "output.dense": "down",
        "output.LayerNorm": "norm",
    }
    for i in range(config.num_hidden_layers):
        names |= {f"encoder.layer.{i}.{k}": f"layers/{i}/{v}" for k, v in inside.items()}
    return names


def load(folder: str | pathlib.Path) -> Encoder:
    """The trained model from a folder with config.json and model.safetensors."""
    from safetensors.numpy import load_file

    folder = pathlib.Path(folder)
    fields = json.loads((folder / "config.json").read_text())
    config = Config(**{name: fields[name] for name in Config._fields})
    tensors = load_file(folder / "model.safetensors")
    model = nnx.eval_shape(lambda: Encoder(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    wanted = dict(nnx.to_flat_state(state))
    for theirs, ours in _names(config).items():
        for leaf in ("weight", "bias"):
            array = tensors.get(f"{theirs}.{leaf}")
            if array is None:
                continue
            path = tuple(int(part) if part.isdigit() else part for part in ours.split("/"))
            if leaf == "bias":
                name = "bias"
            elif (*path, "kernel") in wanted:
                name, array = "kernel", array.T
            else:
                name = "scale" if (*path, "scale") in wanted else "embedding"
            wanted[*path, name] = wanted[*path, name].replace(jnp.asarray(array))
    return nnx.merge(graph, nnx.from_flat_state(wanted))


class Tokenizer:
    """Sentences to rows of token ids, as long as the longest, rounded up to few lengths."""

    def __init__(self, folder: str | pathlib.Path):
        import tokenizers

        self.model = tokenizers.Tokenizer.from_file(str(pathlib.Path(folder) / "tokenizer.json"))
        self.model.no_padding()
        self.model.enable_truncation(_LONGEST)

    def __call__(self, sentences: Sequence[str], multiple: int = 16) -> jax.Array:
        rows = [encoding.ids for encoding in self.model.encode_batch(list(sentences))]
        width = -(-max(map(len, rows)) // multiple) * multiple  # every new length is compiled
        return jnp.array([row + [0] * (width - len(row)) for row in rows], jnp.int32)


def rules(name: str) -> list[Any]:
    """Rules by name: the linear layers and, to make the file small, the table of words."""
    import fewbit

    table = fewbit.QuantizationRule(module_path="words", op_names=("take",), weight_qtype="int8")
    linear = dict(module_path="layers.*", op_names=("dot_general",))
    by_name: dict[str, dict[str, Any]] = {
        "int8": dict(weight_qtype="int8", act_qtype="int8"),
        "static": dict(
            weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=(0, 1)
        ),
        "int4": dict(weight_qtype="int4", tile_size=32),
    }
    return [table, fewbit.QuantizationRule(**linear, **by_name[name])]


def quantize(model: Encoder, name: str, tokens: jax.Array) -> Encoder:
    """The model with fewer bits; the float one stays as it is."""
    import fewbit

    return fewbit.pack(fewbit.quantize_model(model, fewbit.PtqProvider(rules(name)), tokens))


def quantize_static(model: Encoder, tokens: jax.Array, calibration: Sequence[jax.Array]) -> Encoder:
    """The same with ranges of the activations seen on other sentences."""
    import fewbit

    provider = fewbit.PtqProvider(rules("static"))
    stats = fewbit.calibrate(model, provider, calibration)
    return fewbit.pack(fewbit.quantize_model(model, provider, tokens, quant_stats=stats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("sentences", nargs="+")
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    args = parser.parse_args()

    tokens = Tokenizer(args.folder)(args.sentences)
    model = load(args.folder)
    if args.quantize != "none":
        import fewbit

        print(fewbit.plan(model, rules(args.quantize), tokens))
        model = quantize(model, args.quantize, tokens)
    vectors = np.asarray(model(tokens))
    for sentence, row in zip(args.sentences, vectors @ vectors.T, strict=True):
        print(" ".join(f"{value:6.3f}" for value in row), " ", sentence)


if __name__ == "__main__":
    main()
