"""Where a layer sits inside another, by attributes and positions: the same after every load.

Names of layers will not do: Keras numbers them anew in each process.
"""

from collections.abc import Iterator
from typing import Any

import keras

from fewbit.keras._variables import direct_sublayers

# Lists in which Keras itself keeps what the model's own attributes name better.
_BOOKKEEPING = ("_layers", "_operations", "_operations_by_depth", "_functional", "_nodes_by_depth")


def places(layer: keras.Layer) -> dict[str, keras.Layer]:
    """Every layer below this one by its place, each once.

    >>> import keras
    >>> attention = keras.layers.MultiHeadAttention(2, 4)
    >>> attention.build((1, 3, 8), (1, 3, 8))
    >>> list(places(attention))[:2]
    ['_query_dense', '_key_dense']
    """
    found: dict[str, keras.Layer] = {}
    seen = {id(layer)}

    def walk(parent: keras.Layer, prefix: str) -> None:
        for name, child in _children(parent):
            if id(child) not in seen:
                seen.add(id(child))
                found[prefix + name] = child
                walk(child, f"{prefix}{name}/")

    walk(layer, "")
    return found


def described(layer: keras.Layer) -> str:
    """How messages name a layer.

    >>> described(keras.layers.Dense(2, name='up'))
    "Dense 'up'"
    """
    return f"{getattr(layer, '_fewbit_original', type(layer)).__name__} '{layer.name}'"


def _children(layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    attributes = [(name, value) for name, value in vars(layer).items() if name not in _BOOKKEEPING]
    for name, value in sorted(attributes, key=lambda pair: pair[0].startswith("_")):
        yield from _layers_in(name, value)
    for number, child in enumerate(direct_sublayers(layer)):
        yield f"layers/{number}", child


def _layers_in(name: str, value: Any) -> Iterator[tuple[str, keras.Layer]]:
    if isinstance(value, keras.Layer):
        yield name, value
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _layers_in(f"{name}/{number}", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _layers_in(f"{name}/{key}", each)
