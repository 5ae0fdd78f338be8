"""Small KerasHub models for tests: random weights, a byte tokenizer, and reading their answers."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "keras"
sys.path.insert(0, str(EXAMPLES))

from _random_models import random_gemma3, random_vit  # noqa: E402, F401


def prompt_batch(length=20, sizes=(5, 8), vocabulary=512, seed=0):
    """Token ids and a padding mask for prompts of these sizes."""
    ids = np.random.default_rng(seed).integers(10, vocabulary, (len(sizes), length))
    mask = np.arange(length)[None] < np.asarray(sizes)[:, None]
    return {"token_ids": ids.astype(np.int32), "padding_mask": mask}


def generated(model, sampler, inputs=None, stop_token_ids=None):
    """The token ids that a model generates with a sampler, without its preprocessor."""
    model.compile(sampler=sampler)
    inputs = inputs or prompt_batch()
    out = model.make_generate_function()(dict(inputs), stop_token_ids=stop_token_ids)
    return np.asarray(out["token_ids"])


def step_logits(model, inputs=None, steps=6):
    """Logits of single decoding steps over a cache, teacher-forced, and the last cache."""
    inputs = inputs or prompt_batch()
    ids, mask = inputs["token_ids"], inputs["padding_mask"]
    start = int(mask.sum(axis=1).min())

    @jax.jit
    def run(ids, mask):
        def step(cache, index):
            now = jax.lax.dynamic_slice_in_dim(ids, index - 1, 1, axis=1)
            is_new = ~jax.lax.dynamic_slice_in_dim(mask, index - 1, 1, axis=1)
            logits, _, cache = model.call_with_cache(
                now, cache, index - 1, cache_update_mask=is_new
            )
            return cache, logits[:, 0]

        _, cache = model._build_cache(ids, None, None, mask, None)
        return jax.lax.scan(step, cache, jnp.arange(start, start + steps))

    cache, logits = run(ids, mask)
    return np.asarray(logits, np.float32), cache


def cosine(a, b):
    """Cosine of the whole arrays, in float64."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
