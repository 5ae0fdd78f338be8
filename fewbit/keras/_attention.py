"""Which way attention takes: Keras' fused operation, or two products that can be quantized.

Keras and KerasHub decide it inside the layer, by the device and by what is asked for. A config
decides it by `dot_product_attention_enable`, so that calibration and every call take one way.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras

from fewbit.jaxprs import scope_name
from fewbit.keras._variables import sublayers


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
def sublayer_scopes(layer: keras.Layer) -> Iterator[None]:
    """While `layer` is traced: products inside its sublayers, such as rotary angles, are theirs."""
    with own_attributes([(each, {"call": _scoped(each)}) for each in sublayers(layer)]):
        yield


@contextlib.contextmanager
def own_attributes(changes: Sequence[tuple[keras.Layer, dict[str, Any]]]) -> Iterator[None]:
    """While instances have attributes past Keras' tracking: they are no parts of the layers."""
    before = [{name: vars(each)[name] for name in own if name in vars(each)}
              for each, own in changes]  # fmt: skip
    for each, own in changes:
        vars(each).update(own)
    try:
        yield
    finally:
        for (each, own), old in zip(changes, before, strict=True):
            for name in own:
                del vars(each)[name]
            vars(each).update(old)


def _scoped(layer: keras.Layer) -> Any:
    call = layer.call

    @functools.wraps(call)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope_name(f"inside {layer.path}", type(layer).__name__)):
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
        axis = -len(layer._attention_axes) * 2 - 1
        return _fused(layer, layer._inverse_sqrt_key_dim, axis, query, key, value, attention_mask,
                      **causal)  # fmt: skip

    return compute


def _grouped_query(layer: Any, fused: bool) -> Any:
    original = layer._compute_attention

    @functools.wraps(original)
    def compute(query, key, value, attention_mask=None, training=None, **causal):
        asked = layer._return_attention_scores
        if fused and not (layer.dropout > 0.0 or asked or len(query.shape) != 4):
            scale = layer._inverse_sqrt_head_dim
            return _fused(layer, scale, -3, query, key, value, attention_mask, **causal)
        try:
            layer._return_attention_scores = asked or not (fused or layer._flash_attention)
            return original(query, key, value, attention_mask, training, **causal)
        finally:
            layer._return_attention_scores = asked

    return compute


def _fused(
    layer: Any,
    scale: float,
    axis: int,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    use_causal_mask: bool = False,
) -> tuple[Any, None]:
    if mask is not None:
        for _ in range(4 - len(mask.shape)):
            mask = keras.ops.expand_dims(mask, axis=axis)
        mask = keras.ops.cast(mask, "bool")
    out = keras.ops.dot_product_attention(
        query=query,
        key=key,
        value=value,
        mask=mask,
        scale=scale,
        is_causal=use_causal_mask,
        flash_attention=layer._flash_attention,
    )
    return out, None
