"""A Linen module that makes a cache at its first call and takes one token from then on."""

import flax.linen as nn
import jax
from helpers import W8A8, normal, relative_error

import fewbit

X = normal(0, 2, 8, 32)


def test_attention_that_decodes_is_planned_with_the_whole_length():
    """Flax's `init` sees all tokens, which is how long the cache will be; `apply` sees one."""
    model = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, decode=True)
    variables = model.init(jax.random.key(0), X)
    q = fewbit.quantize_model(model, fewbit.PtqProvider(W8A8))
    template = jax.eval_shape(q.init, jax.random.key(0), X)
    assert template["cache"]["cached_key"].shape == (2, 8, 4, 8)
    sites = fewbit.plan(model, W8A8, X).sites
    assert sum(row.site.weight is not None for row in sites) == 4  # query, key, value, out
    params = fewbit.quantize_params(variables["params"], template["params"])
    cache = float_cache = variables["cache"]
    for i in range(3):
        token = X[:, i : i + 1]
        out, made = q.apply({"params": params, "cache": cache}, token, mutable=["cache"])
        expected, float_made = model.apply(
            {"params": variables["params"], "cache": float_cache}, token, mutable=["cache"]
        )
        cache, float_cache = made["cache"], float_made["cache"]
        assert relative_error(out, expected) < 0.06
    assert int(cache["cache_index"]) == 3
