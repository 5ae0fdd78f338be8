"""Small Keras models that Neural Compressor quantizes and saves, and fewbit loads. Imports neither.

Each has a place for what its file must tell: layers by attribute, in lists and in a graph, a tied
table, attention, ranges that keep away from zero, layers that stay float.
"""

import keras
import numpy as np
from keras import layers
from peers.cases import numbers


@keras.saving.register_keras_serializable(package="peers")
class Block(layers.Layer):
    """A layer around others, with a norm that stays float."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.norm = layers.LayerNormalization()
        self.up = layers.Dense(2 * width, activation="relu")
        self.down = layers.Dense(width)

    def build(self, shape):
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * self.width))
        self.built = True

    def call(self, x):
        return x + self.down(self.up(self.norm(x)))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable(package="peers")
class Net(keras.Model):
    """Layers with automatic names, by attribute and in lists."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.ReversibleEmbedding(24, 16)
        self.blocks = [Block(16), Block(16)]
        self.heads = layers.MultiHeadAttention(2, 8)
        self.split = layers.EinsumDense("abc,cde->abde", (None, 4, 8), bias_axes="de")
        self.last = [layers.Dense(8, activation="sigmoid"), layers.Dense(4)]

    def build(self, shape):
        hidden = (*shape, 16)
        self.table.build(shape)
        for block in self.blocks:
            block.build(hidden)
        self.heads.build(hidden, hidden)
        self.split.build(hidden)
        for layer in self.last:
            layer.build((*shape, 4, 8))
        self.built = True

    def call(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        x = x + self.heads(x, x)
        split = self.last[1](self.last[0](self.split(x)))
        return keras.ops.concatenate(
            [self.table(x, reverse=True), keras.ops.reshape(split, (*split.shape[:2], 16))], -1
        )


def net(**kwargs):
    model = Net(**kwargs)
    model.build((3, 6))
    return model


def graph(**kwargs):
    inputs = keras.Input((9, 9, 3))
    x = layers.Conv2D(8, 3, strides=2, activation="relu", name="patch")(inputs)
    x = layers.Flatten()(x)
    x = layers.Dense(8, activation="relu", name="kept")(x)
    x = layers.Dense(6, activation="tanh", name="middle")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(x), **kwargs)


def sequence(**kwargs):
    made = [layers.Dense(12, activation="sigmoid", name="up"), layers.Dense(4, name="down")]
    return keras.Sequential([keras.Input((8,)), *made], **kwargs)


def gemma(**kwargs):
    from keras_hub.models import Gemma3Backbone, Gemma3CausalLM

    sizes = dict(num_query_heads=4, num_key_value_heads=2, hidden_dim=16, head_dim=8)
    backbone = Gemma3Backbone(
        vocabulary_size=32, image_size=16, num_layers=1, intermediate_dim=32,
        query_head_dim_normalize=True, sliding_window_size=8, **sizes, **kwargs,
    )  # fmt: skip
    return Gemma3CausalLM(backbone=backbone, preprocessor=None)


def vit(**kwargs):
    from keras_hub.models import ViTBackbone, ViTImageClassifier

    sizes = dict(num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32)
    backbone = ViTBackbone(image_shape=(8, 8, 3), patch_size=4, **sizes, **kwargs)
    return ViTImageClassifier(backbone=backbone, num_classes=5, preprocessor=None)


def tokens():
    ids = np.random.default_rng(0).integers(1, 24, (3, 6)).astype("int32")
    return ids


def prompts():
    mask = np.ones((3, 6), "int32")
    mask[1, 4:] = 0
    return {"token_ids": tokens(), "padding_mask": mask}


INPUTS = {
    "net": tokens,
    "graph": lambda: np.asarray(numbers((4, 9, 9, 3), 11, offset=0.2)),
    "sequence": lambda: np.asarray(numbers((5, 8), 12, offset=4.0, factor=0.5)),
    "gemma": prompts,
    "vit": lambda: np.asarray(numbers((2, 8, 8, 3), 13, offset=0.5, factor=0.2)),
}
MAKERS = {"net": net, "graph": graph, "sequence": sequence, "gemma": gemma, "vit": vit}
_CONSTANT = dict(const_scale=True, const_weight=True)
_CHANNELS = dict(weight_scale_granularity="per_channel")
_FUSED = dict(dot_product_attention_enable=True)
E5M2 = dict(weight_dtype="fp8_e5m2", activation_dtype="fp8_e5m2")
INT8 = dict(weight_dtype="int8", activation_dtype="int8")

# name: (the model, configs as (class, fields), how the model is made, whether it is a preset)
FILES = {
    "net_static_int8": ("net", [("StaticQuantConfig", INT8 | _CHANNELS)], {}, False),
    "net_static_fp8": ("net", [("StaticQuantConfig", {})], {}, False),
    "net_static_fused": ("net", [("StaticQuantConfig", INT8 | _FUSED)], {}, False),
    "net_dynamic_int8": ("net", [("DynamicQuantConfig", INT8)], {}, False),
    "net_dynamic_fp8": ("net", [("DynamicQuantConfig", _CHANNELS | _CONSTANT)], {}, False),
    "graph_static_int8": (
        "graph", [("StaticQuantConfig", INT8 | _CONSTANT | {"exclude_list": ["kept"]})], {}, False,
    ),
    "graph_dynamic_fp8": ("graph", [("DynamicQuantConfig", {"white_list": ["Conv2D"]})], {}, False),
    "graph_sum": (
        "graph",
        [("StaticQuantConfig", {}), ("DynamicQuantConfig", E5M2 | {"white_list": ["mid", "head"]})],
        {}, False,
    ),
    "sequence_static_int8": ("sequence", [("StaticQuantConfig", INT8)], {}, False),
    "sequence_dynamic_int8": ("sequence", [("DynamicQuantConfig", INT8)], {}, False),
    "gemma_static_int8": ("gemma", [("StaticQuantConfig", INT8 | _CHANNELS)], {}, True),
    "gemma_static_fp8": ("gemma", [("StaticQuantConfig", {})], {}, True),
    "gemma_static_fused": ("gemma", [("StaticQuantConfig", INT8 | _FUSED)], {}, True),
    "gemma_dynamic_int8": ("gemma", [("DynamicQuantConfig", INT8)], {}, True),
    "gemma_bfloat16": ("gemma", [("StaticQuantConfig", {})], {"dtype": "bfloat16"}, True),
    "vit_static_fp8": ("vit", [("StaticQuantConfig", _CONSTANT)], {}, True),
    "vit_static_int8": ("vit", [("StaticQuantConfig", INT8)], {}, True),
    "vit_dynamic_int8": ("vit", [("DynamicQuantConfig", INT8 | _CHANNELS)], {}, True),
}  # fmt: skip
# Those of them that are kept in tests/golden/neural_compressor.
GOLDEN = (
    *("net_static_int8", "net_dynamic_fp8", "graph_static_int8", "graph_sum"),
    *("sequence_static_int8", "sequence_dynamic_int8", "gemma_static_int8", "vit_static_fp8"),
)


def drawn(kind, **kwargs):
    """A model whose values do not depend on Keras or its version."""
    model = MAKERS[kind](**kwargs)
    for i, weight in enumerate(model.weights):
        scale = weight.name in ("gamma", "scale")
        factor = 1 / np.sqrt(max(1, np.prod(weight.shape[:-1])))
        drawn = numbers(weight.shape, 700 + i, factor=float(0.1 if scale else factor))
        weight.assign(keras.ops.cast(drawn + scale, weight.dtype))
    return model
