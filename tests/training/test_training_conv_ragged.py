"""conv_general_qt and ragged_dot_qt against float64 references, the float ops and serving."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from test_training_dot import relative, vjp, worst
from tolerances import QT_FLOAT32

from fewbit import ops
from fewbit.qarray import dequantize, quantize, quantize_with
from fewbit.training import (
    ConvGeneralQtConfig,
    Paired,
    RaggedDotQtConfig,
    conv_general_qt,
    ragged_dot_qt,
)

NHWC = ("NHWC", "HWIO", "NHWC")
CONVS = {  # lhs, rhs, dimension numbers, settings
    "NCHW": ((2, 3, 6, 6), (4, 3, 3, 3), None, {}),
    "NHWC strided": ((2, 6, 6, 3), (3, 3, 3, 4), NHWC, dict(window_strides=(2, 1))),
    "dilated": (
        (2, 6, 6, 3),
        (3, 3, 3, 4),
        NHWC,
        dict(lhs_dilation=(2, 1), rhs_dilation=(1, 2), padding=((1, 2), (2, 2))),
    ),
    "feature groups": ((2, 6, 6, 4), (3, 3, 2, 6), NHWC, dict(feature_group_count=2)),
    "batch groups": ((4, 6, 6, 4), (3, 3, 4, 6), NHWC, dict(batch_group_count=2)),
}


def types(qtype, grad=None, **fields):
    return dict(
        lhs_qtype=qtype, rhs_qtype=qtype, dlhs_grad_qtype=grad, drhs_grad_qtype=grad, **fields
    )


def conv_case(name):
    lhs, rhs, numbers, settings = CONVS[name]
    settings = dict(window_strides=(1, 1), padding=((1, 1), (1, 1))) | settings
    return normal(0, *lhs), normal(1, *rhs), dict(dimension_numbers=numbers, **settings)


def float64_transpose(x, w, g, side, settings):
    """The gradient of one side of a float convolution, in float64."""
    with jax.enable_x64(True):
        x, w, g = (jnp.asarray(np.asarray(v, np.float64)) for v in (x, w, g))
        _, pull = jax.vjp(lambda a, b: jax.lax.conv_general_dilated(a, b, **settings), x, w)
        return np.asarray(pull(g)[side])


@pytest.mark.parametrize("name", CONVS)
def test_gradients_of_convolutions_match_float64(name):
    x, w, settings = conv_case(name)
    config = ConvGeneralQtConfig(**types("int8", "int8"))
    out, g, (dx, dw) = vjp(lambda a, b: conv_general_qt(a, b, config, **settings), x, w)
    numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, settings["dimension_numbers"])
    image, feature = numbers.lhs_spec[0], numbers.rhs_spec[0]
    out_image, out_feature = numbers.out_spec[:2]
    mixed = name == "batch groups"
    qx = quantize(x, "int8", channelwise_axes=(image,))
    qw = quantize(w, "int8", channelwise_axes=(feature,))
    served = ops.conv_general_dilated(qx, qw, **settings)
    np.testing.assert_array_equal(out, served)

    def along(scale, axis, there):
        shape = [1] * 4
        shape[there] = scale.shape[axis]
        return scale.reshape(shape)

    for_x = quantize(
        g * along(qw.scale, feature, out_feature),
        "int8",
        channelwise_axes=() if mixed else (out_image,),
    )
    expected = float64_transpose(x, qw.qvalue, dequantize(for_x), 0, settings)
    assert worst(dx, expected) < QT_FLOAT32
    if mixed:  # images with different scales meet in one sum: what they stand for is used
        for_w, images = quantize(g, "int8", channelwise_axes=(out_feature,)), dequantize(qx)
    else:
        shifted = g * along(qx.scale, image, out_image)
        for_w, images = quantize(shifted, "int8", channelwise_axes=(out_feature,)), qx.qvalue
    expected = float64_transpose(images, w, dequantize(for_w), 1, settings)
    assert worst(dw, expected) < QT_FLOAT32


def fake(x, qtype, axis):
    """The rounded array with the gradient of the array."""
    q = quantize(jax.lax.stop_gradient(x), qtype, channelwise_axes=(axis,))
    return dequantize(q) + (x - jax.lax.stop_gradient(x))


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"]
)
@pytest.mark.parametrize("name", CONVS)
def test_float_gradients_of_convolutions_are_those_of_fake_quantization(name, transform):
    x, w, settings = conv_case(name)
    numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, settings["dimension_numbers"])
    config = ConvGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int4")
    mine = transform(lambda x, w: conv_general_qt(x, w, config, **settings))

    def theirs(x, w):
        x, w = fake(x, "int8", numbers.lhs_spec[0]), fake(w, "int4", numbers.rhs_spec[0])
        return jax.lax.conv_general_dilated(x, w, **settings)

    _, g, found = vjp(mine, x, w)
    rounded = [
        dequantize(quantize(a, t, channelwise_axes=(spec[0],)))
        for a, t, spec in ((x, "int8", numbers.lhs_spec), (w, "int4", numbers.rhs_spec))
    ]
    for side in (0, 1):
        assert worst(found[side], float64_transpose(*rounded, g, side, settings)) < QT_FLOAT32
    tangents = (normal(3, *x.shape), normal(4, *w.shape))
    assert worst(*(jax.jvp(f, (x, w), tangents)[1] for f in (mine, theirs))) < QT_FLOAT32

    def second(f):  # Hessian times a vector: a rounded operand moves as its array does
        def loss(x, w):
            return jnp.sum(jnp.square(f(x, w)))

        return jax.jvp(jax.grad(loss, (0, 1)), (x, w), tangents)[1]

    for a, b in zip(second(mine), second(theirs), strict=True):
        assert worst(a, b) < QT_FLOAT32


def test_convolutions_without_types_or_with_original_residuals():
    x, w, settings = conv_case("feature groups")
    plain = lambda x, w: jax.lax.conv_general_dilated(x, w, **settings)  # noqa: E731
    none = lambda x, w: conv_general_qt(x, w, ConvGeneralQtConfig(), **settings)  # noqa: E731
    for a, b in zip(vjp(none, x, w)[2], vjp(plain, x, w)[2], strict=True):
        np.testing.assert_array_equal(a, b)
    # One gradient quantized, the other float: of the rounded operand, or of the original one.
    numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, settings["dimension_numbers"])
    half = ConvGeneralQtConfig(**types("int8")).replace(drhs_grad_qtype="int8")
    rounded = dequantize(quantize(w, "int8", channelwise_axes=(numbers.rhs_spec[0],)))
    for config, other in ((half, rounded), (half.replace(use_original_residuals=True), w)):
        run = lambda x, w, c=config: conv_general_qt(x, w, c, **settings)  # noqa: E731
        _, g, (dx, _) = vjp(run, x, w)
        assert worst(dx, float64_transpose(x, other, g, 0, settings)) < QT_FLOAT32


def test_residuals_of_convolutions_may_be_quantized_anew():
    x, w, settings = conv_case("NHWC strided")
    fields = dict(
        use_original_residuals=True, dlhs_residual_qtype="int8", drhs_residual_qtype="int8"
    )
    config = ConvGeneralQtConfig(**types("int8", "int8", **fields))
    _, g, gradients = vjp(lambda a, b: conv_general_qt(a, b, config, **settings), x, w)
    for side, found in enumerate(gradients):
        expected = float64_transpose(x, w, g, side, settings)
        assert 1e-4 < relative(found, expected) < 0.03


def rows_of(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def ragged_reference(x, w, g, sizes, grad):
    """dx and dw in float64 with both residuals' scales shifted into the rounded gradient."""
    qx = quantize(x, "int8", channelwise_axes=(0,))
    qw = quantize(w, "int8", channelwise_axes=(0, 2))
    scale = np.ones(g.shape, np.float32)
    for group, rows in enumerate(rows_of(sizes)):
        scale[rows] = np.asarray(qw.scale)[group]
    # Rows past the last group do not count, but share the scales of the columns.
    scale[sum(sizes) :] = np.asarray(qw.scale)[-1]
    for_x = np.asarray(dequantize(quantize(g * scale, grad, channelwise_axes=(0,))), np.float64)
    for_w = quantize(g * qx.scale, grad, channelwise_axes=(1,))
    for_w = np.asarray(dequantize(for_w), np.float64)
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    for group, rows in enumerate(rows_of(sizes)):
        dx[rows] = for_x[rows] @ np.asarray(qw.qvalue[group], np.float64).T
        dw[group] = np.asarray(qx.qvalue[rows], np.float64).T @ for_w[rows]
    return dx, dw


@pytest.mark.parametrize("sizes", [(5, 0, 6), (4, 4, 4)])
def test_gradients_of_ragged_dot_match_float64(sizes):
    x, w, groups = normal(0, 12, 16), normal(1, 3, 16, 10), jnp.array(sizes, jnp.int32)
    config = RaggedDotQtConfig(**types("int8", "int8"))
    out, g, gradients = vjp(lambda a, b: ragged_dot_qt(a, b, groups, config), x, w)
    hows = [ops.ragged_dot_how(for_lhs=k == 0, **config.operand(k)) for k in (0, 1)]
    served = ops.ragged_dot(quantize_with(x, hows[0]), quantize_with(w, hows[1]), groups)
    np.testing.assert_array_equal(out, served)
    for a, b in zip(gradients, ragged_reference(x, w, g, sizes, "int8"), strict=True):
        assert worst(a, b) < QT_FLOAT32


def test_float_gradients_of_ragged_dot_are_those_of_the_float_op():
    x, w, groups = normal(0, 12, 16), normal(1, 3, 16, 10), jnp.array([5, 1, 6], jnp.int32)
    _, _, theirs = vjp(lambda a, b: jax.lax.ragged_dot(a, b, groups), x, w)
    for fields in (
        {},
        types("int8"),
        dict(rhs_qtype="nf4", tile_size=8),
        dict(rhs_qtype="int4", rhs_calibration_method="mse,3", disable_gradient_clipping=True),
    ):
        config = RaggedDotQtConfig(**fields)
        _, _, mine = vjp(lambda a, b, c=config: ragged_dot_qt(a, b, groups, c), x, w)
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        dict(tile_size=8),
        dict(dlhs_tile_size=5, drhs_tile_size=6, use_original_residuals=True),
        dict(dlhs_residual_qtype="int8", drhs_residual_qtype="int8", use_original_residuals=True),
    ],
)
def test_ragged_tiles_and_residuals(fields):
    x, w, groups = normal(0, 12, 16), normal(1, 3, 16, 10), jnp.array([5, 1, 6], jnp.int32)
    config = RaggedDotQtConfig(**types("int8", "int8"), **fields)
    mine = vjp(lambda a, b: ragged_dot_qt(a, b, groups, config), x, w)
    theirs = vjp(lambda a, b: jax.lax.ragged_dot(a, b, groups), x, w)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert relative(a, b) < 0.03


def test_pairs_reach_both_ops():
    x, w, settings = conv_case("NCHW")
    q = quantize(w, "int8", channelwise_axes=(0,))
    config = ConvGeneralQtConfig(lhs_qtype="int8", drhs_grad_qtype="int8")
    kernel_type = ConvGeneralQtConfig(**types("int8")).replace(drhs_grad_qtype="int8")
    mine = conv_general_qt(x, Paired(w, q), config, **settings)
    np.testing.assert_array_equal(mine, conv_general_qt(x, w, kernel_type, **settings))
    rows, experts, groups = normal(0, 6, 8), normal(1, 2, 8, 4), jnp.array([2, 4], jnp.int32)
    stored = quantize(experts, "int8", channelwise_axes=(0, 2))
    whole = RaggedDotQtConfig(**types("int8", "int8"))
    a = vjp(lambda w: ragged_dot_qt(rows, Paired(w, stored), groups, whole), experts)
    b = vjp(lambda w: ragged_dot_qt(rows, w, groups, whole), experts)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)
