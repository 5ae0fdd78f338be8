"""A small character language model in Flax Linen: its text, its batches, its training loop.

The model knows nothing about quantization. `train` takes whatever has `init` and `apply`: the model
itself, or the same model under `fewbit.quantize_model`.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILE_NAME = "tinyshakespeare.txt"
ROPE_BASE = 10000.0

Params = dict[str, Any]


class Size(NamedTuple):
    """The model and how it is trained; about 1 M parameters as it stands."""

    layers: int = 5
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 8
    steps: int = 1000
    learning_rate: float = 2e-3


class Text(NamedTuple):
    """A text as numbers: the first 90 % to train on, the last 10 % to judge by."""

    name: str
    characters: str
    train: np.ndarray
    validation: np.ndarray


def find_text(path: str | os.PathLike[str] | None = None) -> Text:
    """The file at `path`, or tinyshakespeare if it is at hand, or the manual inside Python."""
    data = pathlib.Path(os.environ.get("FEWBIT_DATA") or ROOT.parent / "shared" / "data")
    if path is not None:
        return text_of(pathlib.Path(path).name, pathlib.Path(path).read_text(encoding="utf-8"))
    for file in (data / FILE_NAME, ROOT.parent / "shared" / "data" / FILE_NAME):
        if file.is_file():
            return text_of("tinyshakespeare", file.read_text(encoding="utf-8"))
    return python_manual()


def python_manual() -> Text:
    """The half megabyte of reference manual that every Python ships for its `help()`."""
    from pydoc_data.topics import topics

    return text_of("the manual in pydoc_data", "\n\n".join(topics[key] for key in sorted(topics)))


def text_of(name: str, text: str) -> Text:
    characters = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], np.int32)
    cut = 9 * len(ids) // 10
    return Text(name, characters, ids[:cut], ids[cut:])


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: `x[batch, time, heads, channel]`, halves of the channels as pairs."""
    half = x.shape[-1] // 2
    speed = ROPE_BASE ** -(np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None] * speed
    sin, cos = (jnp.asarray(f(angle), x.dtype)[None, :, None, :] for f in (np.sin, np.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        batch, time, width = x.shape
        dense = functools.partial(nn.Dense, use_bias=False)
        y = nn.RMSNorm(name="attention_norm")(x)
        q, k, v = (
            dense(width, name=name)(y).reshape(batch, time, self.heads, width // self.heads)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", rotate(q), rotate(k)) * (width // self.heads) ** -0.5
        seen = np.tril(np.ones((1, 1, time, time), bool))
        weights = nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, time, width)
        x = x + dense(width, name="out")(mixed)
        y = nn.RMSNorm(name="mlp_norm")(x)
        return x + dense(width, name="down")(nn.gelu(dense(4 * width, name="up")(y)))


class Decoder(nn.Module):
    vocabulary: int
    size: Size

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.vocabulary, self.size.width, name="embed")(ids)
        for i in range(self.size.layers):
            x = Block(self.size.heads, name=f"block_{i}")(x)
        x = nn.RMSNorm(name="norm")(x)
        return nn.Dense(self.vocabulary, use_bias=False, name="head")(x)


def batches(text: Text, size: Size, seed: int) -> Iterator[jax.Array]:
    """The same for every model of a seed: `[batch, context + 1]` characters each."""
    random = np.random.default_rng(seed)
    window = np.arange(size.context + 1)
    for _ in range(size.steps):
        start = random.integers(len(text.train) - size.context, size=(size.batch, 1))
        yield jnp.asarray(text.train[start + window])


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def optimizer_of(size: Size) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        0.0, size.learning_rate, size.steps // 20, size.steps, size.learning_rate / 30
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))


def step_of(model: Any, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """One step of training: (variables, state, ids) -> (variables, state, loss)."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(variables, state, ids):
        def loss(variables):
            return jnp.mean(token_losses(model.apply(variables, ids[:, :-1]), ids[:, 1:]))

        value, gradient = jax.value_and_grad(loss)(variables)
        update, state = optimizer.update(gradient, state, variables)
        return optax.apply_updates(variables, update), state, value

    return step


def train(
    model: Any,
    text: Text,
    size: Size,
    seed: int,
    *,
    first: Any = None,
    taken_over: Callable[[Any], Any] = lambda variables: variables,
    told: Callable[[float], None] = lambda loss: None,
) -> Any:
    """Trained variables; `told` hears the loss of every step.

    `first` is another form of the model that takes the first half of the steps; `taken_over` gives
    its variables whatever they need for the second.
    """
    optimizer = optimizer_of(size)
    phases = [(model, size.steps)] if first is None else [
        (first, size.steps // 2), (model, size.steps - size.steps // 2)
    ]  # fmt: skip
    source = batches(text, size, seed)
    example = next(batches(text, size, seed))[:1, :-1]
    variables = jax.jit(phases[0][0].init)(jax.random.key(seed), example)
    state = optimizer.init(variables)
    for form, steps in phases:
        if form is not phases[0][0]:
            variables = taken_over(variables)
            state = carried_over(state, optimizer.init(variables))
        step = step_of(form, optimizer)
        for ids in itertools.islice(source, steps):
            variables, state, value = step(variables, state, ids)
            told(float(value))
    return variables


def carried_over(old: Any, fresh: Any) -> Any:
    """The state of an optimizer for variables that have become more: new ones start afresh."""
    known = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(old)}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: known.get(jax.tree_util.keystr(path), x), fresh
    )


def validation_loss(
    model: Any, variables: Any, text: Text, size: Size, blocks: int | None = None
) -> float:
    """Nats per character over all of the validation text, or its first `blocks` blocks."""
    span = size.context
    ids = text.validation[: (len(text.validation) - 1) // span * span + 1]
    inputs, targets = (part.reshape(-1, span)[:blocks] for part in (ids[:-1], ids[1:]))
    group = min(len(inputs), 64)

    @jax.jit
    def losses(variables, x, y):
        return jnp.mean(token_losses(model.apply(variables, x), y), axis=-1)

    per_block = []
    for i in range(0, len(inputs), group):
        x, y = inputs[i : i + group], targets[i : i + group]
        missing = group - len(x)  # the last group is filled up, so that one program serves all
        x, y = (np.pad(part, ((0, missing), (0, 0)), mode="edge") for part in (x, y))
        per_block.append(np.asarray(losses(variables, x, y), np.float64)[: group - missing])
    return float(np.concatenate(per_block).mean())
