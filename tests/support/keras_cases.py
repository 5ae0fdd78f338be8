"""What the tests of Keras configs share: layers by name and class, and how to read errors."""

import pytest

from fewbit.keras import DynamicQuantConfig, StaticQuantConfig
from fewbit.keras.config._choose import choose

BOTH = pytest.mark.parametrize("config_class", [StaticQuantConfig, DynamicQuantConfig])
FLAGS = [
    *("const_scale", "const_weight", "dot_product_attention_enable", "emulate", "strict"),
    *("quantize_rotary", "quantize_embeddings", "quantize_attention"),
]


def error(call, kind=ValueError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def says(call, *sentences, kind=ValueError):
    text = error(call, kind)
    for sentence in sentences:
        assert sentence in text, f"{sentence!r} is not in:\n{text}"


# Stand-ins: a config looks at names of classes and of their bases alone.
class Layer:
    pass


class Dense(Layer):
    pass


class MyDense(Dense):
    pass


class Conv2D(Layer):
    pass


class Embedding(Layer):
    pass


class ReversibleEmbedding(Embedding):
    pass


class RotaryEmbedding(Layer):
    pass


LAYERS = [
    ("net/embed", ReversibleEmbedding),
    ("net/conv", Conv2D),
    ("net/dense", Dense),
    ("net/dense_1", MyDense),
    ("net/head", Dense),
]


def chosen(config, layers=LAYERS, **kwargs):
    choices = choose(config, layers, **kwargs)
    return [path for path, choice in choices.items() if choice.quantized]
