"""Attention over a float cache, a token at a time, by a kernel that leaves it where it is."""

from typing import Any

import jax
import jax.numpy as jnp

from fewbit import kernels
from fewbit.keras._cached_attention import project, score_factor


class FloatCacheAttention:
    """What `CachedGemma3Attention` does, natively where one new token looks at its cache."""

    def call(
        self,
        x: Any,
        attention_mask: Any = None,
        cache: Any = None,
        cache_update_index: Any = 0,
        cache_update_mask: Any = None,
        training: bool = False,
    ) -> Any:
        if not _one_token(self, x, attention_mask, cache, training):
            return super().call(  # type: ignore[misc]
                x,
                attention_mask=attention_mask,
                cache=cache,
                cache_update_index=cache_update_index,
                cache_update_mask=cache_update_mask,
                training=training,
            )
        layer: Any = self
        query, key, value = project(layer, x, cache_update_index)
        if layer.use_sliding_window_attention:
            attention_mask = layer._mask_sliding_window(attention_mask, cache_update_index)
        keys, values = cache
        attended, keys, values = kernels.cached_attention(
            query,
            key,
            value,
            keys,
            values,
            cache_update_index,
            attention_mask,
            cache_update_mask,
            factor=score_factor(layer),
            soft_cap=layer.logit_soft_cap,
        )
        return layer.output_dense(attended), (keys, values)


def _one_token(layer: Any, x: Any, mask: Any, cache: Any, training: bool) -> bool:
    """Whether this is a step of generation that the kernel can do."""
    if cache is None or len(cache) != 2 or mask is None or x.shape[1] != 1:
        return False
    if jax.default_backend() != "cpu" or not kernels.native_available():
        return False
    drops = bool(layer.dropout) and training
    return not drops and all(a.dtype == jnp.float32 for a in (x, *cache))
