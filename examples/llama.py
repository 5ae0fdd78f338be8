"""A llama decoder in plain JAX, read from a llama2.c file, telling stories in float or in few bits.

Parameters are a nested dict; every projection is stored `[in, out]`, so a layer reads `x @ w`, and
the layers are stacked on a leading axis and run with one `lax.scan`. The model knows nothing about
quantization: `fewbit` is given the function and the parameters.

    python examples/llama.py stories15M.bin tokenizer.bin --tokens 200 --quantize int8
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import struct
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BOS = 1
RMS_EPS = 1e-5
ROPE_BASE = 10000.0

Params = dict[str, Any]


class Config(NamedTuple):
    """The seven header fields of a llama2.c file, in their order there."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class Cache(NamedTuple):
    """Keys and values of every layer, each `[layers, batch, kv_heads, seq_len, head_dim]`."""

    keys: jax.Array
    values: jax.Array


def load(path: str | pathlib.Path) -> tuple[Config, Params]:
    """Reads a llama2.c checkpoint; a negative vocabulary size means an untied output matrix."""
    raw = pathlib.Path(path).read_bytes()
    header = struct.unpack_from("<7i", raw)
    config = Config(*header)._replace(vocab_size=abs(header[5]))
    floats = np.frombuffer(raw, np.float32, offset=28)
    position = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal position
        size = int(np.prod(shape))
        if position + size > floats.size:
            raise ValueError(
                f"{path} ends early: the header {config} asks for at least {position + size} "
                f"floats and the file holds {floats.size}. Fetch the file again."
            )
        position += size
        return floats[position - size : position].reshape(shape)

    def projection(n_out: int, n_in: int) -> np.ndarray:
        return np.ascontiguousarray(take(config.n_layers, n_out, n_in).swapaxes(1, 2))

    dim, hidden, layers = config.dim, config.hidden_dim, config.n_layers
    kv_dim = config.n_kv_heads * config.head_dim
    embed = take(config.vocab_size, dim)
    attn = {"norm": take(layers, dim)}
    attn |= {"wq": projection(dim, dim), "wk": projection(kv_dim, dim)}
    attn |= {"wv": projection(kv_dim, dim), "wo": projection(dim, dim)}
    mlp = {"norm": take(layers, dim), "gate": projection(hidden, dim)}
    mlp |= {"down": projection(dim, hidden), "up": projection(hidden, dim)}
    params = {"embed": embed, "layers": {"attn": attn, "mlp": mlp}, "norm": take(dim)}
    take(2, config.seq_len, config.head_dim // 2)  # rope tables: recomputed by `_rope`
    if header[5] < 0:
        params["output"] = np.ascontiguousarray(take(config.vocab_size, dim).T)
    return config, jax.tree.map(jnp.asarray, params)


class Tokenizer:
    """The pieces of a llama2.c tokenizer file, for turning token ids back into text."""

    def __init__(self, path: str | pathlib.Path, vocab_size: int):
        raw = pathlib.Path(path).read_bytes()
        position = 4
        self.pieces: list[bytes] = []
        for _ in range(vocab_size):
            (length,) = struct.unpack_from("<i", raw, position + 4)
            piece = raw[position + 8 : position + 8 + length]
            if len(piece) == 6 and piece.startswith(b"<0x") and piece.endswith(b">"):
                piece = bytes([int(piece[3:5], 16)])
            self.pieces.append(piece)
            position += 8 + length

    def decode(self, tokens: Any) -> str:
        """Text of one sequence; a beginning-of-story token inside it prints as a line `---`."""
        out, at_start = [], True
        for token in np.asarray(tokens).tolist():
            if token == BOS:
                out.append(b"\n---\n" if out else b"")
                at_start = True
                continue
            piece = self.pieces[token]
            out.append(piece.removeprefix(b" ") if at_start else piece)
            at_start = False
        return b"".join(out).decode("utf-8", errors="replace")


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + RMS_EPS)
    return x * inverse * weight[None, None, :]


def _rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns neighbouring pairs of `x[batch, heads, time, head_dim]` by their position's angles."""
    head_dim = x.shape[-1]
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[:, None] * (ROPE_BASE**-exponent)[None, :]
    cos = jnp.cos(angles)[None, None].astype(x.dtype)
    sin = jnp.sin(angles)[None, None].astype(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def _attention(x, layer, cache, positions, config):
    def split(y: jax.Array, heads: int) -> jax.Array:
        return y.reshape(*y.shape[:2], heads, config.head_dim).swapaxes(1, 2)

    batch, time_steps, dim = x.shape
    heads, kv_heads = config.n_heads, config.n_kv_heads
    q = _rope(split(x @ layer["wq"], heads), positions)
    k = _rope(split(x @ layer["wk"], kv_heads), positions)
    v = split(x @ layer["wv"], kv_heads)
    if cache is not None:
        k = jax.lax.dynamic_update_slice(cache.keys, k, (0, 0, positions[0], 0))
        v = jax.lax.dynamic_update_slice(cache.values, v, (0, 0, positions[0], 0))
        cache = Cache(k, v)
    # Query heads that share a key head become rows of one product.
    q = q.reshape(batch, kv_heads, heads // kv_heads, time_steps, config.head_dim)
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k) * config.head_dim**-0.5
    visible = jnp.arange(k.shape[2])[None, :] <= positions[:, None]
    visible = jnp.broadcast_to(visible[None, None, None], scores.shape)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bkgts,bksd->bkgtd", weights, v)
    mixed = mixed.reshape(batch, heads, time_steps, config.head_dim).swapaxes(1, 2)
    return mixed.reshape(batch, time_steps, dim) @ layer["wo"], cache


def _run(params: Params, tokens: jax.Array, cache: Cache | None, positions, config: Config):
    def block(x, layer_and_cache):
        layer, layer_cache = layer_and_cache
        attn, mlp = layer["attn"], layer["mlp"]
        normed = _rms_norm(x, attn["norm"])
        mixed, layer_cache = _attention(normed, attn, layer_cache, positions, config)
        x = x + mixed
        normed = _rms_norm(x, mlp["norm"])
        hidden = jax.nn.silu(normed @ mlp["gate"]) * (normed @ mlp["up"])
        return x + hidden @ mlp["down"], layer_cache

    x, cache = jax.lax.scan(block, params["embed"][tokens], (params["layers"], cache))
    x = _rms_norm(x, params["norm"])
    logits = x @ params["output"] if "output" in params else x @ params["embed"].T
    return logits, cache


def forward(params: Params, tokens: jax.Array, *, config: Config) -> jax.Array:
    """Logits `[batch, time, vocab]` of whole sequences `tokens[batch, time]`."""
    return _run(params, tokens, None, jnp.arange(tokens.shape[1]), config)[0]


def decode_step(params: Params, cache: Cache, token: jax.Array, position: jax.Array, *, config):
    """Logits `[batch, vocab]` after `token[batch]` at `position`, and the cache that holds it."""
    logits, cache = _run(params, token[:, None], cache, position[None], config)
    return logits[:, 0], cache


def empty_cache(config: Config, batch: int, length: int) -> Cache:
    """A cache with room for `length` positions."""
    shape = (config.n_layers, batch, config.n_kv_heads, length, config.head_dim)
    return Cache(jnp.zeros(shape), jnp.zeros(shape))


@functools.partial(jax.jit, static_argnames=("step", "batch", "length", "config"))
def _sample(params, key, temperature, *, step, batch, length, config):
    def one(carry, position):
        cache, token = carry
        logits, cache = step(params, cache, token, position)
        choice = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
        return (cache, choice.astype(jnp.int32)), choice.astype(jnp.int32)

    first = jnp.full((batch,), BOS, jnp.int32)
    cache = empty_cache(config, batch, length)
    _, sampled = jax.lax.scan(one, (cache, first), jnp.arange(length))
    return jnp.concatenate([first[None], sampled]).T


@functools.cache
def float_step(config: Config):
    """`decode_step` of one configuration: one function object, so that jit compiles it once."""
    return functools.partial(decode_step, config=config)


def sample(params, config, *, batch, length, temperature=1.0, seed=0, step=None) -> jax.Array:
    """`batch` sequences of a beginning-of-story token and `length` sampled ones.

    `step` stands in for `decode_step(params, cache, token, position)`, e.g. its quantized form.
    """
    if length > config.seq_len:
        raise ValueError(f"length={length} exceeds the model's context of {config.seq_len} tokens")
    return _sample(
        params, jax.random.key(seed), jnp.float32(temperature),
        step=step or float_step(config), batch=batch, length=length, config=config,
    )  # fmt: skip


def token_losses(f, params: Params, tokens: jax.Array, *, batch: int = 8) -> np.ndarray:
    """Next-token losses in nats `[sequence, time - 1]` of `f(params, tokens) -> logits`."""

    @jax.jit
    def losses(params, tokens):
        logp = jax.nn.log_softmax(f(params, tokens[:, :-1]).astype(jnp.float32))
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]

    parts = [losses(params, tokens[i : i + batch]) for i in range(0, len(tokens), batch)]
    return np.concatenate(parts)


def quantize(params: Params, config: Config, rules) -> tuple[Params, Any]:
    """Quantized parameters and the quantized `decode_step` that runs them."""
    import fewbit

    step = float_step(config)
    token, position = jnp.full((1,), BOS, jnp.int32), jnp.int32(0)
    plan = fewbit.plan(step, rules, params, empty_cache(config, 1, 1), token, position)
    print(plan)
    quantized_step = fewbit.quantize_model(step, fewbit.PtqProvider(rules))
    return fewbit.quantize_params(params, plan), quantized_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("tokenizer")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per story")
    parser.add_argument("--stories", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    args = parser.parse_args()

    config, params = load(args.checkpoint)
    tokenizer = Tokenizer(args.tokenizer, config.vocab_size)
    step = None
    if args.quantize != "none":
        import fewbit

        rules = {
            "int8": [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")],
            "int4": [
                fewbit.QuantizationRule(module_path="layers.*", weight_qtype="int4", tile_size=32)
            ],
        }[args.quantize]
        params, step = quantize(params, config, rules)
    started = time.perf_counter()
    stories = jax.block_until_ready(
        sample(params, config, batch=args.stories, length=args.tokens,
               temperature=args.temperature, seed=args.seed, step=step)
    )  # fmt: skip
    seconds = time.perf_counter() - started
    for story in stories:
        print(tokenizer.decode(story), end="\n\n")
    total = args.stories * args.tokens
    print(f"{total} tokens in {seconds:.1f} s, compilation included")


if __name__ == "__main__":
    main()
