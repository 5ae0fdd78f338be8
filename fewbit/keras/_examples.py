"""How a layer is called, as far as its products go: abstract inputs of the shapes it was built for.

`register_calls` tells it for a layer that cannot be called on its build shapes alone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import keras

from fewbit.keras._attention import is_attention

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
_CALLS: dict[type, Callable[[Any], Calls]] = {}
_BATCH, _LENGTH = 1, 16  # what stands for an unknown size


def register_calls(cls: type) -> Callable[[Callable[[Any], Calls]], Callable[[Any], Calls]]:
    """Say how layers of this class (and its subclasses) are called: `[(args, kwargs), ...]`.

    >>> import jax, keras
    >>> @register_calls(keras.layers.Dense)
    ... def calls(layer):
    ...     return [((jax.ShapeDtypeStruct((1, 4), 'float32'),), {})]
    >>> _ = _CALLS.pop(keras.layers.Dense)
    """

    def register(calls: Callable[[Any], Calls]) -> Callable[[Any], Calls]:
        _CALLS[cls] = calls
        return calls

    return register


def is_rotary(layer: keras.Layer) -> bool:
    """Whether a layer is KerasHub's rotary embedding, which holds no weights."""
    return any(cls.__name__ == "RotaryEmbedding" for cls in type(layer).__mro__)


def example_calls(layer: keras.Layer, rule: Any = None) -> Calls:
    """Abstract arguments for every way in which the layer uses its weights, by the layer's rule."""
    calls = _calls(layer)
    tile = getattr(rule, "bwd_weight_grad_tile_size", None)
    if tile is None:
        return calls
    # Tiles of a weight's gradient are cut from the batch, whose size is known in training only.
    batch = round(1 / tile) if isinstance(tile, float) else tile

    def in_whole_tiles(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct) or x.shape[:1] != (_BATCH,):
            return x
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)

    made: Calls = jax.tree.map(in_whole_tiles, calls)
    return made


def _calls(layer: keras.Layer) -> Calls:
    for cls in type(layer).__mro__:
        if cls in _CALLS:
            return _CALLS[cls](layer)
    if is_rotary(layer):  # made for heads of any size, and never built for one
        return [((jax.ShapeDtypeStruct((_BATCH, _LENGTH, 1, 64), layer.compute_dtype),), {})]
    config = layer.get_build_config()
    if not config:
        return []
    shapes = config.get("shapes_dict") or {"input_shape": config["input_shape"]}
    given = [shape for shape in shapes.values() if shape is not None]
    return [(tuple(abstract(layer, shape) for shape in given), _mask_of_attention(layer))]


def _mask_of_attention(layer: keras.Layer) -> dict[str, Any]:
    """The mask without which KerasHub's attention layers cannot be called."""
    keras_own = isinstance(
        layer, keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention
    )
    if keras_own or not is_attention(layer):
        return {}
    if "attention_mask" not in inspect.signature(type(layer).call).parameters:
        return {}
    return {"attention_mask": jax.ShapeDtypeStruct((_BATCH, _LENGTH, _LENGTH), "bool")}


def abstract(layer: keras.Layer, shape: Any, dtype: str | None = None) -> Any:
    """An input of a shape whose unknown sizes are small ones; a tree of them for a tree."""
    if isinstance(shape, dict):
        return {key: abstract(layer, value, dtype) for key, value in shape.items()}
    if any(isinstance(size, list | tuple) for size in shape):
        return [abstract(layer, each, dtype) for each in shape]
    sizes = [
        size if size is not None else (_BATCH if axis == 0 else _LENGTH)
        for axis, size in enumerate(shape)
    ]
    return jax.ShapeDtypeStruct(tuple(sizes), dtype or layer.compute_dtype)


@register_calls(keras.layers.Embedding)
def _look_up(layer: Any) -> Calls:
    calls: Calls = [((jax.ShapeDtypeStruct((_BATCH, _LENGTH), "int32"),), {})]
    if hasattr(layer, "tie_weights"):  # a reversible one, of Keras or of KerasHub
        hidden = jax.ShapeDtypeStruct((_BATCH, _LENGTH, layer.output_dim), layer.compute_dtype)
        calls.append(((hidden,), {"reverse": True}))
    return calls


@register_calls(keras.layers.LSTMCell)
@register_calls(keras.layers.GRUCell)
@register_calls(keras.layers.SimpleRNNCell)
def _step(layer: Any) -> Calls:
    config = layer.get_build_config()
    if not config:
        return []
    x = jax.ShapeDtypeStruct((_BATCH, config["input_shape"][-1]), layer.compute_dtype)
    sizes = layer.state_size if isinstance(layer.state_size, list | tuple) else [layer.state_size]
    states = [jax.ShapeDtypeStruct((_BATCH, size), layer.compute_dtype) for size in sizes]
    return [((x, states), {})]
