"""The pass over a prompt, as long as the prompt is.

KerasHub passes over the whole buffer, prompt and room for what will be generated alike. Here a
short first piece of it is passed over, then longer ones until the prompt ends; what is beyond is
filled by the tokens that are generated.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_FIRST, _LATER = 32, 128  # tokens: most prompts are short, and long pieces read weights less often


class PromptInPieces:
    """What `Gemma3CausalLM` does with a cache, its prompt in pieces."""

    def call_with_cache(
        self,
        token_ids: Any,
        cache: Any,
        cache_update_index: Any,
        img_embeddings: Any = None,
        vision_mask: Any = None,
        padding_mask: Any = None,
        vision_indices: Any = None,
        cache_update_mask: Any = None,
    ) -> Any:
        """KerasHub's, but for hidden states and logits behind the prompt: these mean nothing."""
        whole = super().call_with_cache  # type: ignore[misc]
        length = token_ids.shape[1]
        from_start = isinstance(cache_update_index, int) and cache_update_index == 0
        plain = all(x is None for x in (img_embeddings, vision_mask, cache_update_mask))
        if not plain or not from_start or padding_mask is None or length <= 2 * _FIRST:
            return whole(
                token_ids=token_ids,
                cache=cache,
                cache_update_index=cache_update_index,
                img_embeddings=img_embeddings,
                vision_mask=vision_mask,
                padding_mask=padding_mask,
                vision_indices=vision_indices,
                cache_update_mask=cache_update_mask,
            )

        def passed(start: Any, size: int, cache: Any) -> tuple[jax.Array, Any]:
            tokens = lax.dynamic_slice_in_dim(token_ids, start, size, axis=1)
            _, hidden, cache = whole(
                token_ids=tokens, cache=cache, cache_update_index=start, padding_mask=padding_mask
            )
            return hidden, cache

        # No trip of the loop: it also decides how layers keep their cache (quantize_kv_cache).
        first, cache = passed(0, _FIRST, cache)
        hidden = jnp.zeros((first.shape[0], length, first.shape[2]), first.dtype)
        hidden = lax.dynamic_update_slice_in_dim(hidden, first, 0, axis=1)
        end = jnp.max(jnp.where(padding_mask, jnp.arange(length) + 1, 0))
        size = min(_LATER, length - _FIRST)

        def step(state: Any) -> Any:
            done, hidden, cache = state
            start = jnp.minimum(done, length - size)  # some tokens twice rather than beyond the end
            new, cache = passed(start, size, cache)
            hidden = lax.dynamic_update_slice_in_dim(hidden, new, start, axis=1)
            return done + size, hidden, cache

        state = lax.while_loop(lambda s: s[0] < end, step, (jnp.int32(_FIRST), hidden, cache))
        _, hidden, cache = state
        logits = self.backbone.token_embedding(hidden, reverse=True)  # type: ignore[attr-defined]
        return logits, hidden, cache
