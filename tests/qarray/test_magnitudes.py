"""Numbers of any size keep the accuracy of their format, or somebody is told."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracles.arrays as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbit
from fewbit import QuantizationRule
from fewbit.numerics import FORMATS
from fewbit.qarray import HowToQuantize, check_finite, quantize_with

DTYPES = ("float16", "bfloat16", "float32")
SYMMETRIC = [name for name, row in FORMATS.items() if row.bound is not None]
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
ROWS = 32


def bound(name, scale_dtype, dtype):
    """The largest error of a format, over the largest number of its group."""
    row = FORMATS[name]
    if row.kind == "sign":
        return 1.0
    numbers = np.array(oracle.grid(name))
    top = oracle.bound(name)
    half = np.diff(numbers).max() / 2 / top
    half = max(half, (top - numbers.max()) / top)
    if row.scale_dtype == "float8_e8m0fnu":  # a power of two: up to twice as coarse, or clipping
        half = 2 * half + 0.15
    if row.scale_dtype == "float8_e4m3fn":
        half += 2.0**-4
    # The scale is rounded, the quotient is, and so is what comes back.
    return half + 4 * EPS[scale_dtype] + 4 * EPS[dtype]


def loss(x, back, where):
    """The error of each column over its largest number, in float64."""
    error = np.abs(np.asarray(back, np.float64) - x).max(0)
    # Subnormal float16 numbers are 6e-8 apart.
    return np.maximum(error - where, 0) / np.maximum(np.abs(x).max(0), 1e-300)


def numbers(exponents, dtype, seed=0):
    """A column for each magnitude, in the dtype; and the same in float64."""
    x = np.random.default_rng(seed).normal(size=(ROWS, len(exponents)))
    with np.errstate(over="ignore"):
        x = jnp.asarray(x * 10.0 ** np.array(exponents)).astype(dtype)
    return x, np.asarray(x.astype(jnp.float32), np.float64)


def check(name, dtype, exponents, scale_dtype=None):
    x, exact = numbers(exponents, dtype)
    if not np.isfinite(exact).all():
        return
    tiles = {} if FORMATS[name].tile is None else {0: FORMATS[name].tile}
    channels = (1,)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        q = fewbit.quantize(
            x, name, channelwise_axes=channels, tiled_axes=tiles, scale_dtype=scale_dtype
        ).with_dtype(dtype)
    back = fewbit.dequantize(q).astype(jnp.float32)
    step = 2.0**-24 if dtype == "float16" else 0.0
    held = jnp.dtype(scale_dtype or q.scale.dtype).name
    lost = loss(exact, back, step) > bound(name, held if held in EPS else "float32", dtype)
    assert np.isfinite(np.asarray(back)).all()
    assert told or not lost.any(), (exact.max(0)[lost], np.asarray(back).max(0)[lost])
    if not told and FORMATS[name].scale_dtype is None and FORMATS[name].kind != "sign":
        wanted = np.where(np.abs(exact).max(0) > 0, np.abs(exact).max(0) / oracle.bound(name), 1)
        scale = np.asarray(q.scale.astype(jnp.float32), np.float64)[0]
        np.testing.assert_allclose(scale, wanted, rtol=2 * EPS[held])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["int8", "int4", "float8_e4m3fn", "float8_e5m2", "nf4", "mxfp4"]),
    st.lists(st.floats(-30, 30), min_size=4, max_size=4),
)
def test_numbers_of_any_size_come_back_or_are_told(dtype, name, exponents):
    check(name, dtype, exponents)


@pytest.mark.long
@pytest.mark.parametrize("scale_dtype", [None, "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SYMMETRIC), st.lists(st.floats(-30, 30), min_size=4, max_size=4))
def test_numbers_of_any_size_in_any_format(dtype, scale_dtype, name, exponents):
    own = FORMATS[name].scale_dtype is not None
    check(name, dtype, exponents, None if own else scale_dtype)


@pytest.mark.parametrize("name", ["int8", "uint4"])
@pytest.mark.parametrize("exponent", [-7, -4, 0, 4.2])
def test_ranges_with_two_ends(name, exponent):
    x = numbers([exponent] * 4, "float16")[0]
    x = jnp.clip(x, -6e4, 6e4)
    exact = np.asarray(x.astype(jnp.float32), np.float64)
    q = fewbit.quantize(x, name, channelwise_axes=(1,), calibration_method="minmax")
    back = np.asarray(fewbit.dequantize(q).astype(jnp.float32))
    assert q.scale.dtype == jnp.float32 and q.dtype == jnp.float16
    assert (loss(exact, back, 2.0**-23) < (2 / 15 if name == "uint4" else 2 / 255)).all()


def test_codes_that_stand_for_more_than_float16_holds_are_held():
    x = jnp.full((32, 1), 65504.0, jnp.float16)
    for name in ("mxfp4", "mxfp8", "nvfp4", "float8_e4m3fn"):
        tiles = {} if FORMATS[name].tile is None else {0: FORMATS[name].tile}
        q = fewbit.quantize(x, name, tiled_axes=tiles)
        assert np.isfinite(np.asarray(fewbit.dequantize(q))).all(), name


# --- what is told ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "nf4", "mxfp8"])
def test_numbers_that_become_zeros_are_told(name, dtype):
    x = jnp.full((32, 2), 1e-20, dtype).at[:, 1].set(1)
    kwargs = dict(channelwise_axes=(1,), tiled_axes={0: 32} if name == "mxfp8" else {})
    with pytest.warns(UserWarning, match="fewbit.quantize: the numbers of 1 of 2 scales became ze"):
        q = fewbit.quantize(x, name, **kwargs)
    assert not np.asarray(fewbit.dequantize(q))[:, 0].any()
    rules = [QuantizationRule(weight_qtype=name)]
    plan = fewbit.plan(lambda p, x: x @ p["w"], rules, {"w": x}, jnp.ones((1, 32), dtype))
    with pytest.warns(UserWarning, match="w: the numbers of 1 of 2 .* or leave it float in the ru"):
        fewbit.quantize_params({"w": x}, plan)


def test_zeros_are_nothing_to_tell():
    for name in ("int8", "int1", "nf4", "nvfp4", "mxfp4", "float8_e4m3fn"):
        for scale_dtype in (None, "float16"):
            own = FORMATS[name].scale_dtype is not None
            x = jnp.zeros((32, 2)).at[:, 1].set(1)
            tiles = {0: FORMATS[name].tile} if own else {}
            kwargs = dict(tiled_axes=tiles, scale_dtype=None if own else scale_dtype)
            fewbit.quantize(x, name, channelwise_axes=(1,), **kwargs)
    fewbit.quantize(jnp.zeros((0, 4)), "int8")
    fewbit.quantize(jnp.full((4,), 127.5), "int8")  # whose scale is 1 indeed


@pytest.mark.parametrize(("size", "name"), [(1e-6, "float8_e4m3fn"), (1e-3, "int8"), (1e9, "int8")])
def test_float16_scales_that_do_not_fit_are_told(size, name):
    x = jnp.full((4, 2), size)
    with pytest.warns(UserWarning, match=r"2 of 2 scales do not fit float16 .* or 'float32'\."):
        q = fewbit.quantize(x, name, channelwise_axes=(1,), scale_dtype="float16")
    assert q.scale.dtype == jnp.float16 and np.isfinite(np.asarray(fewbit.dequantize(q))).all()


def test_tiles_far_below_the_largest_are_told():
    x = jnp.ones((64, 1)).at[:16].set(1e-8)
    with pytest.warns(UserWarning, match="1 of 4 tiles are so much smaller .* Use 'mxfp4'"):
        fewbit.quantize(x, "nvfp4", tiled_axes={0: 16})


def test_a_range_that_is_not_finite_is_an_error():
    x = jnp.full((4, 2), 1e25)
    with pytest.raises(ValueError, match=r"'rms,3' leaves the range of float32 .* Use 'absmax'"):
        fewbit.quantize(x, "int8", calibration_method="rms,3")


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_an_error_outside_jit(bad, dtype):
    x = jnp.ones((3, 4), dtype).at[1, 2].set(bad)
    with pytest.raises(ValueError, match=r"given to fewbit.quantize holds 1 value that is NaN or "):
        fewbit.quantize(x, "int8")
    with pytest.raises(ValueError, match=r"the first at index \(1, 2\).* jnp.nan_to_num\(array\)"):
        fewbit.quantize(np.asarray(x), "float8_e4m3fn")
    for scale_dtype in (None, "float16"):
        traced = jax.jit(lambda x, s=scale_dtype: fewbit.quantize(x, "int8", scale_dtype=s))
        back = np.asarray(fewbit.dequantize(traced(x)).astype(jnp.float32))
        assert not np.isfinite(back).all()  # unchanged: NaN where somebody looks


def test_constants_inside_a_trace_are_looked_at():
    def f(x):
        return x + fewbit.dequantize(fewbit.quantize(np.ones((2, 2), np.float32), "int8")).sum()

    assert jax.jit(f)(1.0) > 4.9
    with pytest.raises(ValueError, match="holds 1 value"):
        jax.jit(lambda x: x + check_finite(np.array([np.nan], np.float32), "w"))(1.0)
    jax.vmap(lambda x: fewbit.quantize(x, "int8"))(jnp.full((2, 3), 1e-30))


# --- float16 activations, weights and gradients ---------------------------------------------------

MODEL = {
    "w8a8": dict(weight_qtype="int8", act_qtype="int8"),
    "w8": dict(weight_qtype="int8"),
    "fp8": dict(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"),
    "w4a8": dict(weight_qtype="int4", act_qtype="int8", tile_size=32),
}


def relative(out, exact):
    return float(np.abs(np.asarray(out, np.float64) - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("backend", ["native", "xla"])
@pytest.mark.parametrize("name", MODEL)
def test_small_float16_activations_and_weights_keep_their_precision(name, backend):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 64)), rng.normal(size=(64, 32))

    def f(p, x):
        return jnp.matmul(x, p["w"], preferred_element_type=jnp.float32)

    def error(size_x, size_w):
        small = jnp.asarray(x * size_x, jnp.float16)
        params = {"w": jnp.asarray(w * size_w, jnp.float16)}
        exact = np.asarray(small, np.float64) @ np.asarray(params["w"], np.float64)
        rules = [QuantizationRule(**MODEL[name])]
        with fewbit.kernels.backend(backend):
            plan = fewbit.plan(f, rules, params, small)
            q = fewbit.quantize_params(params, plan)
            assert q["w"].array.scale.dtype == jnp.float32
            return relative(fewbit.quantize_model(f, fewbit.PtqProvider(rules))(q, small), exact)

    usual = error(1.0, 1.0)
    for size_x, size_w in ((1e-3, 1.0), (3e-5, 1.0), (1.0, 1e-3), (1.0, 3e-5), (1e-4, 1e-4)):
        assert error(size_x, size_w) < 1.3 * usual + 2e-3, (size_x, size_w)


def test_static_scales_of_float16_are_float32():
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 64)) * 1e-4, jnp.float16)
    params = {"w": jnp.asarray(rng.normal(size=(64, 8)), jnp.float16)}

    def f(p, x):
        return jnp.matmul(x, p["w"], preferred_element_type=jnp.float32)

    plan = fewbit.plan(f, rules, params, x)
    stats = fewbit.calibrate(f, plan, params, [x])
    q = fewbit.quantize_params(params, plan, stats)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(q.act_scales)} == {"float32"}
    out = fewbit.quantize_model(f, fewbit.PtqProvider(rules))(q, x)
    exact = np.asarray(x, np.float64) @ np.asarray(params["w"], np.float64)
    assert relative(out, exact) < 0.02


def static(method="absmax", qtype="int8", **fields):
    common = dict(weight_qtype=qtype, act_qtype=qtype, act_static_scale=True)
    return [QuantizationRule(**common, act_calibration_method=method, **fields)]


def product(p, x):
    return x @ p["w"]


def static_case(size, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 64)) * size, dtype)
    return {"w": jnp.asarray(rng.normal(size=(64, 8)), dtype)}, x


@pytest.mark.parametrize("method", ["absmax", "minmax", "percentile,99"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e-20, 1e-30])
def test_static_ranges_too_small_for_a_scale_are_refused(size, dtype, method):
    params, x = static_case(size, dtype)
    rules = static(method)
    with pytest.raises(ValueError) as found:
        fewbit.calibrate(product, rules, params, [x])
    for sentence in (
        "All values seen at w:dot_general0 lhs are so small (at most ",
        "all of them would become zeros, with a dynamic range too. Calibrate on real inputs.",
        "or keep activations float there: a rule of its own without act_qtype.",
    ):
        assert sentence in str(found.value)
    plan = fewbit.plan(product, rules, params, x)
    with pytest.warns(UserWarning, match="All values seen at w:dot_general0 lhs are so small"):
        stats = fewbit.calibrate(product, plan, params, [x], strict=False)
    # As statistics that training collected, or that come from a file.
    with pytest.warns(UserWarning, match=r"dot_general0_lhs: the numbers of 1 of 1 scales become"):
        q = fewbit.quantize_params(params, plan, stats)
    out = fewbit.quantize_model(product, fewbit.PtqProvider(rules))(q, x)
    assert np.abs(np.asarray(out, np.float64)).max() < size


@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_static_ranges_that_are_small_but_have_a_scale(dtype, qtype):
    params, x = static_case(1e-15, dtype)
    rules = static(qtype=qtype)
    plan = fewbit.plan(product, rules, params, x)
    q = fewbit.quantize_params(params, plan, fewbit.calibrate(product, plan, params, [x]))
    exact = np.asarray(x, np.float64) @ np.asarray(params["w"], np.float64)
    out = fewbit.quantize_model(product, fewbit.PtqProvider(rules))(q, x)
    assert relative(out, exact) < (0.25 if qtype == "int4" else 0.06)


def test_one_tiny_layer_of_a_scan_is_refused_and_one_tiny_channel_is_told():
    params, x = static_case(1.0, "float32")
    stack = {"w": jnp.stack([jnp.eye(64), jnp.eye(64)])}

    def layers(p, x):
        return jax.lax.scan(lambda h, w: (h * 1e-25, h @ w), x, p["w"])[1]

    with pytest.raises(ValueError, match="All values seen at .* are so small"):
        fewbit.calibrate(layers, static(), stack, [x])
    rules = static(tile_size=32)
    x = x.at[:, :32].multiply(1e-25)
    plan = fewbit.plan(product, rules, params, x)
    stats = fewbit.calibrate(product, plan, params, [x])
    with pytest.warns(UserWarning, match=r"_lhs: the numbers of \d+ of \d+ scales become zeros"):
        fewbit.quantize_params(params, plan, stats)


@pytest.mark.parametrize("bwd", [None, "int8", "float8_e5m2"])
def test_gradients_of_small_float16_activations(bwd):
    rule = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 8)), jnp.float16)}

    def gradient(size):
        x = jnp.asarray(rng.normal(size=(16, 64)) * size, jnp.float16)

        def loss(p, x):
            return jnp.sum(jnp.square(x @ p["w"]).astype(jnp.float32)) / size**2

        model = fewbit.quantize_model(loss, fewbit.QtProvider([rule]))
        got = jax.grad(lambda w: model({"w": w}, x))(params["w"].astype(jnp.float16))
        wide, w = np.asarray(x, np.float64), np.asarray(params["w"], np.float64)
        return relative(got, 2 * wide.T @ (wide @ w) / size**2)

    assert gradient(1e-2) < 0.1 + (0.15 if bwd == "float8_e5m2" else 0)


def test_what_was_asked_for_stays_float16():
    how = HowToQuantize(qtype="int8", scale_dtype="float16")
    q = quantize_with(jnp.ones((4, 4), jnp.float16), how)
    assert q.scale.dtype == q.dtype == jnp.float16
    assert fewbit.planning._rows.stored_bytes((64, 64), how, "float16") == 64 * 64 + 2
    plain = how.replace(scale_dtype=None)
    assert fewbit.planning._rows.stored_bytes((64, 64), plain, "float16") == 64 * 64 + 4
