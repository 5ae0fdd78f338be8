"""Shapes of KerasHub models, by its own names. Needs no Keras."""

from typing import Any

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
