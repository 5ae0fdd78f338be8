"""Layers and helpers under the names of Intel Neural Compressor, against plain NumPy."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import fewbit.keras as fk
from fewbit.keras import _compat

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
RNG = np.random.default_rng(0)
INPUTS = [(size * RNG.normal(size=(2, 8))).astype("float32") for size in (1.0, 250.0, 0.01)]
TYPES = ["int8", "float8_e4m3fn", "float8_e5m2"]
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def rounded(x, qtype, edge):
    """Quantized and back, symmetric, in NumPy."""
    scale = np.float32(edge) / np.float32(LARGEST[qtype])
    if qtype == "int8":
        return np.clip(np.round(x / scale), -128, 127) * scale
    units = np.clip(x / scale, -LARGEST[qtype], LARGEST[qtype])
    return np.asarray(jnp.asarray(units).astype(qtype).astype("float32")) * scale


@pytest.mark.parametrize("fixed", [None, (-3.0, 3.0)])
@pytest.mark.parametrize("qtype", TYPES)
def test_a_dynamic_layer_rounds_each_input(qtype, fixed):
    layer = fk.DynamicQDQLayer("qdq", jnp.dtype(qtype), fixed_range=fixed)
    layer.add_variables()
    for x in INPUTS:
        edge = 3.0 if fixed else np.abs(x).max()
        expected = rounded(x, qtype, edge)
        np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6 * edge)
        codes = layer.call_q(x)
        assert codes.dtype == qtype
        np.testing.assert_array_equal(layer.call_dq(codes), layer(x))


@pytest.mark.parametrize("const", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("qtype", TYPES)
def test_a_static_layer_rounds_in_the_range_it_saw(qtype, dtype, const):
    layer = fk.StaticQDQLayer("qdq", jnp.dtype(qtype), dtype=dtype, const_scale=const)
    layer.add_observers()
    layer.add_variables()
    for x in INPUTS:
        np.testing.assert_array_equal(layer(x), jnp.asarray(x, dtype))
    layer.convert()
    layer.post_quantization_cleanup()
    assert len(layer.variables) == (0 if const else 1)
    edge = max(np.abs(x).max() for x in INPUTS)
    for x in INPUTS:
        codes = layer.call_q(x)
        assert codes.dtype == qtype and layer.call_dq(codes).dtype == dtype
        np.testing.assert_array_equal(layer.call_dq(codes), layer(x))
        if dtype == "float32":
            np.testing.assert_allclose(layer(x), rounded(x, qtype, edge), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("make", [fk.DynamicQDQLayer, fk.StaticQDQLayer])
def test_zero_points_and_nothing_but_zeros(make):
    layer = make("qdq", "int8", asymmetric=True, fixed_range=(0.0, 255.0))
    layer.add_variables()
    if make is fk.StaticQDQLayer:
        layer.convert()
    x = np.array([[0.0, 1.0, 254.6, 300.0]], "float32")
    np.testing.assert_allclose(layer(x), [[0.0, 1.0, 255.0, 255.0]])
    zeros = fk.DynamicQDQLayer("zeros", "fp8")
    np.testing.assert_array_equal(zeros(np.zeros((2, 3), "float32")), np.zeros((2, 3)))


@pytest.mark.parametrize("const", [False, True])
def test_a_static_layer_is_saved_with_its_range(const, tmp_path):
    layer = fk.StaticQDQLayer(
        "qdq", "int8", asymmetric=True, const_scale=const, fixed_range=(-2.0, 6.0)
    )
    layer.add_variables()
    layer.convert()
    model = keras.Sequential([keras.Input((8,)), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(INPUTS[0]), model(INPUTS[0]))
    assert loaded.layers[0].converted and float(jnp.asarray(loaded.layers[0]._params()[0])) != 1.0


def test_what_is_missing_is_said():
    layer = fk.StaticQDQLayer("mine", "int8")
    with pytest.raises(ValueError, match=r"mine.convert\(\) comes after add_variables\(\)"):
        layer.convert()
    layer.add_observers()
    layer.add_variables()
    with pytest.raises(fk.CalibrationError, match="mine has seen no data, so its range is not"):
        layer.convert()
    with pytest.raises(ValueError, match=r"mine: fixed_range=\(1.0, -1.0\) is no range"):
        fk.DynamicQDQLayer("mine", "int8", fixed_range=(1.0, -1.0))
    with pytest.raises(
        ValueError, match="mine.call_dq.* comes after call_q, which finds the range"
    ):
        fk.DynamicQDQLayer("mine", "int8").call_dq(jnp.ones((1, 2), jnp.int8))


@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
@pytest.mark.parametrize("qtype", TYPES)
def test_scales_are_the_known_ones(qtype, axis):
    w = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    edge = np.abs(w).max(axis=axis, keepdims=True)
    np.testing.assert_allclose(fk.get_scale(w, qtype, axis=axis), edge / LARGEST[qtype], rtol=1e-6)
    scale, zero = fk.get_q_params(w, qtype, axis=axis)
    assert zero is None
    codes = fk.get_quantize_fun(qtype)(jnp.asarray(w), scale)
    assert codes.dtype == qtype
    again = fk.get_dequantize_fun()(codes, scale)
    np.testing.assert_allclose(again, rounded(w, qtype, edge), rtol=1e-5, atol=1e-6)


def test_zero_points_of_helpers():
    w = np.random.default_rng(0).uniform(-1, 3, (5, 7)).astype("float32")
    scale, zero = fk.get_q_params(w, "int8", asymmetric=True)
    step = (w.max() - w.min()) / 255
    np.testing.assert_allclose(scale, [[step]], rtol=1e-6)
    np.testing.assert_array_equal(zero, [[np.round(-128 - w.min() / step)]])
    codes = fk.get_quantize_fun("int8", True)(jnp.asarray(w), scale, zero)
    again = fk.get_dequantize_fun(jnp.float32, True)(codes, scale, zero)
    assert np.abs(again - w).max() <= 0.51 * step


def test_types_and_names_that_are_not_there():
    assert {name: str(dtype) for name, dtype in fk.dtype_mapping.items()} == {
        "int8": "int8",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
    }
    assert fk.check_backend() is True
    for name in _compat.NEVER:
        with pytest.raises(NotImplementedError, match=f"has no {name}, and needs none: "):
            getattr(fk, name)()
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _compat.no_such_name  # noqa: B018
