"""The native g · Wᵀ against float64, on every format, shape and instruction set."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_native_matmul as forward
from jax.sharding import NamedSharding, PartitionSpec
from test_native_matmul import BOUND, EACH_GROUP, FORMATS, LEVELS, Weight, normal

import fewbit
from fewbit import kernels, ops
from fewbit.kernels._matmul import matmul
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"native part: {kernels.info().missing}"
)

# Columns in several pieces; rows in several blocks because k has few; k that do not fill a strip.
LARGE = ((70, 1300, 5), (33, 64, 300), (200, 600, 13), (49, 1300, 65), (130, 600, 70))


def back(weight, g, out="float32", layer=0, factor=1.0):
    return matmul(
        jnp.asarray(g),
        weight.data,
        weight.scale,
        weight.zero,
        np.float32(factor),
        np.int32(layer),
        np.zeros((0,), np.float32),
        qtype=weight.name,
        k=weight.k,
        n=weight.n,
        group=weight.group,
        transposed=True,
        out_dtype=out,
    )


def check(result, g, weight, more=0.0):
    """Within the bound of the float64 product; `more` for the rounding of a 16-bit result."""
    g = np.asarray(g, np.float64)
    want, size = g @ weight.values.T, np.abs(g) @ np.abs(weight.values.T)
    got = np.asarray(result, np.float64)
    assert got.shape == want.shape
    error = np.abs(got - want) - BOUND * size - more * np.abs(want)
    assert error.size == 0 or error.max() <= 0, (weight.name, g.shape, weight.k, weight.group)


def check_format(name, group, shape, rows, scale_dtype, zero):
    weight = Weight(name, *shape, group, scale_dtype, zero)
    g = normal((rows, weight.n))
    check(back(weight, g), g, weight)


@pytest.mark.parametrize("group", EACH_GROUP)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_group(name, group):
    for case in forward.cases(name, group):
        check_format(name, group, *case)


@pytest.mark.parametrize("name", ["int8", "int3", "nf4", "float8_e5m2"])
def test_many_columns_and_many_rows(name):
    for i, (k, n, rows) in enumerate(LARGE):
        check_format(name, (0, 16, 32)[i % 3], (k, n), rows, "float16", name == "int3")


@pytest.mark.parametrize("rows", range(1, 15))
def test_every_height_of_a_tile(rows):
    check_format("int4", 32, (65, 130), rows, "float16", True)
    check_format("nf4", 16, (65, 130), rows, "float16", False)


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "float8_e4m3fn"])
def test_bfloat16(name, rows):
    weight = Weight(name, 320, 70, 32, "float16")
    g = normal((rows, 70), ml_dtypes.bfloat16)
    check(back(weight, g), g, weight)
    check(back(weight, g, out="bfloat16"), g, weight, more=2.0**-8)
    check(back(weight, g.astype(np.float32), out="bfloat16"), g, weight, more=2.0**-8)


def test_a_result_has_the_factor_of_the_whole_tensor():
    weight = Weight("float4_e2m1fn", 96, 70, 16, "float8_e4m3fn")
    for rows in (1, 9):
        g = normal((rows, 70))
        plain, scaled = back(weight, g), back(weight, g, factor=2.0**-9)
        np.testing.assert_array_equal(np.asarray(plain) * np.float32(2.0**-9), scaled)


def test_subnormal_numbers_count():
    weight = Weight("float8_e4m3fn", 64, 64, 32, "float8_e8m0fnu")
    codes = (np.arange(64 * 64).reshape(64, 64) % 8).astype(np.uint8)
    exponents = np.arange(2 * 64, dtype=np.uint8).reshape(weight.scale.shape)  # from 2^-127
    weight.data = forward.pack(codes, weight.name)
    weight.scale = exponents.view(weight.scale.dtype)
    every = np.arange(64) // 32
    weight.values = forward.values_of(codes, weight.name)
    weight.values = weight.values * weight.scale[0].astype(np.float64)[every]
    for rows in (1, 9):
        g = normal((rows, 64)) * np.float32(2.0**60)
        check(jax.jit(functools.partial(back, weight))(g), g, weight)


def test_layers_of_a_stack():
    one, two = Weight("int4", 96, 70, 32, seed=1), Weight("int4", 96, 70, 32, seed=2)
    stack = Weight("int4", 96, 70, 32)
    stack.data = np.stack([one.data, two.data, one.data, two.data]).reshape(2, 2, *one.data.shape)
    stack.scale = np.stack([one.scale, two.scale] * 2).reshape(2, 2, *one.scale.shape)
    for rows in (2, 9):
        g = normal((rows, 70))
        for layer in range(4):
            np.testing.assert_array_equal(
                back(stack, g, layer=layer), back((one, two)[layer % 2], g)
            )
    for layer in (-1, 4):
        with pytest.raises(Exception, match=f"layer {layer} is not one of the 4"):
            back(stack, g, layer=layer).block_until_ready()


@pytest.mark.parametrize("name", ["int8", "nf4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad, name):
    weight = Weight(name, 70, 96, 32)
    for rows in (3, 9):
        g = normal((rows, 96))
        g[1, 40] = bad
        result = np.asarray(back(weight, g))
        with np.errstate(invalid="ignore"):
            want = g.astype(np.float64) @ weight.values.T
        np.testing.assert_array_equal(result[1], want[1])  # infinite, or NaN where a weight is 0
        assert np.isfinite(np.delete(result, 1, 0)).all()


def test_empty_products():
    assert back(Weight("int8", 32, 5), np.zeros((0, 5), np.float32)).shape == (0, 32)
    weight = Weight("int8", 32, 64)
    weight.n, weight.data, weight.scale = 0, weight.data[:0], weight.scale[:0]
    for rows, out in ((1, "float32"), (9, "bfloat16")):
        np.testing.assert_array_equal(back(weight, np.zeros((rows, 0), np.float32), out=out), 0)
    weight = Weight("int8", 32, 64)
    weight.k, weight.data = 0, weight.data[:, :0]
    assert back(weight, np.zeros((2, 64), np.float32)).shape == (2, 0)


def test_many_threads():
    weight = Weight("int4", 512, 1024, 32)
    calls = [functools.partial(back, weight, normal((rows, 1024))) for rows in (1, 48)]
    want = [np.asarray(call()) for call in calls]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: np.asarray(calls[i % 2]()), range(32)))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, want[i % 2])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=normal((3, 96))), r"x must be \[rows, n=70\] but has the shape \[3,96\]"),
        (dict(x=np.ones((3, 70), np.int8)), "x must be float32 or bfloat16"),
        (dict(x=normal((3, 70), np.float16)), "x must be float32 or bfloat16"),
        (dict(x=normal((3, 70, 1))), "x must have two axes"),
        (dict(data=np.zeros((2, 3, 4, 64, 4), np.uint8)), r"data must have the shape \[2,3,8,64,4"),
        (dict(scale=np.ones((2, 3, 64), np.float32)), r"scale must have the shape \[2,1,64\]"),
        (dict(zero=np.zeros((1, 1, 64), np.uint8)), r"zero must have the shape \[2,1,64\]"),
        (dict(layer=np.int32(1)), "layer 1 is not one of the 1"),
        (dict(act_scale=np.ones((3, 1), np.float32)), "act_scale belongs to int8 x"),
        (dict(act="dynamic"), "a transposed product has float x: act must be 0"),
        (dict(out_dtype="int32"), "the result must be float32 or bfloat16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_read(change, message):
    weight = Weight("int8", 96, 70)
    arguments = dict(
        x=normal((3, 70)),
        data=weight.data,
        scale=weight.scale,
        zero=weight.zero,
        tensor_scale=np.float32(1),
        layer=np.int32(0),
        act_scale=np.zeros((0,), np.float32),
    )
    static = dict(qtype="int8", k=96, n=70, group=0, transposed=True, out_dtype="float32")
    arguments |= {key: value for key, value in change.items() if key in arguments}
    static |= {key: value for key, value in change.items() if key not in arguments}
    with pytest.raises(Exception, match=message):
        jax.jit(functools.partial(matmul, **static))(**arguments).block_until_ready()


def test_a_result_of_another_shape_is_refused():
    weight = Weight("int8", 96, 70)
    call = jax.ffi.ffi_call("fewbit_matmul", jax.ShapeDtypeStruct((3, 95), jnp.float32))
    static = dict(k=np.int64(96), n=np.int64(70), group=np.int64(0), act=np.int64(0))
    with pytest.raises(Exception, match=r"the result must be \[3,96\] but has the shape \[3,95\]"):
        call(
            normal((3, 70)), weight.data, weight.scale, weight.zero, np.float32(1), np.int32(0),
            np.zeros((0,), np.float32), np.zeros((0,), np.float32), format="int8",
            act_tile=np.int64(0), transposed=True, activation="none", **static,
        ).block_until_ready()  # fmt: skip


# --- gradients ------------------------------------------------------------------------------------


def model(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


RULES = {
    "int8": dict(weight_qtype="int8", act_qtype="int8"),
    "int4": dict(weight_qtype="int4", tile_size=32, scale_dtype="float16"),
    "nf4": dict(weight_qtype="nf4", tile_size=64),
    "nvfp4": dict(weight_qtype="nvfp4"),
}


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_of_a_quantized_model_is_native(name):
    params = {"up": 0.1 * normal((128, 256)), "down": 0.1 * normal((256, 192))}
    x = jnp.asarray(normal((5, 128)))
    rules = [fewbit.QuantizationRule(**RULES[name])]
    stored = fewbit.quantize_params(params, fewbit.plan(model, rules, params, x))
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules))

    def gradient(params, x):
        return jax.grad(lambda x: jnp.sum(quantized(params, x) ** 2))(x)

    text = jax.jit(gradient).lower(stored, x).as_text()
    assert text.count("transposed = true") == 2 and text.count("transposed = false") == 2
    got, want = gradient(stored, x), gradient(fewbit.unpack(stored), x)
    # With int8 activations a difference in the last place may turn a code.
    tolerance = (2e-2 if name == "int8" else 1e-5) * float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def test_devices_share_the_rows_of_a_gradient():
    q = fewbit.quantize(jnp.asarray(normal((128, 256))), "int8", channelwise_axes=(1,))
    weight = to_panels(q.with_dtype("float32"), "kn")
    g = normal((16, 256))

    def pull(g, weight):
        return jax.vjp(lambda x: ops.dot(x, weight), jnp.zeros((16, 128)))[1](g)[0]

    mesh = jax.make_mesh((8,), ("x",))
    there = jax.device_put(g, NamedSharding(mesh, PartitionSpec("x")))
    everywhere = jax.device_put(weight, NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(pull).lower(there, everywhere).compile()
    assert "all-gather" not in compiled.as_text() and "fewbit_matmul" in compiled.as_text()
    out = compiled(there, everywhere)
    assert out.sharding.spec[0] == "x"
    # Two rows each are summed in another order than sixteen.
    exact = g.astype(np.float64) @ np.asarray(fewbit.dequantize(q), np.float64).T
    np.testing.assert_allclose(out, exact, rtol=0, atol=BOUND * float(np.abs(exact).max()))


SWEEP = """
from fewbit import kernels
import test_native_transposed as t
assert kernels.native_available(), kernels.info()
print(kernels.info().isa)
for name in t.FORMATS:
    for group in (16, 32) if name == 'nf4' else (0, 32):
        for case in t.forward.cases(name, group):
            t.check_format(name, group, *case)
t.test_many_columns_and_many_rows('int3')
t.test_subnormal_numbers_count()
"""


@pytest.mark.parametrize("isa", LEVELS[LEVELS.index(kernels.info().isa) + 1 :])
def test_the_instruction_sets_below_this_cpu(isa):
    assert forward.in_a_process(SWEEP, FEWBIT_ISA=isa).split() == [isa]
