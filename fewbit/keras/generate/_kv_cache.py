"""What people choose for generation: keys and values kept as int8, and how tokens are picked.

`quantize_kv_cache` changes the cache of a model. `GreedySampler` and `TopKSampler` are KerasHub's,
but search a large vocabulary in two levels.
"""

import functools
from typing import Any

import jax.numpy as jnp
import keras
import keras_hub
from keras_hub.models import Gemma3Backbone

from fewbit.keras._quantize import forget_compiled
from fewbit.keras.generate._cache import Int8CacheAttention
from fewbit.keras.layers._variables import sublayers
from fewbit.ops import argmax, top_k

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


# --- Samplers for `CausalLM.compile(sampler=...)` that search a large vocabulary in two levels ----

_MSG_TEMPERATURE = (
    "{name}(temperature={temperature!r}): a temperature is a number above 0. Use 1.0 to leave the "
    "probabilities as they are."
)
_MSG_K = "{name}(k={k!r}): k is the number of tokens to choose from, a whole number from 1 on."


@keras.saving.register_keras_serializable(package="fewbit")
class GreedySampler(keras_hub.samplers.GreedySampler):
    """Picks the likeliest token: the one with the largest logit, the first of equal ones.

    The tokens are those of `keras_hub.samplers.GreedySampler`, except where rounding in its softmax
    makes different logits equal. Logits that are NaN win, as in `jnp.argmax`. The temperature
    changes nothing and is kept for the config alone.

    >>> GreedySampler().get_next_token(jnp.array([[0.1, 0.9], [0.5, 0.5]])).tolist()
    [1, 0]
    """

    def __init__(self, temperature: float = 1.0):
        super().__init__(temperature=checked_temperature(self, temperature))

    def compute_probabilities(self, logits: Any) -> Any:
        """The logits themselves: their order is all that counts."""
        return keras.ops.cast(logits, "float32")

    def get_next_token(self, probabilities: Any) -> Any:
        return argmax(jnp.asarray(probabilities), jnp.ndim(probabilities) - 1, jnp.int32)


@keras.saving.register_keras_serializable(package="fewbit")
class TopKSampler(keras_hub.samplers.TopKSampler):
    """Draws from the `k` likeliest tokens, as likely as the model says they are.

    With the same seed the tokens are those of `keras_hub.samplers.TopKSampler`, rounding in its
    softmax and logarithm aside.

    >>> TopKSampler(k=1, seed=0).get_next_token(jnp.array([[0.1, 0.9, 0.3]])).tolist()
    [1]
    """

    def __init__(self, k: int = 5, seed: int | None = None, temperature: float = 1.0):
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(_MSG_K.format(name=type(self).__name__, k=k))
        super().__init__(k=k, seed=seed, temperature=checked_temperature(self, temperature))

    def compute_probabilities(self, logits: Any) -> Any:
        """Logits over the temperature: a constant beside the logarithms of the probabilities."""
        return keras.ops.cast(logits, "float32") / self.temperature

    def get_next_token(self, probabilities: Any) -> Any:
        scores = jnp.asarray(probabilities)
        best, tokens = top_k(scores, min(self.k, scores.shape[-1]))
        drawn = keras.random.categorical(best, 1, seed=self.seed_generator, dtype="int32")
        return jnp.take_along_axis(tokens, drawn, axis=-1)[..., 0]


def checked_temperature(sampler: Any, temperature: Any) -> float:
    """The temperature, if it is one."""
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not temperature > 0:
        name = type(sampler).__name__
        raise ValueError(_MSG_TEMPERATURE.format(name=name, temperature=temperature))
    return float(temperature)
