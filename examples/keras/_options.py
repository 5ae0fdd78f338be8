"""What the example scripts share: flags, configs by precision, and models with or without a hub."""

import argparse
import os
import pathlib
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

PRECISIONS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
GEMMA = "gemma3_instruct_270m"
PROMPT = "What is the capital of France?"


def parser(description: str, **flags: str) -> argparse.ArgumentParser:
    """The flags of a script: `p`, `m` and `q` with their defaults, `random` and `small`."""
    made = argparse.ArgumentParser(description=description)
    if "p" in flags:
        made.add_argument("-p", "--precision", choices=PRECISIONS, default=flags["p"])
    if "m" in flags:
        made.add_argument("-m", "--model_path", default=flags["m"], help="a preset or a file")
        made.add_argument("--random", action="store_true", help="random weights, no download")
        made.add_argument("--small", action="store_true", help="a tiny random model, for tests")
    if "q" in flags:
        default = str(pathlib.Path(tempfile.gettempdir()) / flags["q"])
        made.add_argument("-q", "--quantized_path", default=default)
    return made


def config(precision: str, *, static: bool):
    """A config for a precision: scales per channel, int4 in groups of 32."""
    import fewbit.keras

    made = fewbit.keras.StaticQuantConfig if static else fewbit.keras.DynamicQuantConfig
    if precision == "int4":
        return made(weight_dtype="int4", group_size=32)
    return made(weight_dtype=precision, weight_scale_granularity="per_channel")


def gemma(options: argparse.Namespace):
    """A Gemma3CausalLM with greedy sampling, and a prompt for it."""
    import keras_hub
    from _random_models import random_gemma3

    if options.small or options.random:
        model = random_gemma3("tiny" if options.small else "270m", sequence_length=64)
    else:
        model = keras_hub.models.Gemma3CausalLM.from_preset(options.model_path)
    model.compile(sampler="greedy")
    return model


def vit(options: argparse.Namespace):
    """An image classifier."""
    import keras
    from _random_models import random_vit

    if options.small or options.random:
        return random_vit(
            "tiny" if options.small else "base", classes=10 if options.small else 1000
        )
    import keras_hub  # noqa: F401  the classes that the file names

    return keras.saving.load_model(options.model_path)


def image(model, path: str | None = None):
    """A batch of one picture for a classifier: a file's, or a pattern of stripes."""
    import keras
    import numpy as np

    height, width, channels = model.backbone.image_shape
    if path is not None:
        picture = keras.utils.load_img(path, target_size=(height, width))
        return keras.utils.img_to_array(picture)[None] / 127.5 - 1
    rows, columns = np.mgrid[:height, :width] / 16
    pattern = np.sin(rows)[..., None] * np.cos(columns)[..., None]
    return np.repeat(pattern, channels, axis=-1)[None].astype("float32")


def top(probabilities, count: int = 3) -> str:
    """The most likely classes of one row of logits."""
    import numpy as np

    logits = np.asarray(probabilities, np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    best = np.argsort(shares)[::-1][:count]
    return ", ".join(f"class {number}: {shares[number]:.1%}" for number in best)
