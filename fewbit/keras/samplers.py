"""Samplers for `CausalLM.compile(sampler=...)` that search a large vocabulary in two levels.

KerasHub's samplers take a softmax over the whole vocabulary first and then search one long axis;
neither is needed to pick the same token.
"""

from typing import Any

import jax.numpy as jnp
import keras
import keras_hub

from fewbit.ops.argmax import argmax
from fewbit.ops.top_k import top_k

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
