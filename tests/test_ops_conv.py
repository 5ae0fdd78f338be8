"""conv_general_dilated against a float64 convolution with loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fewbit.ops import conv_general_dilated, conv_how, describe_conv
from fewbit.qarray import dequantize, quantize, quantize_with
from tests.oracles import products
from tests.oracles.products import FLOAT32_SUM, relative_mae, values, worst

NCHW = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NCHW", "OIHW", "NCHW"))
NHWC = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def pair(lhs_type, rhs_type, groups=1, method="absmax", shape=(2, 4, 6, 5)):
    x, w = normal(0, shape) + 0.5, normal(1, (6, shape[1] // groups, 3, 2))
    if lhs_type is not None:
        how = conv_how(dimension_numbers=NCHW, for_lhs=True, qtype=lhs_type,
                       calibration_method=method)  # fmt: skip
        x = quantize_with(x, how)
    if rhs_type is not None:
        w = quantize_with(w, conv_how(dimension_numbers=NCHW, for_lhs=False, qtype=rhs_type))
    return x, w


def check(x, w, strides=(1, 1), padding=((1, 1), (0, 2)), ld=(1, 1), rd=(1, 1), groups=1):
    run = jax.jit(
        lambda x, w: conv_general_dilated(
            x, w, strides, padding, ld, rd, feature_group_count=groups
        )
    )
    expected = products.conv(x, w, strides, padding, ld, rd, groups)
    assert worst(run(x, w), expected) < FLOAT32_SUM


FORMATS = ["int8", "int4", "int2", "int1", "float8_e4m3fn", "float8_e5m2", "nf4", "int16", None]


@pytest.mark.parametrize("lhs_type", ["int8", "int4", "float8_e4m3fn", "nf4", "int16", None])
def test_every_pair_of_formats_matches_float64(lhs_type):
    pairs = jax.jit(lambda: [pair(lhs_type, rhs_type) for rhs_type in FORMATS])()
    padding = ((1, 1), (0, 2))
    outs = jax.jit(lambda ps: [conv_general_dilated(x, w, (2, 1), padding) for x, w in ps])(pairs)
    for rhs_type, (x, w), out in zip(FORMATS, pairs, outs, strict=True):
        expected = products.conv(x, w, (2, 1), padding, (1, 1), (1, 1))
        assert worst(out, expected) < FLOAT32_SUM, rhs_type


@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("settings", [
    dict(strides=(2, 1)), dict(ld=(2, 1)), dict(rd=(1, 2)), dict(padding=((2, 0), (0, 1))),
    dict(groups=2), dict(strides=(2, 2), ld=(1, 2), rd=(2, 1), groups=2)])  # fmt: skip
@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_zero_point_counts_padding_as_zero(method, settings, qtype):
    method = "minmax" if qtype == "uint8" else method
    x, w = pair(qtype, "int8", settings.get("groups", 1), method)
    assert describe_conv(x, w) == "int8 conv"
    check(x, w, **settings)


@pytest.mark.parametrize("lhs_type,rhs_type,path", [
    ("int8", "int8", "int8 conv"), ("int4", "int8", "int8 conv"),
    ("float8_e4m3fn", "float8_e4m3fn", "fp8 conv"), (None, "int8", "dequantize + float conv"),
    ("float8_e4m3fn", "float8_e5m2", "dequantize + float conv"), (None, None, "float conv"),
    ("int8", "nf4", "dequantize + float conv")])  # fmt: skip
def test_the_described_path_is_the_path_taken(lhs_type, rhs_type, path):
    abstract = jax.eval_shape(lambda: pair(lhs_type, rhs_type))
    assert describe_conv(*abstract) == path
    text = str(jax.make_jaxpr(lambda x, w: conv_general_dilated(x, w, (1, 1), "SAME"))(
        *pair(lhs_type, rhs_type)))  # fmt: skip
    assert ("preferred_element_type=int32" in text) == (path == "int8 conv")


def test_kernel_with_a_zero_point_or_odd_scales_is_dequantized():
    x, w = pair("int8", None)
    check(x, quantize(w, "int8", channelwise_axes=(0,), calibration_method="minmax"))
    check(x, quantize(w, "int8", channelwise_axes=(0, 1)))
    check(quantize(normal(0, (2, 4, 6, 5)), "int8", channelwise_axes=(1,)), quantize(w, "int8"))


def test_tiles_are_refused_on_codes_and_dequantized_beside_floats():
    x, w = pair("int8", None)
    tiled = quantize(w, "int8", channelwise_axes=(0,), tiled_axes={1: 2})
    with pytest.raises(ValueError, match="subchannel is not supported for conv_general_dilated"):
        conv_general_dilated(x, tiled, (1, 1), "SAME")
    with pytest.raises(ValueError, match="subchannel is not supported"):
        conv_how(dimension_numbers=NCHW, for_lhs=True, qtype="int8", tile_size=32)
    check(dequantize(x), tiled)


@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_batch_groups(method):
    x, w = pair("int8", "int8", 1, method, shape=(4, 4, 6, 5))
    out = conv_general_dilated(x, w, (1, 1), "SAME", batch_group_count=2)
    exact = lax.conv_general_dilated(
        dequantize(x), dequantize(w), (1, 1), "SAME", batch_group_count=2
    )
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_result_dtype():
    x, w = (q.astype(jnp.bfloat16) for q in pair("int8", "int8"))
    assert conv_general_dilated(x, w, (1, 1), "SAME").dtype == jnp.bfloat16
    wide = conv_general_dilated(x, w, (1, 1), "SAME", preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


BOUNDS = [
    (NCHW, dict(), "int8", "absmax", 0.009), (NHWC, dict(), "int8", "absmax", 0.009),
    (NHWC, dict(feature_group_count=2), "int8", "absmax", 0.009),
    (NCHW, dict(rhs_dilation=(2, 2)), "int8", "absmax", 0.01),
    (NCHW, dict(), "int8", "minmax", 0.01),
    (NCHW, dict(rhs_dilation=(2, 2)), "int8", "minmax", 0.01),
    (NCHW, dict(), "int4", "absmax", 0.16),
]  # fmt: skip


@pytest.mark.parametrize("numbers,settings,qtype,method,bound", BOUNDS)
def test_upper_bounds_against_float(numbers, settings, qtype, method, bound):
    groups = settings.get("feature_group_count", 1)
    x, w = normal(0, (4, 4, 5, 5)), normal(1, (8, 4 // groups, 3, 3))
    if numbers is NHWC:
        x, w = jnp.transpose(x, (0, 2, 3, 1)), jnp.transpose(w, (2, 3, 1, 0))
    qx = quantize_with(x, conv_how(dimension_numbers=numbers, for_lhs=True, qtype=qtype,
                                   calibration_method=method))  # fmt: skip
    qw = quantize_with(w, conv_how(dimension_numbers=numbers, for_lhs=False, qtype=qtype))
    kw = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=numbers, **settings)
    out = conv_general_dilated(qx, qw, **kw)
    assert relative_mae(out, lax.conv_general_dilated(x, w, **kw)) < bound
    slow = lax.conv_general_dilated(dequantize(qx), dequantize(qw), **kw)
    assert relative_mae(out, slow) < 0.004


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharding_equals_the_float_op(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    x, w = pair("int8", "int8", method="minmax", shape=(8, 4, 6, 5))
    expected = products.conv(x, w, (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: jax.device_put(leaf, P("x")), x)
        out = jax.jit(lambda x, w: conv_general_dilated(x, w, (1, 1), "VALID"))(placed, w)
        if kind is AxisType.Explicit:
            assert jax.typeof(out).sharding.spec[0] == "x"
    assert worst(out, expected) < FLOAT32_SUM
    assert values(x).shape == x.shape
