"""Which way attention takes: Keras' fused operation, or two products that can be quantized.

Keras and KerasHub decide it inside the layer, by the device and by what is asked for. A config
decides it by `dot_product_attention_enable`, so that calibration and every call take one way.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import keras

from fewbit.tracing import scope_name


def is_attention(layer: keras.Layer) -> bool:
    """Whether a layer is one of attention, by the names of its classes: KerasHub has many."""
    return any("Attention" in cls.__name__ for cls in type(layer).__mro__)


@contextlib.contextmanager
def attention_way(layer: keras.Layer, fused: bool | None) -> Iterator[None]:
    """While `layer` is traced: attention fused or not; None leaves it to the layer."""
    own: dict[str, Any] = {}
    if fused is not None and isinstance(layer, keras.layers.MultiHeadAttention):
        own["_compute_attention"] = _multi_head(layer, fused)
    elif fused is not None and isinstance(layer, keras.layers.GroupQueryAttention):
        own["_compute_attention"] = _grouped_query(layer, fused)
    elif fused is False and hasattr(layer, "_use_fused_attention_op"):  # Gemma's, of KerasHub
        own["_use_fused_attention_op"] = lambda: False
    with own_attributes([(layer, own)]):
        yield


@contextlib.contextmanager
def call_scopes(layers: Iterable[tuple[str, keras.Layer]]) -> Iterator[None]:
    """While (path, layer) pairs are traced: the products of each layer's call carry its path."""
    with own_attributes([(each, {"call": _scoped(path, each)}) for path, each in layers]):
        yield


@contextlib.contextmanager
def own_attributes(changes: Sequence[tuple[keras.Layer, dict[str, Any]]]) -> Iterator[None]:
    """While instances have attributes past Keras' tracking: they are no parts of the layers."""
    before = [{n: vars(each)[n] for n in own if n in vars(each)} for each, own in changes]
    for each, own in changes:
        vars(each).update(own)
    try:
        yield
    finally:
        for (each, own), old in zip(changes, before, strict=True):
            for name in own:
                del vars(each)[name]
            vars(each).update(old)


def _scoped(path: str, layer: keras.Layer) -> Any:
    call = layer.call

    @functools.wraps(call)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope_name(path, type(layer).__name__)):
            return call(*args, **kwargs)

    return scoped


def _multi_head(layer: Any, fused: bool) -> Any:
    original = layer._compute_attention

    @functools.wraps(original)
    def compute(query, key, value, attention_mask=None, training=None, scores=False, **causal):
        if not fused:
            # Asked for the scores, Keras computes them; `call` returns them only if they were.
            asked = scores or not layer._flash_attention
            return original(query, key, value, attention_mask, training, asked, **causal)
        if layer._dropout > 0.0 or scores or len(query.shape) != 4:
            return original(query, key, value, attention_mask, training, scores, **causal)
        mask = _mask_of_scores(attention_mask, -len(layer._attention_axes) * 2 - 1)
        return _fused(layer, layer._inverse_sqrt_key_dim, (query, key, value), mask, **causal)

    return compute


def _grouped_query(layer: Any, fused: bool) -> Any:
    original = layer._compute_attention

    @functools.wraps(original)
    def compute(query, key, value, attention_mask=None, training=None, **causal):
        asked = layer._return_attention_scores
        if fused and not (layer.dropout > 0.0 or asked or len(query.shape) != 4):
            mask = _mask_of_scores(attention_mask, -3)
            return _fused(layer, layer._inverse_sqrt_head_dim, (query, key, value), mask, **causal)
        try:
            layer._return_attention_scores = asked or not (fused or layer._flash_attention)
            return original(query, key, value, attention_mask, training, **causal)
        finally:
            layer._return_attention_scores = asked

    return compute


def _mask_of_scores(mask: Any, axis: int) -> Any:
    if mask is None:
        return None
    for _ in range(4 - len(mask.shape)):
        mask = keras.ops.expand_dims(mask, axis=axis)
    return keras.ops.cast(mask, "bool")


def _fused(
    layer: Any, scale: float, qkv: Any, mask: Any, use_causal_mask: bool = False
) -> tuple[Any, None]:
    flash = layer._flash_attention
    options = dict(mask=mask, scale=scale, is_causal=use_causal_mask, flash_attention=flash)
    return keras.ops.dot_product_attention(*qkv, **options), None
