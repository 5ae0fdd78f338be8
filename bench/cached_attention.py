"""Attention over the caches of a Gemma3 of the 270M shape, without products: ms per token.

18 layers of 4 query heads and 1 key head of 256, every place of the cache in sight. *XLA* is what
KerasHub's layer compiles to, *native* `fewbit.kernels.cached_attention`, *int8* what
`fewbit.keras.quantize_kv_cache` does. A hundred tokens in one compiled loop; every way is called
once per round, and a number is the smallest of its rounds.

    python bench/cached_attention.py [--budget 10]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import _measure
import jax
import jax.numpy as jnp

import fewbit
from fewbit.keras.generate._cache import as_codes, grouped, scores_of, updated, weighted
from fewbit.kernels import cached_attention

LAYERS, HEADS, DIM, TOKENS = 18, 4, 256, 100
SHAPES = ((1, 160), (1, 2048), (8, 160))


def through_xla(x: Any, key: Any, cache: Any, i: Any, mask: Any) -> Any:
    with fewbit.kernels.backend("xla"):
        out, *cache = cached_attention(x, key, key, *cache, i, mask, factor=DIM**-0.5)
    return out, tuple(cache)


def native(x: Any, key: Any, cache: Any, i: Any, mask: Any) -> Any:
    out, *cache = cached_attention(x, key, key, *cache, i, mask, factor=DIM**-0.5)
    return out, tuple(cache)


def int8(x: Any, key: Any, cache: Any, i: Any, mask: Any) -> Any:
    cache = tuple(updated(codes, key, i, None) for codes in cache)
    scores = scores_of(grouped(x, 1) * DIM**-0.5, cache[0])
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e9), axis=-1)
    return weighted(weights, cache[1]).reshape(x.shape), cache


def call_of(way: Any, batch: int, length: int) -> Any:
    keys = jax.random.normal(jax.random.key(0), (batch, length, 1, DIM))
    one = as_codes(keys) if way is int8 else keys
    caches = tuple((one, one) for _ in range(LAYERS))
    x = jax.random.normal(jax.random.key(1), (batch, 1, HEADS, DIM))
    mask = jnp.ones((batch, 1, length), bool)

    def token(i: Any, state: Any) -> Any:
        x, caches = state
        new = []
        for cache in caches:
            out, cache = way(x, x[:, :, :1], cache, length - TOKENS + i, mask)
            x, new = x + out, [*new, cache]
        return x, tuple(new)

    run = jax.jit(lambda x, caches: jax.lax.fori_loop(0, TOKENS, token, (x, caches))[0])
    run(x, caches).block_until_ready()
    return lambda: run(x, caches).block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of rounds per shape")
    args = parser.parse_args()
    ways = {"XLA": through_xla, "native": native, "int8": int8}
    facts = _measure.machine(isa=fewbit.kernels.info().isa)
    print(_measure.headline(facts))
    print(f"{'batch, length':16}" + "".join(f"{name:>10}" for name in ways))
    for batch, length in SHAPES:
        calls = {name: call_of(way, batch, length) for name, way in ways.items()}
        times = _measure.interleave(calls, budget=args.budget)
        cells = (f"{min(times[name]) * 1e3 / TOKENS:10.2f}" for name in ways)
        print(f"{f'{batch}, {length}':16}" + "".join(cells))


if __name__ == "__main__":
    main()
