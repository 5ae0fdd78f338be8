"""KerasHub models with random weights: the shapes of known ones, without a download."""

from typing import Any

import _byte_tokenizer
import keras
import keras_hub

GEMMA3: dict[str, dict[str, Any]] = {
    "270m": {
        "vocabulary_size": 262144,
        "num_layers": 18,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 640,
        "intermediate_dim": 2048,
        "head_dim": 256,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "use_sliding_window_attention": True,
        "sliding_window_size": 512,
    },
    "2 layers": {
        "vocabulary_size": 8000,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "hidden_dim": 512,
        "intermediate_dim": 2048,
        "head_dim": 128,
    },
    "tiny": {
        "vocabulary_size": 512,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "hidden_dim": 64,
        "intermediate_dim": 128,
        "head_dim": 32,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "use_sliding_window_attention": True,
        "sliding_window_size": 8,
    },
}
VIT: dict[str, dict[str, Any]] = {
    "base": {
        "image_shape": (224, 224, 3),
        "patch_size": 16,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "mlp_dim": 3072,
    },
    "tiny": {
        "image_shape": (64, 64, 3),
        "patch_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 64,
        "mlp_dim": 128,
    },
}


def random_gemma3(
    shape: str = "270m", *, sequence_length: int | None = 64, seed: int = 0, **changes: Any
) -> keras_hub.models.Gemma3CausalLM:
    """A `Gemma3CausalLM`; strings go through a byte tokenizer (`sequence_length=None`: without)."""
    keras.utils.set_random_seed(seed)
    config = {**GEMMA3[shape], "image_size": None, **changes}
    backbone = keras_hub.models.Gemma3Backbone(**config)
    preprocessor = None
    if sequence_length is not None:
        size = config["vocabulary_size"]
        preprocessor = _byte_tokenizer.byte_preprocessor(size, sequence_length)
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=preprocessor)


def random_vit(
    shape: str = "base", *, classes: int = 1000, seed: int = 0
) -> keras_hub.models.ViTImageClassifier:
    """A `ViTImageClassifier`."""
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.ViTBackbone(**VIT[shape])
    return keras_hub.models.ViTImageClassifier(
        backbone=backbone, num_classes=classes, preprocessor=None
    )
