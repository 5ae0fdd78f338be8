"""Two small classifiers of 8x8 digits in Flax NNX: a convolutional one and a transformer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

CLASSES = 10


class ConvNet(nnx.Module):
    """Two convolutions, each followed by a 2x2 maximum, then two dense layers."""

    def __init__(self, rngs: nnx.Rngs, *, width: int = 32):
        self.conv1 = nnx.Conv(1, width, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, kernel_size=(3, 3), rngs=rngs)
        self.hidden = nnx.Linear(2 * 2 * 2 * width, 128, rngs=rngs)
        self.out = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits `[batch, 10]` of `images[batch, 8, 8, 1]`."""
        x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.out(x)


class Attention(nnx.Module):
    """Self-attention; the two products between activations are einsums and hold no weights."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv = nnx.Linear(dim, 3 * dim, rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, dim = x.shape
        qkv = self.qkv(x).reshape(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (dim // self.heads) ** -0.5
        mixed = jnp.einsum("bhts,bshd->bthd", nnx.softmax(scores, axis=-1), v)
        return self.out(mixed.reshape(batch, time, dim))


class Block(nnx.Module):
    """A transformer layer that normalizes before attention and before the two dense layers."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = Attention(dim, heads, rngs)
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """The eight rows of an image as tokens, learned positions, two layers, one answer from all."""

    def __init__(self, rngs: nnx.Rngs, *, dim: int = 64, heads: int = 4, depth: int = 2):
        self.rows = nnx.Linear(8, dim, rngs=rngs)
        self.positions = nnx.Embed(8, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.out = nnx.Linear(8 * dim, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits `[batch, 10]` of `images[batch, 8, 8, 1]`."""
        batch = images.shape[0]
        places = jnp.broadcast_to(jnp.arange(8)[None], (batch, 8))
        x = self.rows(images.reshape(batch, 8, 8)) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x).reshape(batch, -1))
