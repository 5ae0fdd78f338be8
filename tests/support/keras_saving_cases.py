"""Quantized Keras models to save, and what loads them in a process of its own.

python keras_saving_cases.py load <folder>       every <name>.keras there against <name>.npz
python keras_saving_cases.py hub-save <folder>   presets of a small Gemma3 and a small ViT
python keras_saving_cases.py hub-load <folder>   the same presets, by every way to load them
"""

import json
import os
import pathlib
import re
import sys
import warnings

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fewbit.keras  # before KerasHub, which is the order that import sorters give

# isort: split
import keras
import numpy as np

W8A8 = {"weight_qtype": "int8", "act_qtype": "int8"}
W4 = {"weight_qtype": "int4", "tile_size": 16}


@keras.saving.register_keras_serializable("cases")
class Scaled(keras.layers.Dense):
    """A user's subclass of a layer, with an argument and a variable of its own."""

    def __init__(self, units, factor=1.0, **kwargs):
        super().__init__(units, **kwargs)
        self.factor = factor

    def build(self, input_shape):
        super().build(input_shape)
        self.gain = self.add_weight(name="gain", shape=(self.units,), initializer="ones")

    def call(self, inputs):
        return super().call(inputs) * self.gain * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


@keras.saving.register_keras_serializable("cases")
class Block(keras.layers.Layer):
    """A user's layer that makes its own, with nothing but Keras' own way to save it."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.up = keras.layers.Dense(2 * width, activation="gelu")
        self.parts = {"down": [keras.layers.Dense(width)]}

    def build(self, input_shape):
        self.up.build(input_shape)
        self.parts["down"][0].build((*input_shape[:-1], 2 * self.width))

    def call(self, inputs):
        return inputs + self.parts["down"][0](self.up(inputs))


@keras.saving.register_keras_serializable("cases")
class Net(keras.Model):
    """A subclassed model: its config names none of its layers."""

    def __init__(self, depth, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth
        self.blocks = [Block(32) for _ in range(depth)]
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(8)

    def call(self, inputs):
        for block in self.blocks:
            inputs = self.norm(block(inputs))
        return self.head(inputs)

    def get_config(self):
        return {**super().get_config(), "depth": self.depth}


@keras.saving.register_keras_serializable("cases")
class TransformerBlock(keras.layers.Layer):
    """As in every tutorial: no build(), and attention makes its own layers when it is called."""

    def __init__(self, width, heads, **kwargs):
        super().__init__(**kwargs)
        self.width, self.heads = width, heads
        self.att = keras.layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)
        layers = [keras.layers.Dense(2 * width, activation="relu"), keras.layers.Dense(width)]
        self.ffn = keras.Sequential(layers)
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropout = keras.layers.Dropout(0.1)

    def call(self, inputs, training=None):
        x = self.norms[0](inputs + self.dropout(self.att(inputs, inputs), training=training))
        return self.norms[1](x + self.ffn(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "heads": self.heads}


@keras.saving.register_keras_serializable("cases")
class Blocks(keras.layers.Layer):
    """Such blocks in a layer of the same kind."""

    def __init__(self, width, depth, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [TransformerBlock(width, 2) for _ in range(depth)]

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


@keras.saving.register_keras_serializable("cases")
class Tutorial(keras.Model):
    """And in a subclassed model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = TransformerBlock(32, 2)
        self.head = keras.layers.Dense(10)

    def call(self, inputs):
        return self.head(self.block(inputs))


@keras.saving.register_keras_serializable("cases")
class OwnBuild(keras.layers.Layer):
    """A layer that says itself what it is built from."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(48, activation="gelu")

    def build(self, width):
        self.width = width
        self.up.build((None, width))
        self.down = keras.layers.Dense(width)
        self.down.build((None, 48))
        self.built = True

    def call(self, inputs):
        return self.down(self.up(inputs))

    def get_build_config(self):
        return {"width": self.width}

    def build_from_config(self, config):
        self.build(config["width"])


@keras.saving.register_keras_serializable("cases")
class Shelf(keras.layers.Layer):
    """Holds layers that others call; nobody calls or builds it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(16)


@keras.saving.register_keras_serializable("cases")
class WithShelf(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shelf = Shelf()

    def call(self, inputs):
        return self.shelf.dense(inputs)


class Unregistered(keras.layers.Dense):
    """A user's class that loading gets as custom_objects."""


def quantize(model, rule=None, only=None):
    """The model with its layers quantized in place; `only` some, by a test of the layer."""
    from fewbit.keras._planning import layers_of

    rules = [fewbit.QuantizationRule(**(W8A8 if rule is None else rule))]
    if only is not None:
        rest = [path for path, layer in layers_of(model).items() if not only(layer)]
        rules = [fewbit.QuantizationRule(module_path=re.escape(path)) for path in rest] + rules
    fewbit.keras.quantize_model(model, rules, progress=False)
    return model


def sequential(**rule):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(96, activation="relu"), keras.layers.Dense(64)]
    return quantize(keras.Sequential([keras.Input((64,)), *layers]), rule or None)


def functional():
    """Attention, a layer used twice, a wrapper, a branch that stays float."""
    inputs = keras.Input((6, 32))
    x = keras.layers.MultiHeadAttention(2, 16)(inputs, inputs)
    shared = keras.layers.Dense(32)
    x = shared(shared(x))
    x = keras.layers.TimeDistributed(keras.layers.Dense(16))(x)
    x = keras.layers.Concatenate()([x, keras.layers.Dense(4, name="float_one")(inputs)])
    model = keras.Model(inputs, [x, keras.layers.EinsumDense("abc,cd->abd", (6, 8))(x)])
    return quantize(model, only=lambda layer: layer.name != "float_one")


def convolutions():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(16, 3, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.DepthwiseConv2D(3)(x)
    x = keras.layers.Conv2D(32, 1)(x)
    return quantize(keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x)))


def embedding():
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(100, 32)
    return quantize(keras.Model(inputs, table(table(inputs), reverse=True)), W4)


def nested():
    inner = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32), Scaled(32, factor=0.5)])
    inputs = keras.Input((32,))
    return quantize(keras.Model(inputs, Block(32)(inner(inputs))), W4)


def subclassed():
    model = Net(2)
    model(np.zeros((1, 32), np.float32))
    return quantize(model, W4)


def transformer():
    inputs = keras.Input((6, 32))
    x = keras.layers.GlobalAveragePooling1D()(Blocks(32, 2)(inputs))
    return quantize(keras.Model(inputs, keras.layers.Dense(10)(x)))


def transformer_sequential():
    return quantize(keras.Sequential([keras.Input((6, 32)), TransformerBlock(32, 2)]), W4)


def transformer_subclassed():
    model = Tutorial()
    model(np.zeros((1, 6, 32), np.float32))
    return quantize(model)


def shelf():
    model = WithShelf()
    with warnings.catch_warnings():  # Keras tells that nobody builds the layers on the shelf
        warnings.filterwarnings("ignore", r"`build\(\)` was called on layer 'with_shelf")
        model(np.zeros((1, 32), np.float32))
    return quantize(model)


def own_build():
    inputs = keras.Input((32,))
    layer = OwnBuild()
    layer.build(32)
    return quantize(keras.Model(inputs, layer(inputs)))


def own_class():
    return quantize(keras.Sequential([keras.Input((32,)), Scaled(64, factor=3.0)]), W4)


def custom_objects():
    return quantize(keras.Sequential([keras.Input((32,)), Unregistered(64)]))


def bfloat16():
    dense = keras.layers.Dense(64, dtype="mixed_bfloat16")
    return quantize(keras.Sequential([keras.Input((64,)), dense, keras.layers.Dense(8)]))


def weight_only_fp8():
    return sequential(weight_qtype="float8_e4m3fn")


def unpacked_fp8():
    """Layers that kernels do not read from panels: a convolution of pictures, a narrow head."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(16, 3)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    config = fewbit.keras.DynamicQuantConfig("fp8")
    return fewbit.keras.quantize_model(model, config, progress=False)


CASES = {
    case.__name__: case
    for case in (
        *(sequential, functional, convolutions, embedding, nested, subclassed),
        *(own_class, custom_objects, bfloat16, weight_only_fp8, unpacked_fp8),
        *(transformer, transformer_sequential, transformer_subclassed, own_build, shelf),
    )
}


def inputs_of(model, name):
    rng = np.random.default_rng(0)
    if name == "embedding":
        return rng.integers(0, 100, (3, 6)).astype("int32")
    shapes = {"subclassed": (32,), "shelf": (32,), "transformer_subclassed": (6, 32)}
    shape = shapes[name] if name in shapes else model.input_shape[1:]
    return rng.normal(size=(3, *shape)).astype("float32")


def outputs_of(model, inputs):
    return [np.asarray(y, np.float32) for y in keras.tree.flatten(model(inputs))]


def layer_classes(model):
    return [type(layer).__name__ for layer in model._flatten_layers()]


def save(model, folder, name):
    inputs = inputs_of(model, name)
    outputs = outputs_of(model, inputs)
    model.save(folder / f"{name}.keras")
    np.savez(folder / f"{name}.npz", *outputs, inputs=inputs)
    (folder / f"{name}.json").write_text(json.dumps(layer_classes(model)))


def load(folder):
    """What is different, by file, after loading in this process."""
    faults = {}
    for path in sorted(folder.glob("*.keras")):
        saved = np.load(path.with_suffix(".npz"))
        model = keras.saving.load_model(path, custom_objects={"Unregistered": Unregistered})
        outputs = outputs_of(model, saved["inputs"])
        same = all(np.array_equal(y, saved[f"arr_{i}"]) for i, y in enumerate(outputs))
        classes = json.loads(path.with_suffix(".json").read_text())
        if not same or layer_classes(model) != classes:
            pairs = [(y, saved[f"arr_{i}"]) for i, y in enumerate(outputs)]
            error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)
            same_classes = layer_classes(model) == classes
            faults[path.stem] = {"error": float(error), "same_classes": same_classes}
    return faults


def gemma_save(folder):
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(
        **{"vocabulary_size": 300, "image_size": None, "vision_encoder": None, "num_layers": 1},
        **{"num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 64, "head_dim": 32},
        intermediate_dim=128,
    )
    model = keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)
    quantize(model, W4)
    ids = np.random.default_rng(0).integers(1, 300, (2, 12)).astype("int32")
    logits = model({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    np.savez(folder / "gemma.npz", ids=ids, logits=np.asarray(logits))
    model.save_to_preset(str(folder / "gemma"))
    model.save(folder / "gemma.keras")
    return [type(model).__name__, type(backbone).__name__]


def gemma_load(folder):
    hub_imported = "keras_hub" in sys.modules
    by_keras = keras.saving.load_model(folder / "gemma.keras", compile=False)
    import keras_hub
    from keras_hub import models

    preset, saved = str(folder / "gemma"), np.load(folder / "gemma.npz")
    tokens = {"token_ids": saved["ids"], "padding_mask": np.ones_like(saved["ids"])}
    ways = {
        "load_model": by_keras,
        "Gemma3CausalLM": models.Gemma3CausalLM.from_preset(preset),
        "CausalLM": models.CausalLM.from_preset(preset),
    }
    same = {k: np.array_equal(np.asarray(m(tokens)), saved["logits"]) for k, m in ways.items()}
    same["class"] = all(isinstance(model, models.Gemma3CausalLM) for model in ways.values())
    for cls in (models.Backbone, models.Gemma3Backbone):
        backbone = cls.from_preset(preset)
        layer = backbone.transformer_layers[0].attention.query_dense
        kept = isinstance(backbone, keras_hub.models.Gemma3Backbone)
        same[cls.__name__] = kept and type(layer).__name__ == "QDynamicEinsumDense"
    errors = []
    for cls in (models.LlamaBackbone, models.LlamaCausalLM):
        try:
            cls.from_preset(preset)
        except ValueError as error:
            errors.append(str(error))
    return {"same": same, "errors": errors, "hub_imported": hub_imported}


def vit_save(folder, config=None):
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        **{"image_shape": (32, 32, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2},
        **{"hidden_dim": 64, "mlp_dim": 128},
    )
    model = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=5, preprocessor=None)
    if config is None:
        quantize(model)
    else:
        fewbit.keras.quantize_model(model, config, progress=False)
        model.summary()
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    np.savez(folder / "vit.npz", images=images, logits=np.asarray(model(images)))
    fewbit.keras.save_to_preset(model, folder / "vit")
    fewbit.keras.save_to_preset(model, folder / "vit")  # over itself
    model.save(folder / "vit.keras")
    return [type(model).__name__, type(backbone).__name__]


def vit_load(folder):
    from keras_hub import models

    preset, saved = str(folder / "vit"), np.load(folder / "vit.npz")
    ways = {
        "load_model": keras.saving.load_model(folder / "vit.keras"),
        "ViTImageClassifier": models.ViTImageClassifier.from_preset(preset),
        "ImageClassifier": models.ImageClassifier.from_preset(preset),
    }
    images = saved["images"]
    same = {k: np.array_equal(np.asarray(m(images)), saved["logits"]) for k, m in ways.items()}
    same["class"] = all(isinstance(m, models.ViTImageClassifier) for m in ways.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = models.ImageClassifier.from_preset(preset, num_classes=7)
    same["shape"] = other(images).shape == (2, 7)
    return {"same": same, "warnings": [str(each.message) for each in caught]}


def sam(folder):
    """A segmenter of KerasHub, many of whose layers are built from nothing at all."""
    from keras_hub import layers, models

    size, width = 64, 8
    encoder = models.ViTDetBackbone(
        **{"hidden_size": 16, "num_layers": 1, "intermediate_dim": 32, "num_heads": 2},
        **{"global_attention_layer_indices": [0], "patch_size": 16, "window_size": 2},
        **{"num_output_channels": width, "image_shape": (size, size, 3)},
    )
    prompts = layers.SAMPromptEncoder(
        **{"hidden_size": width, "image_embedding_size": (size // 16, size // 16)},
        **{"input_image_size": (size, size), "mask_in_channels": 4},
    )
    masks = layers.SAMMaskDecoder(
        **{"num_layers": 1, "hidden_size": width, "intermediate_dim": 32, "num_heads": 2},
        **{"embedding_dim": width, "num_multimask_outputs": 3, "iou_head_depth": 2},
        iou_head_hidden_dim=8,
    )
    model = models.SAMImageSegmenter(models.SAMBackbone(encoder, prompts, masks))
    config = fewbit.keras.DynamicQuantConfig("int8", white_list=[keras.layers.Dense])
    fewbit.keras.quantize_model(model, config, progress=False)
    inputs = {
        "images": np.random.default_rng(0).normal(size=(1, size, size, 3)).astype("float32"),
        "points": np.ones((1, 1, 2), "float32"),
        "labels": np.ones((1, 1), "float32"),
        "boxes": np.ones((1, 1, 2, 2), "float32"),
        "masks": np.zeros((1, 0, size // 4, size // 4, 1), "float32"),
    }
    wanted = model(inputs)
    model.save(folder / "sam.keras")
    model.save_to_preset(str(folder / "sam"))
    ways = {
        "keras": keras.saving.load_model(folder / "sam.keras"),
        "preset": models.ImageSegmenter.from_preset(str(folder / "sam")),
    }
    found = {name: loaded(inputs) for name, loaded in ways.items()}
    same = {n: all(np.array_equal(y[k], wanted[k]) for k in wanted) for n, y in found.items()}
    return same | {"classes": layer_classes(ways["preset"]) == layer_classes(model)}


if __name__ == "__main__":
    does = {"load": load, "gemma-save": gemma_save, "gemma-load": gemma_load}
    fp8 = fewbit.keras.DynamicQuantConfig("fp8")
    does |= {"vit-save": vit_save, "vit-load": vit_load, "sam": sam}
    does = (does | {"vit-fp8-save": lambda folder: vit_save(folder, fp8)})[sys.argv[1]]
    print(json.dumps(does(pathlib.Path(sys.argv[2]))))
