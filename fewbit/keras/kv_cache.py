"""`quantize_kv_cache`: generate with keys and values kept as int8."""

import functools
from typing import Any

import keras
from keras_hub.models import Gemma3Backbone

from fewbit.keras._cached_attention import Int8CacheAttention
from fewbit.keras._compiled import forget_compiled
from fewbit.keras._variables import sublayers

PREFIX = "Int8Cache"
_MSG_NOT_A_MODEL = (
    "quantize_kv_cache takes a KerasHub model, got {found}. Give it the Gemma3CausalLM itself."
)
_MSG_DTYPE = (
    "quantize_kv_cache(dtype={dtype!r}): the cache is kept as 'int8', or as float with None."
)
_MSG_NO_CACHE = (
    "{model} ({cls}) has no cache that quantize_kv_cache knows. It knows the one that "
    "Gemma3CausalLM keeps per layer; other KerasHub models stack theirs into one array inside "
    "call_with_cache, which is theirs to change. Leave this call out: they generate with a float "
    "cache."
)


def quantize_kv_cache(model: keras.Model, dtype: str | None = "int8") -> keras.Model:
    """Let a `Gemma3CausalLM` keep keys and values as int8 while it generates; returns the model.

    Each token has a scale per head. The cache takes about a quarter of its float32 size and is read
    with it; the first pass over the prompt still attends in float. It works on float and on
    quantized models, is no part of what is saved, and `dtype=None` takes it back.

    >>> import fewbit.keras, keras_hub
    >>> backbone = keras_hub.models.Gemma3Backbone(
    ...     vocabulary_size=64, image_size=None, num_layers=1, num_query_heads=2,
    ...     num_key_value_heads=1, hidden_dim=16, intermediate_dim=32, head_dim=8)
    >>> model = keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)
    >>> model = fewbit.keras.quantize_kv_cache(model)
    >>> type(backbone.transformer_layers[0].attention).__name__
    'Int8CacheCachedGemma3Attention'
    """
    if not isinstance(model, keras.Model):
        raise TypeError(_MSG_NOT_A_MODEL.format(found=type(model).__name__))
    if dtype not in ("int8", None):
        raise ValueError(_MSG_DTYPE.format(dtype=dtype))
    layers = cached_layers(model)
    if not layers:
        raise ValueError(_MSG_NO_CACHE.format(model=model.name, cls=type(model).__name__))
    for layer in layers:
        kept = isinstance(layer, Int8CacheAttention)
        original: Any = type(layer)
        if dtype is None and kept:
            layer.__class__ = layer._fewbit_float_cache
        elif dtype is not None and not kept:
            layer.__class__ = with_int8_cache(original)
    forget_compiled(model)
    return model


def cached_layers(model: keras.Model) -> list[Any]:
    """The attention layers whose cache is theirs to choose."""
    backbones = [each for each in [model, *sublayers(model)] if isinstance(each, Gemma3Backbone)]
    return [block.attention for backbone in backbones for block in backbone.transformer_layers]


@functools.cache
def with_int8_cache(original: Any) -> Any:
    """The class of such a layer: one per class of attention."""
    namespace = {
        "_fewbit_float_cache": original,
        "__module__": __name__,
        "__doc__": f"A {original.__name__} that keeps keys and values as int8.",
    }
    return type(PREFIX + original.__name__, (Int8CacheAttention, original), namespace)
