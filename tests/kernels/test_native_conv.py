"""Native convolutions against int64 and float64 sums: kernels, the op, transformations, models."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracles.products import FLOAT32_SUM, worst
from oracles.products import conv as slow_conv
from test_native_matmul import FORMATS, INTEGERS, LEVELS, Weight, in_a_process
from tolerances import BF16_ULP, CODE_OF_NEXT_LAYER

import fewbit
from fewbit import kernels, ops
from fewbit.kernels import Window
from fewbit.kernels._conv import channel_conv, conv
from fewbit.numerics import format_of
from fewbit.qarray import HowToQuantize, QArray, dequantize, quantize
from fewbit.qarray import _moves as moves
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"native part: {kernels.info().missing}"
)
rng = np.random.default_rng(0)
NONE = np.zeros((0,), np.float32)


def convolved(x, w, window):
    """[N, H, W, C] with w [y, x, channel of a group, n], in the type of both (int64, float64)."""
    (top, bottom), (left, right) = window.padding
    keep = [slice(max(-low, 0), None) for low in (top, left)]
    x = x[:, keep[0], keep[1]]
    x = x[:, : x.shape[1] + min(bottom, 0), : x.shape[2] + min(right, 0)]
    pads = [(0, 0), *((max(a, 0), max(b, 0)) for a, b in window.padding), (0, 0)]
    x = np.pad(x, pads)
    height, width = (
        max(0, (size - (taps - 1) * d - 1) // s + 1)
        for size, taps, s, d in zip(
            x.shape[1:3], window.taps, window.strides, window.dilation, strict=True
        )
    )
    depth, features = w.shape[2], w.shape[3] // window.groups
    out = np.zeros((x.shape[0], height, width, w.shape[3]), x.dtype)
    for ty, tx in np.ndindex(*window.taps):
        y0, x0 = ty * window.dilation[0], tx * window.dilation[1]
        seen = x[:, y0 :: window.strides[0], x0 :: window.strides[1]][:, :height, :width]
        for g in range(window.groups):
            columns = slice(g * features, (g + 1) * features)
            part = seen[..., g * depth : (g + 1) * depth] @ w[ty, tx, :, columns]
            out[..., columns] += part
    return out


def window(taps, strides=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1), groups=1):
    return Window(taps, strides, padding, dilation, groups)


SAME3 = ((1, 1), (1, 1))
# images, height, width, channels, output channels, window
DENSE = [
    (1, 9, 8, 64, 64, window((3, 3), padding=SAME3)),
    (3, 7, 6, 20, 70, window((3, 3), (2, 2), SAME3)),
    (1, 10, 9, 3, 64, window((7, 7), (2, 2), ((3, 2), (2, 3)))),
    (2, 6, 5, 7, 5, window((3, 2), (1, 2), ((0, 2), (1, 0)))),
    (1, 6, 5, 33, 130, window((1, 1))),
    (1, 9, 9, 12, 64, window((3, 3), dilation=(2, 3), padding=((2, 2), (3, 3)))),
    (1, 9, 9, 6, 8, window((3, 3), dilation=(1, 2), padding=((1, 1), (2, 2)))),
    (2, 1, 50, 16, 64, window((1, 5), (1, 3), ((0, 0), (4, 1)))),
    (1, 5, 4, 300, 64, window((3, 3), padding=SAME3)),
    (1, 3, 3, 1200, 64, window((1, 1))),
    (1, 8, 8, 16, 64, window((3, 3), padding=((-1, 2), (2, -2)))),
    (2, 6, 5, 24, 128, window((3, 3), padding=SAME3, groups=2)),
    (1, 6, 5, 6, 128, window((3, 3), padding=SAME3, groups=2)),
    (0, 6, 5, 8, 64, window((3, 3))),
    (1, 2, 2, 8, 64, window((3, 3))),
]
FEW = [
    (1, 9, 8, 32, 32, window((3, 3), padding=SAME3, groups=32)),
    (2, 8, 7, 5, 15, window((3, 3), (2, 1), SAME3, groups=5)),
    (1, 6, 6, 12, 24, window((3, 2), padding=((1, 1), (0, 1)), groups=3)),
    (1, 9, 40, 32, 64, window((5, 5), (1, 2), ((2, 2), (2, 2)), groups=2)),
    (1, 1, 700, 17, 17, window((1, 4), dilation=(1, 2), padding=((0, 0), (3, 3)), groups=17)),
    (3, 40, 40, 16, 16, window((3, 3), dilation=(2, 2), padding=((2, 2), (2, 2)), groups=16)),
    (0, 6, 5, 8, 8, window((3, 3), groups=8)),
]


def codes_of(shape):
    return rng.integers(-128, 128, shape).astype(np.int8)


def packed(name, case, zero=False, group=0):
    """A random packed weight of a case, and its exact values [y, x, channel, n]."""
    _, _, _, channels, n, win = case
    shape = (*win.taps, channels // win.groups, n)
    weight = Weight(name, int(np.prod(shape[:3])), n, group, zero=zero)
    return weight, shape


def run(x, weight, win, act_scale=NONE, act="none", out="float32"):
    return conv(
        jnp.asarray(x),
        weight.data,
        weight.scale,
        weight.zero,
        np.float32(1),
        np.int32(0),
        jnp.asarray(act_scale),
        qtype=weight.name,
        window=win,
        k=weight.k,
        n=weight.n,
        group=weight.group,
        act=act,
        out_dtype=out,
    )


def check_sums(case, name="int8"):
    weight, shape = packed(name, case)
    x, win = codes_of(case[:4]), case[-1]
    want = convolved(x.astype(np.int64), weight.integers.astype(np.int64).reshape(shape), win)
    np.testing.assert_array_equal(run(x, weight, win, out="int32"), want)


def check_floats(case, name, zero=False, group=0, dtype=np.float32):
    weight, shape = packed(name, case, zero, group)
    x, win = rng.standard_normal(case[:4]).astype(dtype), case[-1]
    values = weight.values.reshape(shape)
    want = convolved(x.astype(np.float64), values, win)
    size = convolved(np.abs(x.astype(np.float64)), np.abs(values), win)
    for out in ("float32", "bfloat16"):
        got = np.asarray(run(x, weight, win, out=out), np.float64)
        bound = FLOAT32_SUM * size + (BF16_ULP * np.abs(want) if out == "bfloat16" else 0)
        assert got.shape == want.shape and (np.abs(got - want) <= bound).all(), (case, name)


def check_images_are_quantized_as_by_quantize(case, dtype=np.float32):
    weight, win = packed("int8", case)[0], case[-1]
    x = jnp.asarray(rng.standard_normal(case[:4]).astype(dtype))
    q = quantize(x, "int8", channelwise_axes=(0,))
    scale = q.scale.astype(jnp.float32).reshape(-1)
    given = run(q.qvalue, weight, win, scale)
    np.testing.assert_array_equal(run(x, weight, win, act="dynamic"), given)


def few(x, w, win, scale=NONE, act_scale=NONE, act="none", out="float32"):
    return channel_conv(
        jnp.asarray(x),
        jnp.asarray(w.reshape(-1, w.shape[-1]).astype(np.float32)),
        jnp.asarray(scale),
        jnp.asarray(act_scale),
        window=win,
        act=act,
        out_dtype=out,
    )


def check_few_outputs(case):
    *shape, n, win = case
    w = codes_of((*win.taps, shape[3] // win.groups, n))
    x = codes_of(shape)
    want = convolved(x.astype(np.int64), w.astype(np.int64), win)
    np.testing.assert_array_equal(few(x, w, win, out="int32"), want)
    floats = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q = quantize(floats, "int8", channelwise_axes=(0,))
    scale = rng.uniform(0.1, 1, n).astype(np.float32)
    given = few(q.qvalue, w, win, scale, q.scale.reshape(-1))
    np.testing.assert_array_equal(few(floats, w, win, scale, act="dynamic"), given)
    wide = np.asarray(floats, np.float64)
    want, size = (convolved(f(wide), f(w * 0.5), win) for f in (lambda a: a, np.abs))
    got = np.asarray(few(floats, w * np.float32(0.5), win), np.float64)
    assert (np.abs(got - want) <= FLOAT32_SUM * size).all()


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_sums_are_exact_and_floats_are_close(case):
    check_sums(case)
    check_floats(case, "int8")


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_output_channels_per_group(case):
    check_few_outputs(case)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    for case in (DENSE[1], DENSE[3]):
        check_floats(case, name, zero=name in INTEGERS and name != "int1", group=32)
        check_floats(case, name, dtype=ml_dtypes.bfloat16)
        if name in INTEGERS:
            check_sums(case, name)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_images_are_quantized_as_by_quantize(dtype):
    for case in (DENSE[1], DENSE[2], DENSE[7], (1, 60, 60, 16, 64, window((1, 1)))):
        check_images_are_quantized_as_by_quantize(case, dtype)


SWEEP = """
from fewbit import kernels
import test_native_conv as t
assert kernels.native_available(), kernels.info()
print(kernels.info().isa)
for case in t.DENSE:
    t.check_sums(case)
    t.check_floats(case, 'int8')
for case in t.FEW:
    t.check_few_outputs(case)
for name in t.INTEGERS:
    t.check_sums(t.DENSE[1], name)
t.check_images_are_quantized_as_by_quantize(t.DENSE[1])
"""


@pytest.mark.parametrize("isa", LEVELS[LEVELS.index(kernels.info().isa) + 1 :])
def test_the_instruction_sets_below_this_cpu(isa):
    assert in_a_process(SWEEP, FEWBIT_ISA=isa).split() == [isa]


def test_what_is_not_finite_spoils_its_image_and_no_other():
    case = (3, 6, 6, 16, 64, window((3, 3), padding=SAME3))
    weight, win = packed("int8", case)[0], case[-1]
    for bad in (np.nan, np.inf):
        x = rng.standard_normal(case[:4]).astype(np.float32)
        x[1, 0, 0, 3] = bad
        result = np.asarray(run(x, weight, win, act="dynamic"))
        assert np.isnan(result[1]).all() and np.isfinite(result[[0, 2]]).all()
        result = np.asarray(run(x, weight, win))
        assert not np.isfinite(result[1, :2, :2]).any() and np.isfinite(result[1, 3:, 3:]).all()
        assert np.isfinite(result[[0, 2]]).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=np.ones((6, 6, 16), np.float32)), r"x must be \[images, height, width, channels\]"),
        (dict(x=np.ones((1, 6, 6, 16), np.float16)), "x must be float32, bfloat16 or int8"),
        (dict(x=np.ones((1, 6, 6, 15), np.float32)), "the window sums over 135 values"),
        (dict(data=np.zeros((1, 5, 8, 64, 4), np.uint8)), r"data must have the shape \[2,5,8,64,4"),
        (dict(scale=np.ones((2, 2, 64), np.float32)), r"scale must have the shape \[2,1,64\]"),
        (dict(layer=np.int32(1)), "layer 1 is not one of the 1"),
        (dict(act_scale=np.ones((1,), np.float32)), "act_scale belongs to int8 x"),
        (dict(x=np.ones((2, 6, 6, 16), np.int8), act_scale=np.ones((3,), np.float32)),
         r"act_scale must be \[2 or 1\] but has the shape \[3\]"),
        (dict(x=np.ones((1, 6, 6, 16), np.int8)), r"act_scale must be \[1 or 1\]"),
        (dict(x=np.ones((1, 6, 6, 16), np.int8), act="dynamic"), "x is int8 already"),
        (dict(zero=np.zeros((2, 1, 64), np.uint8), act="dynamic"), "int8 images need a weight of"),
        (dict(group=8), "group must be 0"),
        (dict(out_dtype="float16"), "the result must be float32, bfloat16 or int32"),
        (dict(out_dtype="int32"), "an int32 result holds sums of codes"),
        (dict(window=window((3, 3), (0, 1))), "taps, strides and dilation must be positive"),
        (dict(window=window((3, 3), groups=3)), "groups must divide the 16 channels"),
        (dict(window=window((3, 3), groups=2)), "must be whole panels of 64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_read(change, message):
    weight = Weight("int8", 144, 70)
    arguments = dict(
        x=np.ones((1, 6, 6, 16), np.float32),
        data=weight.data,
        scale=weight.scale,
        zero=weight.zero,
        tensor_scale=np.float32(1),
        layer=np.int32(0),
        act_scale=NONE,
    )
    static = dict(qtype="int8", window=window((3, 3)), k=144, n=70, group=0, out_dtype="float32")
    arguments |= {key: value for key, value in change.items() if key in arguments}
    static |= {key: value for key, value in change.items() if key not in arguments}
    if static["window"].strides[0] == 0:
        static["window"] = BrokenWindow(*jax.tree.leaves(static["window"].taps))
    with pytest.raises(Exception, match=message):
        jax.jit(functools.partial(conv, **static))(**arguments).block_until_ready()


class BrokenWindow:
    """What no Window can say."""

    groups = 1

    def __init__(self, *taps):
        self.numbers = np.asarray([*taps, 0, 1, 0, 0, 0, 0, 1, 1], np.int64)

    def out_shape(self, shape):
        return (1, 1)


def test_few_output_channels_are_checked_too():
    x, w = np.ones((1, 4, 4, 6), np.float32), np.ones((1, 1, 2, 6), np.float32)
    for arguments, message in (
        ((x, w[:, :, :1], window((1, 1), groups=3)), r"weight must have the shape \[2,6\]"),
        ((x, w, window((1, 1), groups=3), np.ones((5,), np.float32)), r"scale must have the shape"),
        ((x[..., :5], w, window((1, 1), groups=3)), "groups must divide the 5 channels"),
    ):
        with pytest.raises(Exception, match=message):
            few(*arguments).block_until_ready()
    long = window((33, 33), groups=1)
    with pytest.raises(Exception, match="k=1089 are exact only up to 1024"):
        few(np.ones((1, 40, 40, 1), np.int8), np.ones((33, 33, 1, 2)), long, act_scale=np.ones(1))


# --- the op ---------------------------------------------------------------------------------------


def kernel(shape, spec, qtype="int8", roles=None, **how):
    """A quantized kernel, plain and in panels; `spec` like 'HWIO'."""
    q = quantize(
        jnp.asarray(rng.standard_normal(shape), jnp.float32),
        qtype,
        channelwise_axes=(spec.index("O"),),
        **how,
    )
    letters = {"O": "n", "I": "c"}
    return q, to_panels(q, roles or "".join(letters.get(letter, "k") for letter in spec))


def images(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


LAYOUTS = [
    (("NHWC", "HWIO", "NHWC"), (2, 7, 6, 16), (3, 2, 16, 64)),
    (("NCHW", "OIHW", "NCHW"), (2, 16, 7, 6), (64, 16, 3, 2)),
    (("HWNC", "WHIO", "NCHW"), (7, 6, 2, 16), (2, 3, 16, 64)),
    (("NWC", "WIO", "NWC"), (2, 9, 16), (3, 16, 64)),
    (("NCW", "OIW", "NCW"), (2, 16, 9), (64, 16, 3)),
]


@pytest.mark.parametrize(("layout", "x_shape", "w_shape"), LAYOUTS, ids=lambda v: str(v))
def test_every_order_of_axes(layout, x_shape, w_shape):
    q, p = kernel(w_shape, layout[1])
    x = images(*x_shape)
    spatial = len(x_shape) - 2
    settings = dict(window_strides=(2, 1)[:spatial], dimension_numbers=layout)
    how = ops.conv_how(
        dimension_numbers=lax.conv_dimension_numbers(x_shape, w_shape, layout),
        for_lhs=True,
        qtype="int8",
    )
    for padding in ("SAME", "VALID", ((2, 1), (0, 3))[:spatial]):
        for lhs in (x, ops.Deferred(x, how), ops.Deferred(x, how).quantized()):
            out = ops.conv_general_dilated(lhs, p, padding=padding, **settings)
            plain = ops.conv_general_dilated(lhs, q, padding=padding, **settings)
            np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-4)
            word = "native float" if lhs is x else "native int8"
            assert ops.describe_conv(lhs, p, padding=padding, **settings) == word


def test_the_op_against_a_slow_convolution():
    q, p = kernel((64, 5, 3, 2), "OIHW")
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    x = images(2, 5, 6, 7)
    padding = ((1, 1), (0, 2))
    for lhs in (x, ops.Deferred(x, how).quantized()):
        out = ops.conv_general_dilated(lhs, p, (2, 1), padding, rhs_dilation=(1, 2))
        expected = slow_conv(lhs, q, (2, 1), padding, (1, 1), (1, 2), 1)
        assert worst(out, expected) < FLOAT32_SUM


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4"])
def test_formats_through_the_op(name):
    tile = format_of(name).tile
    tiled = {2: tile} if tile else {}
    q, p = kernel((3, 3, 32, 64), "HWIO", name, tiled_axes=tiled)
    x, how = images(1, 6, 6, 32), HowToQuantize(qtype="int8", channelwise_axes=(0,))
    numbers = ("NHWC", "HWIO", "NHWC")
    for lhs in (x, ops.Deferred(x, how)):
        rounded = lhs if lhs is x else dequantize(lhs.quantized())
        exact = lax.conv_general_dilated(
            rounded, dequantize(q, jnp.float32), (1, 1), "SAME", dimension_numbers=numbers
        )
        out = ops.conv_general_dilated(lhs, p, (1, 1), "SAME", dimension_numbers=numbers)
        np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
        wanted = "native int8" if name.startswith("int") and lhs is not x else "native float"
        assert ops.describe_conv(lhs, p, numbers) == wanted


def test_what_native_code_does_not_run_is_right_all_the_same():
    q, p = kernel((3, 3, 4, 64), "HWIO")
    numbers = ("NHWC", "HWIO", "NHWC")
    x = images(2, 6, 6, 4)
    uneven = quantize(x, "int8", channelwise_axes=(0,), calibration_method="minmax")
    cases = [
        (x, dict(lhs_dilation=(2, 2), padding=((1, 1), (1, 1)))),
        (x, dict(batch_group_count=2)),
        (uneven, {}),
        (images(0, 6, 6, 4), {}),
        (images(2, 6, 6, 4, dtype=jnp.float16), {}),
    ]
    for lhs, settings in cases:
        go = functools.partial(
            ops.conv_general_dilated,
            window_strides=(1, 1),
            dimension_numbers=numbers,
            **{"padding": "SAME", **settings},
        )
        np.testing.assert_allclose(go(lhs, p), go(lhs, q), rtol=2e-3, atol=2e-3)
    described = ops.describe_conv(x, p, numbers, lhs_dilation=(2, 2))
    assert described == "dequantize + float conv"
    volume, w = images(1, 3, 3, 3, 4), quantize(images(2, 2, 2, 4, 64), "int8")
    out = ops.conv_general_dilated(
        volume, w, (1, 1, 1), "VALID", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )
    assert out.shape == (1, 2, 2, 2, 64)


def test_views_of_a_packed_kernel_are_followed():
    q, p = kernel((3, 3, 16, 64), "HWIO")
    x, numbers = images(1, 16, 6, 6), ("NCHW", "OIHW", "NCHW")
    turned = moves.transpose(p, (3, 2, 0, 1))
    assert ops.describe_conv(x, turned, numbers) == "native float"
    out = ops.conv_general_dilated(x, turned, (1, 1), "SAME", dimension_numbers=numbers)
    plain = moves.transpose(q, (3, 2, 0, 1))
    want = ops.conv_general_dilated(x, plain, (1, 1), "SAME", dimension_numbers=numbers)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(fewbit.unpack(turned).qvalue, plain.qvalue)
    flat_q = quantize(images(9, 16, 64), "int8", channelwise_axes=(2,))
    flat = moves.reshape(to_panels(flat_q, "kcn"), (3, 3, 16, 64))
    nhwc = ("NHWC", "HWIO", "NHWC")
    assert ops.describe_conv(images(1, 6, 6, 16), flat, nhwc) == "native float"


# --- transformations ------------------------------------------------------------------------------


def same(x, w, groups=1):
    return ops.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def xla_same(x, w, groups=1):
    return lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def close(a, b, tolerance=2e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=1.0))


GROUPED = [((3, 3, 8, 64), 1), ((3, 3, 1, 16), 8)]


def pair(shape, groups):
    q, p = kernel(shape, "HWIO", roles="kkcn")
    return dequantize(q), p if groups == 1 else q


@pytest.mark.parametrize(("shape", "groups"), GROUPED)
def test_derivatives_and_vmap(shape, groups):
    exact, w = pair(shape, groups)
    x = images(3, 2, 5, 4, 8)

    def makes(f, w):
        def loss(x):
            return jnp.sum(f(x, w, groups) ** 2)

        yield lambda: jax.grad(loss)(x[0])
        yield lambda: jax.jit(jax.vmap(jax.grad(loss)))(x)
        yield lambda: jax.jvp(loss, (x[0],), (x[1],))[1]
        yield lambda: jax.vmap(lambda x: f(x, w, groups), 2, 1)(jnp.moveaxis(x, 0, 2))
        yield lambda: jax.grad(lambda x: jax.jvp(loss, (x,), (x,))[1])(x[0])

    for ours, theirs in zip(makes(same, w), makes(xla_same, exact), strict=True):
        close(ours(), theirs())


def test_quantized_images_and_stacks_under_vmap_and_scan():
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    x = images(3, 2, 5, 4, 8)
    _, p = kernel((3, 3, 8, 64), "HWIO")
    both = jax.vmap(lambda x: same(ops.Deferred(x, how), p))
    close(both(x), jnp.stack([same(ops.Deferred(one, how), p) for one in x]), 1e-6)
    codes = jax.vmap(lambda x: same(ops.Deferred(x, how).quantized(), p))
    close(codes(x), both(x), 1e-6)
    stack = quantize(images(3, 3, 3, 8, 8), "int8", channelwise_axes=(0, 4))
    packed_stack = to_panels(stack, "lkkcn")

    def layers(x, w):
        return lax.scan(lambda x, i: (jnp.tanh(same(x, w.at_layer(i))), None), x, jnp.arange(3))[0]

    close(layers(x[0], packed_stack), layers(x[0], stack))
    close(jax.vmap(same)(x, packed_stack), jax.vmap(same)(x, stack))


@pytest.mark.parametrize(("shape", "groups"), [((3, 3, 8, 256), 1), ((3, 3, 1, 16), 8)])
@pytest.mark.parametrize("quantized", [False, True])
def test_devices_share_images_without_gathering(shape, groups, quantized):
    _, w = pair(shape, groups)
    x = images(8, 6, 6, 8)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))

    def f(x, w):
        return same(ops.Deferred(x, how) if quantized else x, w, groups)

    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
    whole = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(f).lower(spread, whole).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and ("fewbit_conv" if groups == 1 else "fewbit_channel") in text
    out = compiled(spread, whole)
    assert out.sharding.spec[0] == "x"
    close(out, f(x, w), 1e-6)


def test_devices_share_panels():
    q, p = kernel((3, 3, 8, 256), "HWIO")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = images(2, 6, 6, 8)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
    shared = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec("y"))), p)
    compiled = jax.jit(same).lower(spread, shared).compile()
    assert "all-gather" not in compiled.as_text() and "fewbit_conv" in compiled.as_text()
    close(compiled(spread, shared), same(x, q))


def test_explicit_meshes_other_platforms_and_shard_map():
    q, p = kernel((3, 3, 8, 64), "HWIO")
    x = images(8, 6, 6, 8)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
        close(jax.jit(same)(placed, p), same(x, q))
    auto = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    each = jax.shard_map(
        same,
        mesh=auto,
        in_specs=(PartitionSpec("x"), PartitionSpec()),
        out_specs=PartitionSpec("x"),
    )
    close(jax.jit(each)(x, p), same(x, q))
    for platform in ("tpu", "cuda"):
        text = jax.jit(same).trace(x, p).lower(lowering_platforms=(platform,)).as_text()
        assert "fewbit_conv" not in text


# --- models ---------------------------------------------------------------------------------------

RULES = {
    "int8": dict(weight_qtype="int8", act_qtype="int8"),
    "static": dict(weight_qtype="int8", act_qtype="int8", act_static_scale=True),
    "int4": dict(weight_qtype="int4"),
    "nf4": dict(weight_qtype="nf4"),
}


def check_model(run, params, plan, wanted):
    words = {row.site.path: row.runs_on for row in plan.sites}
    assert words == wanted, words
    kernels_of = [w for w in jax.tree.leaves(params, is_leaf=is_stored) if is_stored(w)]
    layouts = [w.array.layout for w in kernels_of]
    assert layouts.count("panels") == sum("native" in word for word in wanted.values()) - 1
    close(run(params), run(fewbit.unpack(params)), CODE_OF_NEXT_LAYER)
    for stored in kernels_of:
        codes = stored.array.qvalue
        assert codes.shape == stored.array.shape
        np.testing.assert_array_equal(fewbit.unpack(fewbit.pack(stored)).array.qvalue, codes)


def is_stored(x):
    return isinstance(x, fewbit.WithAux) and isinstance(x.array, QArray)


def words_for(name, prefix=""):
    word = "native int8" if name in ("int8", "static") else "native float"
    xla = "xla int8 conv, slow" if word == "native int8" else "xla dequantize + float conv, slow"
    native = dict.fromkeys((f"{prefix}{n}" for n in ("stem", "dw", "mid", "grouped", "line")), word)
    return native | {f"{prefix}up": xla}


def linen_model():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(64, (3, 3), name="stem")(x))
            x = nn.relu(nn.Conv(64, (3, 3), feature_group_count=64, name="dw")(x))
            x = nn.relu(nn.Conv(128, (3, 3), strides=2, padding="VALID", name="mid")(x))
            x = nn.relu(nn.Conv(128, (3, 3), feature_group_count=2, name="grouped")(x))
            x = nn.relu(nn.Conv(64, (3,), kernel_dilation=2, name="line")(x.reshape(2, -1, 128)))
            return nn.ConvTranspose(8, (2,), strides=(2,), name="up")(x)

    return Net()


@pytest.mark.parametrize("name", RULES)
def test_a_linen_model_runs_natively_and_the_plan_said_so(name):
    model, x = linen_model(), images(2, 9, 9, 16)
    params = model.init(jax.random.key(0), x)["params"]
    rules = [fewbit.QuantizationRule(**RULES[name])]
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    plan = fewbit.plan(model, rules, x)
    if name == "static":
        assert {row.site.path: row.runs_on for row in plan.sites} == words_for(name)
        return
    stored = fewbit.quantize_params(params, plan)
    check_model(lambda p: quantized.apply({"params": p}, x), stored, plan, words_for(name))
    text = jax.jit(lambda p, x: quantized.apply({"params": p}, x)).lower(stored, x).as_text()
    assert text.count("fewbit_conv") >= 4 and "fewbit_channel_conv" in text
    grad = jax.grad(lambda x, p: jnp.sum(quantized.apply({"params": p}, x) ** 2))
    assert np.isfinite(grad(x, stored)).all()
    report = str(fewbit.report(stored))
    assert "panels" in report and "3x3x64x128" in report


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_nnx_model_runs_natively(name):
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)

    class Net(nnx.Module):
        def __init__(self):
            self.one = nnx.Conv(16, 64, (3, 3), rngs=rngs)
            self.two = nnx.Conv(64, 64, (3, 3), feature_group_count=64, rngs=rngs)

        def __call__(self, x):
            return self.two(nnx.relu(self.one(x)))

    model, x = Net(), images(2, 6, 6, 16)
    rules = [fewbit.QuantizationRule(**RULES[name])]
    plan = fewbit.plan(model, rules, x)
    word = "native int8" if name == "int8" else "native float"
    assert {row.runs_on for row in plan.sites} == {word}
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules), x)
    out = np.asarray(quantized(x))
    exact = np.asarray(model(x))
    assert np.abs(out - exact).mean() < (0.02 if name == "int8" else 0.25) * np.abs(exact).mean()


def test_static_scales_run_on_codes():
    q, p = kernel((3, 3, 8, 64), "HWIO")
    x = images(2, 6, 6, 8)
    for shape in ((1, 1, 1, 1), (2, 1, 1, 1)):
        scale = jnp.full(shape, 0.03, jnp.float32)
        codes = jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int8)
        lhs = QArray(codes, scale)
        assert ops.describe_conv(lhs, p, ("NHWC", "HWIO", "NHWC")) == "native int8"
        np.testing.assert_array_equal(same(lhs, p), same(lhs, q))
