"""Attention over a cache of int8 codes, one scale per token and head.

KerasHub hands every attention layer its part of the cache and takes back whatever the layer returns
in its place, so the layer alone decides how keys and values are kept between two tokens. The first
pass over the prompt fills a float cache and reads it; what is kept of it are codes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fewbit import kernels
from fewbit.ops import dot_general
from fewbit.qarray import HowToQuantize, QArray, quantize_with

Codes = tuple[jax.Array, jax.Array]  # int8 [batch, length, heads, dim], float32 [.., heads]


class Int8CacheAttention:
    """What `CachedGemma3Attention` does, with keys and values kept as int8."""

    def call(
        self,
        x: Any,
        attention_mask: Any = None,
        cache: Any = None,
        cache_update_index: Any = 0,
        cache_update_mask: Any = None,
        training: bool = False,
    ) -> Any:
        if cache is None or len(cache) == 2:
            out = super().call(  # type: ignore[misc]
                x,
                attention_mask=attention_mask,
                cache=cache,
                cache_update_index=cache_update_index,
                cache_update_mask=cache_update_mask,
                training=training,
            )
            if cache is None:
                return out
            attended, (key, value) = out
            return attended, (*kept(as_codes(key)), *kept(as_codes(value)))
        query, key, value = project(self, x, cache_update_index)
        keys = updated(read(cache[:2]), key, cache_update_index, cache_update_mask)
        values = updated(read(cache[2:]), value, cache_update_index, cache_update_mask)
        attended = attend(self, query, keys, values, attention_mask, cache_update_index, training)
        out = self.output_dense(attended)  # type: ignore[attr-defined]
        return out, (*kept(keys), *kept(values))


def project(layer: Any, x: Any, start: Any) -> tuple[Any, Any, Any]:
    """Query, key and value of new tokens, the first one standing at `start`."""
    query, key = layer.query_dense(x), layer.key_dense(x)
    if layer.use_query_key_norm:
        query, key = layer.query_norm(query), layer.key_norm(key)
    query, key = layer._apply_rope(query, start), layer._apply_rope(key, start)
    return query, key, layer.value_dense(x)


def as_codes(array: jax.Array) -> Codes:
    """Keys or values as codes, each token and head with a scale of its own."""
    q = _by_line(array)
    return q.qvalue, q.scale[..., 0]


def kept(codes: Codes) -> tuple[jax.Array, jax.Array]:
    """The form in the cache: the bits of the scales, since Keras casts floats to a layer's type."""
    return codes[0], lax.bitcast_convert_type(codes[1], jnp.int32)


def read(cache: tuple[jax.Array, jax.Array]) -> Codes:
    """What `kept` put there."""
    return cache[0], lax.bitcast_convert_type(cache[1], jnp.float32)


def updated(before: Codes, new: jax.Array, start: Any, mask: Any) -> Codes:
    """The cache with the new tokens in it, where the mask lets them in."""
    made = []
    for old, fresh in zip(before, as_codes(new), strict=True):
        place = (0, start) + (0,) * (old.ndim - 2)
        if mask is not None:
            there = lax.dynamic_slice(old, place, fresh.shape)
            let_in = mask.reshape(*mask.shape, *(1,) * (old.ndim - 2))
            fresh = jnp.where(let_in, fresh, there)
        made.append(lax.dynamic_update_slice(old, fresh, place))
    return made[0], made[1]


def attend(
    layer: Any,
    query: jax.Array,  # [batch, new, query heads, dim]
    keys: Codes,
    values: Codes,
    mask: jax.Array | None,
    start: Any,
    training: bool,
) -> jax.Array:
    """Softmax of the scores over the cache, times the values: [batch, new, query heads, dim]."""
    near = mask
    if layer.use_sliding_window_attention and mask is not None:
        near = layer._mask_sliding_window(mask, cache_update_index=start)
    scores = scores_of(grouped(query, layer.num_key_value_heads) * score_factor(layer), keys)
    if layer.logit_soft_cap is not None:
        scores = jnp.tanh(scores / layer.logit_soft_cap) * layer.logit_soft_cap
    weights = layer.softmax(scores, mask=None if near is None else near[:, None, None])
    if layer.dropout:
        weights = layer.dropout_layer(weights, training=training)
    out = weighted(weights, values).reshape(query.shape).astype(query.dtype)
    if mask is None:
        return out
    # A token that may look at nothing gets nothing.
    nothing = jnp.all(mask == 0, axis=-1)[..., None, None]
    return jnp.where(nothing, jnp.zeros_like(out), out)


def scores_of(query: jax.Array, keys: Codes) -> jax.Array:
    """Products with every kept key: [batch, key heads, group, new, length] in float32."""
    codes, scale = keys
    stored = QArray(codes, scale[..., None], qtype="int8", dtype=jnp.float32)
    numbers = (((4,), (3,)), ((0, 2), (0, 2)))  # batch, heads; new, group; length
    return dot_general(_by_line(query), stored, numbers).transpose(0, 1, 3, 2, 4)


def weighted(weights: jax.Array, values: Codes) -> jax.Array:
    """The values, weighted: [batch, new, key heads, group, dim] in float32.

    The weights stay float, since small ones add up; the scale of each value goes into its weight.
    """
    codes, scale = values
    scaled = weights * scale.transpose(0, 2, 1)[:, :, None, None]
    numbers = (((4,), (1,)), ((0, 1), (0, 2)))  # batch, heads; group, new; dim
    return lax.dot_general(scaled, codes.astype(jnp.float32), numbers).transpose(0, 3, 1, 2, 4)


def grouped(query: jax.Array, key_heads: int) -> jax.Array:
    """Query heads by the key head that they share, in float32."""
    batch, new, heads, dim = query.shape
    return query.reshape(batch, new, key_heads, heads // key_heads, dim).astype(jnp.float32)


def score_factor(layer: Any) -> float:
    """What a query is multiplied with before the scores."""
    by_head = layer.query_head_dim_normalize
    size = layer.head_dim if by_head else layer.hidden_dim // layer.num_query_heads
    return float(1 / np.sqrt(size))


def _by_line(array: jax.Array) -> QArray:
    # Keras' layers may mix types: a norm in float32, a projection in bfloat16.
    how = HowToQuantize(qtype="int8", channelwise_axes=range(array.ndim - 1))
    return quantize_with(array.astype(jnp.float32), how)


# --- Attention over a float cache, a token at a time, by a kernel that leaves it where it is ------


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


# --- The pass over a prompt, as long as the prompt is ---------------------------------------------

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


# --- How models that hold quantized layers generate faster: what their classes of KerasHub get ----

_FASTER: dict[str, type] = {
    "CachedGemma3Attention": FloatCacheAttention,
    "Gemma3CausalLM": PromptInPieces,
}


def faster_bases(original: Any) -> tuple[type, ...]:
    """What stands before KerasHub's own class; nothing for anybody else's, subclasses included.

    >>> faster_bases(int)
    ()
    """
    own = original.__module__.partition(".")[0] == "keras_hub"
    return (_FASTER[original.__name__],) if own and original.__name__ in _FASTER else ()
