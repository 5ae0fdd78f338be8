"""Gradients of every op, for drawn shapes and configs, against float64 of the same computation.

`dot_general_qt` has its own in test_training_dot.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import training as oracle
from test_training_conv_ragged import float64_transpose, rows_of
from test_training_dot import GRADIENT_TYPES, TYPES, products, vjp, worst
from tolerances import QT_FLOAT32

from fewbit.qarray import dequantize, quantize
from fewbit.training import (
    ConvGeneralQtConfig,
    DotGeneralQtConfig,
    RaggedDotQtConfig,
    conv_general_qt,
    einsum_qt,
    ragged_dot_qt,
)

PAIRS = st.tuples(TYPES, TYPES)
GRADIENTS = st.tuples(GRADIENT_TYPES, GRADIENT_TYPES)


def fields(types, grads):
    return dict(
        lhs_qtype=types[0],
        rhs_qtype=types[1],
        dlhs_grad_qtype=grads[0],
        drhs_grad_qtype=grads[1],
    )


def float64(x):
    return np.asarray(x, np.float64)


def decoded(x, qtype, kept):
    """(codes, scale) whose product is the operand as the forward pass sees it."""
    q = quantize(x, qtype, channelwise_axes=kept)
    return float64(q.qvalue), q.scale


def rounded(g, qtype, kept):
    return float64(dequantize(quantize(g, qtype, channelwise_axes=kept)))


# --- einsum ---------------------------------------------------------------------------------------


def check_einsum(case, order, types, grads):
    lhs, rhs, out, sizes = case
    out = "".join(sorted(out, key=lambda c: order["abcdefgh".index(c)]))
    letters = (lhs, rhs)
    operands = [normal(i, *(sizes[c] for c in own)) for i, own in enumerate(letters)]
    config = DotGeneralQtConfig(**fields(types, grads))
    text = f"{lhs},{rhs}->{out}"
    found, g, gradients = vjp(lambda a, b: einsum_qt(text, a, b, config), *operands)
    assert worst(found, oracle.forward(letters, out, operands, types)) < QT_FLOAT32
    for side in (0, 1):
        kind = "shift" if types[1 - side] else "float"
        expected = oracle.gradient(letters, out, operands, types, g, side, grads[side], kind)
        assert worst(gradients[side], expected) < QT_FLOAT32, (text, side, kind)


EINSUMS = given(products(), st.permutations(range(8)), PAIRS, GRADIENTS)


@settings(max_examples=2, deadline=None, derandomize=True)
@EINSUMS
def test_einsums_match_float64(case, order, types, grads):
    check_einsum(case, order, types, grads)


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@EINSUMS
def test_many_einsums_match_float64(case, order, types, grads):
    check_einsum(case, order, types, grads)


# --- convolutions ---------------------------------------------------------------------------------


@st.composite
def convolutions(draw):
    """(shapes of images and kernel, settings)."""
    batch, groups, own, features = (draw(st.integers(1, n)) for n in (3, 2, 2, 2))
    window = [draw(st.integers(1, 3)) for _ in range(2)]
    size = [w + draw(st.integers(2, 4)) for w in window]
    channels_last = draw(st.booleans())
    channels = groups * own
    if channels_last:
        shapes = (batch, *size, channels), (*window, own, groups * features)
        numbers = ("NHWC", "HWIO", "NHWC")
    else:
        shapes = (batch, channels, *size), (groups * features, own, *window)
        numbers = ("NCHW", "OIHW", "NCHW")
    steps = st.tuples(st.integers(1, 2), st.integers(1, 2))
    return shapes, dict(
        window_strides=draw(steps),
        padding=tuple((w, w) for w in window),  # dilated windows fit too
        lhs_dilation=draw(steps),
        rhs_dilation=draw(steps),
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


def conv_gradient(operands, specs, types, g, side, grad, given_settings):
    """The gradient of one side: g with the other operand's scale, rounded, times its codes."""
    other, qtype = operands[1 - side], types[1 - side]
    if grad is None:  # of the rounded operand
        seen = (
            other if qtype is None else np.multiply(*decoded(other, qtype, (specs[1 - side][0],)))
        )
        pair = (operands[0], seen) if side == 0 else (seen, operands[1])
        return float64_transpose(*pair, g, side, given_settings)
    image_or_feature, out_axes = specs[1 - side][0], specs[2]
    if qtype is not None:
        codes, scale = decoded(other, qtype, (image_or_feature,))
        shape = [1] * g.ndim
        shape[out_axes[1 - side]] = -1
        g, other = g * scale.reshape(shape), codes
    g = rounded(g, grad, (out_axes[side],))
    pair = (operands[0], other) if side == 0 else (other, operands[1])
    return float64_transpose(*pair, g, side, given_settings)


def check_conv(case, types, grads):
    shapes, given_settings = case
    operands = [normal(k, *shape) for k, shape in enumerate(shapes)]
    numbers = jax.lax.conv_dimension_numbers(*shapes, given_settings["dimension_numbers"])
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    config = ConvGeneralQtConfig(**fields(types, grads))
    out, g, gradients = vjp(lambda a, b: conv_general_qt(a, b, config, **given_settings), *operands)
    seen = [
        float64(x) if t is None else np.multiply(*decoded(x, t, (specs[k][0],)))
        for k, (x, t) in enumerate(zip(operands, types, strict=True))
    ]
    with jax.enable_x64(True):
        exact = jax.lax.conv_general_dilated(*map(jnp.asarray, seen), **given_settings)
    assert worst(out, exact) < QT_FLOAT32
    for side in (0, 1):
        expected = conv_gradient(operands, specs, types, g, side, grads[side], given_settings)
        assert worst(gradients[side], expected) < QT_FLOAT32, side


CONVOLUTIONS = given(convolutions(), PAIRS, GRADIENTS)


@settings(max_examples=2, deadline=None, derandomize=True)
@CONVOLUTIONS
def test_convolutions_match_float64(case, types, grads):
    check_conv(case, types, grads)


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@CONVOLUTIONS
def test_many_convolutions_match_float64(case, types, grads):
    check_conv(case, types, grads)


# --- ragged products ------------------------------------------------------------------------------


@st.composite
def ragged(draw):
    """(group sizes, rows that belong to no group, k, n)."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    rest = draw(st.integers(0 if sum(sizes) else 1, 2))
    return tuple(sizes), rest, draw(st.integers(1, 6)), draw(st.integers(1, 5))


def ragged_gradients(x, w, types, g, grads, sizes):
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    experts, rows = float64(w), float64(x)
    for_x = for_w = g
    if grads[0] is not None:
        if types[1] is not None:
            experts, scale = decoded(w, types[1], (0, 2))
            spread = np.ones(g.shape, np.float32)
            for group, part in enumerate(rows_of(sizes)):
                spread[part] = np.asarray(scale)[group]
            for_x = g * spread
        for_x = rounded(for_x, grads[0], (0,))
    if grads[1] is not None:
        if types[0] is not None:
            rows, scale = decoded(x, types[0], (0,))
            for_w = g * scale
        for_w = rounded(for_w, grads[1], (1,))
    for group, part in enumerate(rows_of(sizes)):
        dx[part] = float64(for_x)[part] @ experts[group].T
        dw[group] = rows[part].T @ float64(for_w)[part]
    return dx, dw


def check_ragged(case, types, grads):
    sizes, rest, k, n = case
    x, w = normal(0, sum(sizes) + rest, k), normal(1, len(sizes), k, n)
    config = RaggedDotQtConfig(**fields(types, grads))
    groups = jnp.array(sizes, jnp.int32)
    out, g, gradients = vjp(lambda a, b: ragged_dot_qt(a, b, groups, config), x, w)
    kept = ((0,), (0, 2))
    seen = [
        float64(v) if t is None else np.multiply(*decoded(v, t, kept[side]))
        for side, (v, t) in enumerate(zip((x, w), types, strict=True))
    ]
    exact = np.zeros(out.shape)
    for group, part in enumerate(rows_of(sizes)):
        exact[part] = seen[0][part] @ seen[1][group]
    assert worst(out, exact) < QT_FLOAT32
    expected = ragged_gradients(x, w, types, g, grads, sizes)
    for a, b in zip(gradients, expected, strict=True):
        assert worst(a, b) < QT_FLOAT32


RAGGED = given(ragged(), PAIRS, GRADIENTS)


@settings(max_examples=2, deadline=None, derandomize=True)
@RAGGED
def test_ragged_products_match_float64(case, types, grads):
    check_ragged(case, types, grads)


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@RAGGED
def test_many_ragged_products_match_float64(case, types, grads):
    check_ragged(case, types, grads)


# --- nothing quantized ----------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=10, deadline=None, derandomize=True)
@given(convolutions(), ragged())
def test_without_types_gradients_are_the_float_ops(conv, groups):
    shapes, given_settings = conv
    operands = [normal(k, *shape) for k, shape in enumerate(shapes)]
    config = ConvGeneralQtConfig()
    mine = vjp(lambda a, b: conv_general_qt(a, b, config, **given_settings), *operands)
    theirs = vjp(lambda a, b: jax.lax.conv_general_dilated(a, b, **given_settings), *operands)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    sizes, rest, k, n = groups
    x, w = normal(0, sum(sizes) + rest, k), normal(1, len(sizes), k, n)
    count = jnp.array(sizes, jnp.int32)
    mine = vjp(lambda a, b: ragged_dot_qt(a, b, count, RaggedDotQtConfig()), x, w)
    theirs = vjp(lambda a, b: jax.lax.ragged_dot(a, b, count), x, w)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
