"""conv_general_dilated against a float64 convolution with loops."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import products
from oracles.products import FLOAT32_SUM, drawn, normal, random_codes, relative_mae, worst

from fewbit.ops import conv_general_dilated, conv_how, describe_conv
from fewbit.qarray import HowToQuantize, dequantize, quantize_with

NCHW = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NCHW", "OIHW", "NCHW"))
NHWC = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
SHAPE = (2, 4, 6, 5)


def image(qtype, method="absmax", shape=SHAPE, dtype="float32"):
    if qtype is None:
        return normal(0, shape)
    how = conv_how(dimension_numbers=NCHW, for_lhs=True, qtype=qtype, calibration_method=method)
    return random_codes(shape, how, 0, dtype)


def kernel(qtype, per_group=4, dtype="float32"):
    shape = (6, per_group, 3, 2)
    if qtype is None:
        return normal(1, shape)
    return random_codes(
        shape, conv_how(dimension_numbers=NCHW, for_lhs=False, qtype=qtype), 1, dtype
    )


def check(x, w, strides=(1, 1), padding=((1, 1), (0, 2)), ld=(1, 1), rd=(1, 1), groups=1):
    run = jax.jit(
        lambda x, w: conv_general_dilated(
            x, w, strides, padding, ld, rd, feature_group_count=groups
        )
    )
    expected = products.conv(x, w, strides, padding, ld, rd, groups)
    assert worst(run(x, w), expected) < FLOAT32_SUM


FORMATS = ["int8", "int4", "int2", "int1", "float8_e4m3fn", "float8_e5m2", "nf4", "int16", None]


def test_every_pair_of_formats_matches_float64():
    padding = ((1, 1), (0, 2))
    # Not under jit: the float convolution is then compiled once for all pairs that end in it.
    for lhs_type, rhs_type in itertools.product(FORMATS, FORMATS):
        x, w = image(lhs_type), kernel(rhs_type)
        out = conv_general_dilated(x, w, (2, 1), padding)
        expected = products.conv(x, w, (2, 1), padding, (1, 1), (1, 1))
        assert worst(out, expected) < FLOAT32_SUM, (lhs_type, rhs_type)


MIXED = dict(strides=(2, 2), ld=(1, 2), rd=(2, 1), groups=2)


@pytest.mark.parametrize("qtype,method,settings", [
    ("int8", "minmax", dict(strides=(2, 1))), ("int8", "minmax", dict(ld=(2, 1))),
    ("int8", "minmax", dict(rd=(1, 2))), ("int8", "minmax", dict(padding=((2, 0), (0, 1)))),
    ("int8", "minmax", dict(groups=2)), ("int8", "minmax", MIXED), ("uint8", "minmax", MIXED),
    ("int8", "absmax", MIXED)])  # fmt: skip
def test_zero_point_counts_padding_as_zero(qtype, method, settings):
    x, w = image(qtype, method), kernel("int8", 4 // settings.get("groups", 1))
    assert describe_conv(x, w) == "int8 conv"
    check(x, w, **settings)


@pytest.mark.parametrize("lhs_type,rhs_type,path", [
    ("int8", "int8", "int8 conv"), ("int4", "int8", "int8 conv"),
    ("float8_e4m3fn", "float8_e4m3fn", "fp8 conv"), (None, "int8", "dequantize + float conv"),
    ("float8_e4m3fn", "float8_e5m2", "dequantize + float conv"), (None, None, "float conv"),
    ("int8", "nf4", "dequantize + float conv")])  # fmt: skip
def test_the_described_path_is_the_path_taken(lhs_type, rhs_type, path):
    x, w = image(lhs_type), kernel(rhs_type)
    assert describe_conv(*jax.eval_shape(lambda x, w: (x, w), x, w)) == path
    text = str(jax.make_jaxpr(lambda x, w: conv_general_dilated(x, w, (1, 1), "SAME"))(x, w))
    assert ("preferred_element_type=int32" in text) == (path == "int8 conv")


def test_kernel_with_a_zero_point_or_odd_scales_is_dequantized():
    x, w = image("int8"), kernel("int8")
    asymmetric = HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="minmax")
    by_input = HowToQuantize(qtype="int8", channelwise_axes=(0, 1))
    by_channel = HowToQuantize(qtype="int8", channelwise_axes=(1,))
    for lhs, rhs in (
        (x, random_codes(w.shape, asymmetric)),
        (x, random_codes(w.shape, by_input)),
        (random_codes(x.shape, by_channel), w),
    ):
        assert describe_conv(lhs, rhs) == "dequantize + float conv"
        check(lhs, rhs)


def test_tiles_are_refused_on_codes_and_dequantized_beside_floats():
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes={1: 2})
    tiled = random_codes((6, 4, 3, 2), how)
    with pytest.raises(ValueError, match="subchannel is not supported for conv_general_dilated"):
        conv_general_dilated(image("int8"), tiled, (1, 1), "SAME")
    with pytest.raises(ValueError, match="subchannel is not supported"):
        conv_how(dimension_numbers=NCHW, for_lhs=True, qtype="int8", tile_size=32)
    check(image(None), tiled)


@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_batch_groups(method):
    x, w = image("int8", method, (4, 4, 6, 5)), kernel("int8")

    @jax.jit
    def run(x, w):
        exact = lax.conv_general_dilated(
            dequantize(x), dequantize(w), (1, 1), "SAME", batch_group_count=2
        )
        return conv_general_dilated(x, w, (1, 1), "SAME", batch_group_count=2), exact

    out, exact = run(x, w)
    assert relative_mae(out, exact) < FLOAT32_SUM


def test_result_dtype():
    x, w = image("int8", dtype="bfloat16"), kernel("int8", dtype="bfloat16")
    run = functools.partial(conv_general_dilated, window_strides=(1, 1), padding="SAME")
    assert jax.eval_shape(run, x, w).dtype == jnp.bfloat16
    run = functools.partial(run, preferred_element_type=jnp.float32)
    assert jax.eval_shape(run, x, w).dtype == jnp.float32


# Upper bounds on the error of int8 and int4 convolutions against float, each for its own problem:
# both operands are normal(key(42)) in bfloat16, plus one for an asymmetric lhs.
BOUNDS = {
    "NCHW": (NCHW, (10, 5, 40, 30), (2, 5, 3, 3), "int8", "absmax", {}, 0.009),
    "NHWC": (NHWC, (10, 40, 30, 5), (3, 3, 5, 2), "int8", "absmax", {}, 0.009),
    "groups": (NCHW, (10, 15, 40, 30), (3, 5, 3, 3), "int8", "absmax",
               dict(feature_group_count=3), 0.009),
    "dilated": (NCHW, (10, 6, 40, 30), (2, 6, 3, 3), "int8", "absmax",
                dict(rhs_dilation=(2, 2)), 0.01),
    "asymmetric": (NCHW, (10, 5, 40, 30), (2, 5, 3, 3), "int8", "minmax", {}, 0.01),
    "dilated asymmetric": (NCHW, (10, 5, 40, 30), (2, 5, 3, 3), "int8", "minmax",
                           dict(rhs_dilation=(2, 2)), 0.01),
    "int4": (NCHW, (10, 5, 40, 30), (2, 5, 3, 3), "int4", "absmax", {}, 0.16),
}  # fmt: skip
# The bounds were stated for TPUs only. On a CPU a bfloat16 quotient is rounded to bfloat16 before
# it is rounded to a code, as the exact figures for quantize and dequantize demand, which moves a
# tenth of the codes by one; with quotients in float32 the same problems keep their bounds. The peer
# gives the same results on a CPU (tests/compared/test_peers_arrays.py).
MEASURED = {"NCHW": 0.0096, "NHWC": 0.0095, "groups": 0.0096}


@functools.cache
def conv_errors(name, dtype):
    """Of the quantized convolution: against float, and against dequantize-first."""
    numbers, lhs_shape, rhs_shape, qtype, method, settings, _ = BOUNDS[name]
    hows = [
        conv_how(dimension_numbers=numbers, for_lhs=True, qtype=qtype, calibration_method=method),
        conv_how(dimension_numbers=numbers, for_lhs=False, qtype=qtype),
    ]
    kw = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=numbers, **settings)
    shift = jnp.bfloat16(method == "minmax")
    x, w = drawn(lhs_shape, "bfloat16") + shift, drawn(rhs_shape, "bfloat16")
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    qx, qw = map(quantize_with, (x, w), hows)

    @jax.jit
    def run(x, w, qx, qw):
        first = lax.conv_general_dilated(dequantize(qx), dequantize(qw), **kw)
        return conv_general_dilated(qx, qw, **kw), lax.conv_general_dilated(x, w, **kw), first

    out, exact, first = run(x, w, qx, qw)
    return relative_mae(out, exact), relative_mae(out, first)


def row(name):
    reason = f"{MEASURED.get(name)} on a CPU, where bfloat16 quotients are rounded twice"
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if name in MEASURED else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [row(name) for name in BOUNDS])
def test_upper_bounds_against_float(name):
    assert conv_errors(name, "bfloat16")[0] <= BOUNDS[name][-1]


@pytest.mark.parametrize("name", BOUNDS)
def test_product_on_codes_equals_dequantize_first(name):
    assert conv_errors(name, "bfloat16")[1] <= 0.004


@pytest.mark.parametrize("name", MEASURED)
def test_rows_beyond_their_bound_keep_it_with_float32_quotients(name):
    assert conv_errors(name, "bfloat16")[0] <= MEASURED[name] + 5e-5
    assert conv_errors(name, "float32")[0] <= BOUNDS[name][-1]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharding_equals_the_float_op(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    x, w = image("int8", "minmax", (8, 4, 6, 5)), kernel("int8")
    expected = products.conv(x, w, (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: jax.device_put(leaf, P("x")), x)
        out = jax.jit(lambda x, w: conv_general_dilated(x, w, (1, 1), "VALID"))(placed, w)
        if kind is AxisType.Explicit:
            assert jax.typeof(out).sharding.spec[0] == "x"
    assert worst(out, expected) < FLOAT32_SUM
    assert np.shape(x.scale) == (8, 1, 1, 1)
