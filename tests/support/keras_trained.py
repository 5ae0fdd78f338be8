"""Small Keras models trained on real images, and random Gemma3 models: what accuracy is told of."""

import gzip

import data
import keras
import numpy as np
from keras import layers
from keras_nets import quantized

from fewbit.keras import DynamicQuantConfig, StaticQuantConfig

CONFIGS = {
    "int8 static": StaticQuantConfig("int8"),
    "int8 dynamic per channel": DynamicQuantConfig("int8", weight_scale_granularity="per_channel"),
    "fp8 static": StaticQuantConfig("fp8_e4m3"),
    "fp8 dynamic": DynamicQuantConfig("fp8_e4m3"),
    "int4 g32 weight-only": DynamicQuantConfig("int4", activation_dtype=None, group_size=32),
}
# Points of accuracy that may be lost.
POINTS = {"int8": 0.5, "fp8": 1.0, "int4": 1.5}


def points(name):
    return POINTS[name.split()[0]]


def digits():
    """scikit-learn's 8x8 digits: (train images, labels), (test images, labels)."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    labels = labels.astype("int32")  # Keras hands them to JAX as they are, which warns of int64
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1200], order[1200:]
    return (images[train], labels[train]), (images[test], labels[test])


def fashion_mnist(fetch=data.fetch, count=12000):
    """`count` of 60,000 and all of 10,000 labelled 28x28 images of clothes."""
    folder = fetch("fashion-mnist")

    def read(name, header, shape):
        raw = gzip.decompress((folder / name).read_bytes())
        return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)

    def part(prefix):
        images = read(f"{prefix}-images-idx3-ubyte.gz", 16, (-1, 28, 28, 1)) / np.float32(255)
        return images, read(f"{prefix}-labels-idx1-ubyte.gz", 8, (-1,)).astype("int32")

    images, labels = part("train")
    return (images[:count], labels[:count]), part("t10k")


def cnn(size, width=32):
    first = 1 if size < 16 else 2
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(width, 3, strides=first, padding="same", activation="relu"),
            layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


class Positions(layers.Layer):
    """Learnt positions, added."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=input_shape[1:], initializer="normal", name="table")

    def call(self, x):
        return x + self.table


def transformer(size, width=64, blocks=2):
    patch = 2 if size < 16 else 4
    inputs = keras.Input((size, size, 1))
    x = layers.Conv2D(width, patch, strides=patch)(inputs)
    x = Positions()(layers.Reshape((-1, width))(x))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(2 * width, activation="gelu")(y))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def trained(make, train, epochs, batch=128):
    images, labels = train
    keras.utils.set_random_seed(0)
    model = make(images.shape[1])
    steps = epochs * -(-len(images) // batch)
    rate = keras.optimizers.schedules.CosineDecay(3e-3, steps)
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(images, labels, batch_size=batch, epochs=epochs, verbose=0)
    return model


def accuracy(model, test):
    """Percent of right answers."""
    images, labels = test
    return 100 * float(
        np.mean(model.predict(images, batch_size=250, verbose=0).argmax(1) == labels)
    )


def lost_points(model, train, test):
    """The float accuracy, and by how many points each config's is lower."""
    exact = accuracy(model, test)
    lost = {}
    for name, config in CONFIGS.items():
        made = quantized(model, config, train[0][:256], inplace=False)
        lost[name] = exact - accuracy(made, test)
    return exact, lost


GEMMA = {
    "int8 dynamic per channel": (CONFIGS["int8 dynamic per channel"], 0.999),
    "int8 static per channel": (
        StaticQuantConfig("int8", weight_scale_granularity="per_channel"),
        0.998,
    ),
    "fp8 dynamic": (CONFIGS["fp8 dynamic"], 0.992),
    "fp8 static": (CONFIGS["fp8 static"], 0.992),
    "int4 g32, table too": (CONFIGS["int4 g32 weight-only"], 0.965),
    "int4 g32, float table": (
        DynamicQuantConfig("int4", activation_dtype=None, group_size=32, quantize_embeddings=False),
        0.98,
    ),
}


def random_gemma3():
    """Two layers, 512 wide, as the bars are told of."""
    import keras_hub

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=8000,
        image_size=None,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=512,
        intermediate_dim=2048,
        head_dim=128,
        vision_encoder=None,
    )
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


def tokens(batch, length, vocabulary=8000, seed=0):
    ids = np.random.default_rng(seed).integers(1, vocabulary, (batch, length)).astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids, bool)}


def gemma_cosines():
    """The cosine of float and quantized logits, by config."""
    model = random_gemma3()
    inputs = tokens(4, 64)
    exact = np.asarray(model(inputs), "float64").ravel()
    found = {}
    for name, (config, _) in GEMMA.items():
        made = quantized(model, config, tokens(4, 64, seed=1), inplace=False)
        logits = np.asarray(made(inputs), "float64").ravel()
        found[name] = float(exact @ logits / np.linalg.norm(exact) / np.linalg.norm(logits))
    return found
