"""KerasHub models with random weights: the shapes of known ones, without a download."""

from typing import Any

import _byte_tokenizer
import keras
import keras_hub
from _shapes import GEMMA3, VIT


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
