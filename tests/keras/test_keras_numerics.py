"""Quantized Keras layers against an obvious float64 reference: round both operands, multiply."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers
from keras_nets import error_of, quantized, sample

from fewbit.keras import DynamicQuantConfig, StaticQuantConfig

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def rounded(x, dtype, axes, *, bound=127.5, zero_point=False):
    """x through few bits and back, with one scale for the values along `axes` (None: for all)."""
    x = np.asarray(x, "float64")
    axes = tuple(range(x.ndim)) if axes is None else axes
    if zero_point:
        low, high = (edge(edge(x, axes, keepdims=True), 0) for edge in (_min, _max))
        scale = np.float32((high - low) / 255)
        zero = np.round(-128 - low / scale)
        return (np.clip(np.round(x / scale) + zero, -128, 127) - zero) * scale
    absmax = np.abs(x).max(axis=axes, keepdims=True)
    if dtype == "int8":
        # The product that fewbit divides by. A negative extreme lies between two codes.
        scale = np.float32(absmax) * (np.float32(1) / np.float32(bound))
        codes = np.clip(np.round(np.float32(x) / scale), -128, 127)
        return codes.astype("float64") * scale
    scale = np.float32(absmax / 448)
    return (x / scale).astype("float32").astype(FP8).astype("float64") * scale


def _min(x, *args, **kwargs):
    return np.minimum(x, *args) if not kwargs else x.min(*args, **kwargs)


def _max(x, *args, **kwargs):
    return np.maximum(x, *args) if not kwargs else x.max(*args, **kwargs)


def convolve(x, w):
    """A 3x3 convolution without padding, by hand."""
    rows, columns = x.shape[1] - 2, x.shape[2] - 2
    return sum(
        np.einsum("bhwc,cd->bhwd", x[:, i : i + rows, j : j + columns], w[i, j])
        for i in range(3)
        for j in range(3)
    )


# A layer, its input, the product, the kernel's axes that share a channel's scale, and the input's
# axes that share a scale of their own when ranges are dynamic.
LAYERS = {
    "Dense": (
        lambda: layers.Dense(64, bias_initializer="normal"),
        sample(6, 32),
        lambda x, w: x @ w,
        (0,),
        (1,),
    ),
    "EinsumDense": (
        lambda: layers.EinsumDense("abc,cde->abde", (5, 4, 16), bias_axes="de"),
        sample(3, 5, 32),
        lambda x, w: np.einsum("abc,cde->abde", x, w),
        (0,),
        (2,),
    ),
    "Conv2D": (
        lambda: layers.Conv2D(32, 3, bias_initializer="normal"),
        sample(2, 7, 7, 16),
        convolve,
        (0, 1, 2),
        (1, 2, 3),
    ),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def run(name, config):
    make, x, product, channel, row = LAYERS[name]
    x = x.copy()
    x[..., 0] = 5.0  # the largest of every row, and positive: it has one code, 127
    model = keras.Sequential([keras.Input(x.shape[1:]), make()])
    kernel, bias = (np.asarray(v, "float64") for v in model.layers[0].variables)
    y = np.asarray(quantized(model, config, x)(x))
    return y, x, kernel, np.asarray(model.layers[0].kernel.value), bias, product, channel, row


@pytest.fixture(autouse=True)
def _the_same_kernels_every_time():
    keras.utils.set_random_seed(0)


def same_codes(stored, wanted, kernel, axes):
    """The stored weights are the wanted ones, but the extremes, which lie between two codes."""
    absmax = np.abs(kernel).max(axis=axes, keepdims=True)
    between = np.isclose(kernel, -absmax, rtol=1e-6)
    error = np.abs(stored - wanted) / absmax
    # In float32 a number between two codes may go to the other one: a few do, by one code.
    assert np.mean(error[~between] > 1e-6) < 2e-3 and error.max() < 1 / 12


@EVERY_LAYER
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("config_class", [StaticQuantConfig, DynamicQuantConfig])
@pytest.mark.parametrize(
    "granularity", [pytest.param("per_tensor", marks=pytest.mark.long), "per_channel"]
)
def test_real_arithmetic(name, dtype, config_class, granularity):
    config = config_class(dtype, weight_scale_granularity=granularity)
    y, x, kernel, stored, bias, product, channel, row = run(name, config)
    axes = None if granularity == "per_tensor" else channel
    same_codes(stored, rounded(kernel, dtype, axes), kernel, axes)
    x = rounded(x, dtype, None if config.static else row)
    assert error_of(y, product(x, stored) + bias) < 1e-5


@EVERY_LAYER
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("config_class", [StaticQuantConfig, DynamicQuantConfig])
def test_emulation(name, dtype, config_class):
    y, x, kernel, _, bias, product, _, _ = run(name, config_class(dtype, emulate=True))
    w = rounded(kernel, dtype, None, bound=127)
    x = rounded(x, dtype, None, zero_point=dtype == "int8")
    assert error_of(y, product(x, w) + bias) < 1e-5


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_embeddings(granularity, emulate):
    ids = np.array([[3, 0, 99], [7, 7, 1]])
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(100, 64)])
    table = np.asarray(model.layers[0].embeddings)
    config = DynamicQuantConfig("int8", weight_scale_granularity=granularity, emulate=emulate)
    quantized(model, config)
    axes = None if granularity == "per_tensor" else (1,)
    wanted = rounded(table, "int8", axes, bound=127 if emulate else 127.5)
    same_codes(np.asarray(model.layers[0].embeddings.value), wanted, table, axes)
    assert error_of(model(ids), np.asarray(model.layers[0].embeddings.value)[ids]) < 1e-6


def test_reversible_embeddings_look_up_and_project_from_one_table():
    table = layers.ReversibleEmbedding(96, 64)
    ids = keras.Input((5,), dtype="int32")
    model = keras.Model(ids, table(table(ids) * 3.0, reverse=True))
    floats = np.asarray(table.embeddings)
    x = np.array([[1, 2, 3, 95, 0]])
    quantized(model, DynamicQuantConfig("int8", weight_scale_granularity="per_channel"))
    rows = np.asarray(table.embeddings.value, "float64")
    same_codes(rows, rounded(floats, "int8", (1,)), floats, (1,))
    hidden = rounded(np.asarray(rows[x] * 3.0, "float32"), "int8", (2,))
    # In float32 an activation between two codes may go to the other one.
    assert error_of(model(x), hidden @ rows.T) < 2e-3
    assert sum(v.shape == (96, 64) or v.value.size >= 96 * 64 for v in table.variables) == 1
