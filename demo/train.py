"""Digits from scikit-learn and a training loop."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """Images `[n, 8, 8, 1]` in [0, 1] with their labels, always split the same way."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits() -> Digits:
    """1,437 digits to learn from and 360 to be judged on, every class in its proportion."""
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[..., None]
    labels = data.target.astype(np.int32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return Digits(train_x, train_y, test_x, test_y)


def _shifted(images: jax.Array, key: jax.Array) -> jax.Array:
    """Each image moved by up to one pixel: 1,437 digits are too few for a transformer otherwise."""
    offsets = jax.random.randint(key, (images.shape[0], 2), 0, 3)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    crop = lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), (8, 8, 1))  # noqa: E731
    return jax.vmap(crop)(padded, offsets)


def train(model: nnx.Module, data: Digits, *, steps: int, rate: float, batch: int = 64) -> None:
    """Trains `model` in place with AdamW on a cosine schedule; repeatable on one machine."""
    graph, state = nnx.split(model)
    warmup = steps // 10
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps)
    optimizer = optax.adamw(schedule, weight_decay=1e-2)
    images, labels = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)

    def loss(state, x, y):
        logits = nnx.merge(graph, state)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(state, memory, key):
        pick_key, shift_key = jax.random.split(key)
        pick = jax.random.randint(pick_key, (batch,), 0, len(labels))
        grads = jax.grad(loss)(state, _shifted(images[pick], shift_key), labels[pick])
        updates, memory = optimizer.update(grads, memory, state)
        return optax.apply_updates(state, updates), memory

    # A Python loop and not `lax.scan`: on a CPU, XLA runs products inside a loop on one core.
    memory = optimizer.init(state)
    for key in jax.random.split(jax.random.key(0), steps):
        state, memory = step(state, memory, key)
    nnx.update(model, state)


def predict(model, images: np.ndarray) -> np.ndarray:
    """The class with the largest logit, for each image."""
    return np.asarray(jnp.argmax(model(jnp.asarray(images)), axis=-1))
