"""Errors of training products against fake quantization and against float, every known row.

The rows were stated without their inputs, as mean |(x - y) / y|. That has no mean where results
cross zero, so they are held on uniform inputs; ours, which are closer to what models see, are on
normal ones, as mean error over mean magnitude, measured and rounded up.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_training_dot import relative

from fewbit import ops
from fewbit.qarray import dequantize, quantize_with
from fewbit.training import (
    ConvGeneralQtConfig,
    DotGeneralQtConfig,
    RaggedDotQtConfig,
    conv_general_qt,
    dot_general_qt,
    ragged_dot_qt,
)

PLAIN = (((1,), (0,)), ((), ()))
NHWC = ("NHWC", "HWIO", "NHWC")
GROUPS = jnp.array([16, 20, 8, 20], jnp.int32)
E4M3 = "float8_e4m3fn"


def types(qtype, grad=None, **fields):
    return dict(
        lhs_qtype=qtype, rhs_qtype=qtype, dlhs_grad_qtype=grad, drhs_grad_qtype=grad, **fields
    )


def original(qtype):
    return types(
        qtype,
        qtype,
        use_original_residuals=True,
        dlhs_residual_qtype=qtype,
        drhs_residual_qtype=qtype,
    )


# Each row: fields, known bounds, our bounds on normal inputs. Bounds are (out, dlhs, drhs) against
# fake quantization, then against float. Known rows of dot_general have one bound for both
# gradients, and those of e4m3 were given leave to be .25 on some platforms; not taken here.


def dot_row(out, gradients, float_out, float_gradients):
    return (out, gradients, gradients, float_out, float_gradients, float_gradients)


DOT = {
    "int8": (
        types("int8", "int8"),
        dot_row(0.02, 0.03, 0.06, 0.03),
        (1e-6, 0.0062, 0.0066, 0.0104, 0.0098, 0.0102),
    ),
    "int8 forward": (
        types("int8"),
        dot_row(0.02, 0.03, 0.06, 0.03),
        (1e-6, 0.0076, 0.0076, 0.0104, 0, 0),
    ),
    "int4": (
        types("int4", "int4"),
        dot_row(0.04, 0.2, 0.5, 0.5),
        (1e-6, 0.104, 0.115, 0.18, 0.165, 0.173),
    ),
    "int4 forward": (
        types("int4"),
        dot_row(0.04, 0.5, 0.5, 0.5),
        (1e-6, 0.128, 0.131, 0.18, 0, 0),
    ),
    "int8 original": (
        original("int8"),
        dot_row(0.02, 0.1, 0.5, 0.5),
        (1e-6, 0.0113, 0.0118, 0.0104, 0.0085, 0.0091),
    ),
    "int4 original": (
        original("int4"),
        dot_row(0.04, 0.5, 0.5, 0.2),
        (1e-6, 0.183, 0.19, 0.18, 0.142, 0.155),
    ),
    "e4m3": (
        types(E4M3, E4M3),
        dot_row(0.0002, 0.2, 0.04, 0.04),
        (1e-6, 0.0256, 0.0273, 0.0397, 0.0378, 0.0391),
    ),
    "e4m3 tile": (
        types(E4M3, E4M3, tile_size=128),
        dot_row(0.005, 0.2, 0.4, 0.4),
        (1e-6, 0.0379, 0.0384, 0.0391, 0.0254, 0.0275),
    ),
    "e4m3 gradient tile": (
        types(E4M3, E4M3, drhs_tile_size=32),
        dot_row(0.0033, 0.5, 0.2, 0.2),
        (1e-6, 0.0256, 0.027, 0.0397, 0.0378, 0.0388),
    ),
}

# With float gradients a convolution multiplies the rounded operands, so that its gradients are
# those of fake quantization to the bit; other products multiply the original ones, as float does.
FORWARD = ("int8 NHWC forward", "int4 NHWC forward")

CONV = {  # fields, dimension numbers, dilation, bounds as above
    "int8 NHWC forward": (
        types("int8"), NHWC, 1,
        (0.0005, 0, 0, 0.1, 0.005, 0.008),
        (1e-6, 0, 0, 0.011, 0.0066, 0.009),
    ),
    "int4 NHWC forward": (
        types("int4"), NHWC, 1,
        (0.003, 0, 0, 0.12, 0.06, 0.12),
        (1e-6, 0, 0, 0.191, 0.118, 0.151),
    ),
    "e4m3 NHWC": (
        types(E4M3, E4M3), NHWC, 1,
        (0.004, 0.05, 0.06, 0.07, 0.05, 0.06),
        (1e-6, 0.0285, 0.029, 0.0387, 0.0388, 0.0409),
    ),
    "e4m3 dilated": (
        types(E4M3, E4M3), NHWC, 2,
        (0.02, 0.04, 0.05, 0.007, 0.05, 0.05),
        (1e-6, 0.029, 0.0287, 0.0391, 0.0396, 0.0401),
    ),
    "int8 NCHW": (
        types("int8", "int8"), None, 1,
        (0.002, 0.005, 0.003, 0.009, 0.008, 0.02),
        (1e-6, 0.0125, 0.0096, 0.011, 0.0141, 0.0131),
    ),
    "int4 NCHW": (
        types("int4", "int4"), None, 1,
        (0.002, 0.05, 0.06, 0.28, 0.12, 0.13),
        (1e-6, 0.213, 0.164, 0.191, 0.245, 0.22),
    ),
    "e4m3 NCHW": (
        types(E4M3, E4M3), None, 1,
        (0.002, 0.04, 0.04, 0.02, 0.05, 0.06),
        (1e-6, 0.0288, 0.029, 0.0391, 0.0396, 0.0396),
    ),
}  # fmt: skip

RAGGED = {
    "int8 forward": (
        types("int8"),
        (0.005, 0.005, 0.005, 0.02, 0.01, 0.01),
        (1e-6, 0.0066, 0.0064, 0.0088, 0, 0),
    ),
    "e4m3 forward": (
        types(E4M3),
        (0.005, 0.035, 0.035, 0.02, 0.03, 0.03),
        (1e-6, 0.0275, 0.0269, 0.0374, 0, 0),
    ),
    "e4m3": (
        types(E4M3, E4M3),
        (0.025, 0.045, 0.045, 0.04, 0.05, 0.05),
        (1e-6, 0.0256, 0.0264, 0.0374, 0.0378, 0.0377),
    ),
}


def rounded(x, how):
    """Fake quantization: the decoded number to the bit, with the gradient of the number itself."""
    return jax.lax.stop_gradient(dequantize(quantize_with(x, how))) + (x - jax.lax.stop_gradient(x))


def dot(name):
    fields, *bounds = DOT[name]
    config = DotGeneralQtConfig(**fields)
    hows = [
        ops.dot_how(dimension_numbers=PLAIN, ndims=(2, 2), for_lhs=k == 0, **config.operand(k))
        for k in (0, 1)
    ]
    mine = lambda x, w: dot_general_qt(x, w, PLAIN, config)  # noqa: E731
    return mine, jnp.matmul, hows, ((64, 256), (256, 32)), bounds


def conv(name):
    fields, numbers, dilation, *bounds = CONV[name]
    config = ConvGeneralQtConfig(**fields)
    shapes = ((8, 16, 16, 8), (3, 3, 8, 16)) if numbers else ((8, 8, 16, 16), (16, 8, 3, 3))
    settings = dict(
        window_strides=(1, 1),
        padding="SAME",
        rhs_dilation=(dilation, dilation),
        dimension_numbers=numbers,
    )
    spec = jax.lax.conv_dimension_numbers(*shapes, numbers)
    hows = [
        ops.conv_how(dimension_numbers=spec, for_lhs=k == 0, **config.operand(k)) for k in (0, 1)
    ]
    mine = lambda x, w: conv_general_qt(x, w, config, **settings)  # noqa: E731
    theirs = lambda x, w: jax.lax.conv_general_dilated(x, w, **settings)  # noqa: E731
    return mine, theirs, hows, shapes, bounds


def ragged(name):
    fields, *bounds = RAGGED[name]
    config = RaggedDotQtConfig(**fields)
    hows = [ops.ragged_dot_how(for_lhs=k == 0, **config.operand(k)) for k in (0, 1)]
    mine = lambda x, w: ragged_dot_qt(x, w, GROUPS, config)  # noqa: E731
    theirs = lambda x, w: jax.lax.ragged_dot(x, w, GROUPS)  # noqa: E731
    return mine, theirs, hows, ((64, 64), (4, 64, 32)), bounds


ROWS = [
    (kind, name) for kind, rows in ((dot, DOT), (conv, CONV), (ragged, RAGGED)) for name in rows
]


def error(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.mean(np.abs((found - expected) / expected))


def errors(kind, name, draw, measure):
    """The six columns, and the two rows of bounds."""
    mine, exact, hows, shapes, bounds = kind(name)
    x, w = (draw(jax.random.key(42 + k), shape) for k, shape in enumerate(shapes))

    def pulled(function):
        out, pull = jax.vjp(function, x, w)
        return out, *pull(draw(jax.random.key(47), out.shape))

    def fake(x, w):
        return exact(rounded(x, hows[0]), rounded(w, hows[1]))

    found = pulled(mine)
    columns = [
        measure(a, b) for other in (fake, exact) for a, b in zip(found, pulled(other), strict=True)
    ]
    return columns, bounds


def holds(columns, bounds):
    return [f"{c:.4g} > {b}" for c, b in zip(columns, bounds, strict=True) if c > b] == []


@pytest.mark.parametrize("kind, name", ROWS, ids=lambda v: getattr(v, "__name__", v))
def test_the_known_bounds_hold(kind, name):
    columns, (known, _) = errors(kind, name, jax.random.uniform, error)
    assert holds(columns, known), (columns, known)


@pytest.mark.long
@pytest.mark.parametrize("kind, name", ROWS, ids=lambda v: getattr(v, "__name__", v))
def test_our_own_bounds_hold_on_normal_inputs(kind, name):
    columns, (_, own) = errors(kind, name, jax.random.normal, relative)
    assert holds(columns, own), (columns, own)


@pytest.mark.parametrize("name", FORWARD)
def test_float_gradients_of_convolutions_are_those_of_fake_quantization_to_the_bit(name):
    columns, _ = errors(conv, name, jax.random.normal, relative)
    assert columns[1:3] == [0, 0] and min(columns[4:]) > 0
