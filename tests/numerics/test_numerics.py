"""The format table, its names and errors, and rounding to codes, for every format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from oracles import arrays as oracle

from fewbit import numerics
from fewbit.numerics import FORMATS, canonical_qtype, convert_from, convert_to, format_of
from fewbit.numerics._bits import to_bit_patterns

ALL = sorted(FORMATS)


def test_spellings_meet_in_one_type():
    assert canonical_qtype(jnp.int8) == canonical_qtype("INT8") == np.dtype("int8")
    assert isinstance(canonical_qtype("int8"), np.dtype)
    assert canonical_qtype("fp8") == canonical_qtype(jnp.float8_e4m3fn) == jnp.float8_e4m3fn
    assert canonical_qtype("fp8_e5m2") == canonical_qtype("e5m2") == jnp.float8_e5m2
    assert canonical_qtype("fp4") == jnp.float4_e2m1fn
    for name in ("int1", "int2", "int3", "int5", "nf4", "mxfp4", "mxfp8_16", "nvfp4"):
        assert canonical_qtype(name.upper()) == name and isinstance(canonical_qtype(name), str)
    assert canonical_qtype(jnp.int2) == "int2"


@pytest.mark.parametrize("name", ALL)
def test_every_name_is_canonical_twice(name):
    assert canonical_qtype(canonical_qtype(name)) == canonical_qtype(name)
    assert numerics.qtype_name(canonical_qtype(name)) == name


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"data type 'fp6' not understood.*Did you mean.*fp8"):
        canonical_qtype("fp6")
    with pytest.raises(ValueError, match="data type 'nf5' not understood.*'nf4'"):
        canonical_qtype("nf5")
    with pytest.raises(ValueError, match="Cannot use float32 as qtype.*do not quantize"):
        canonical_qtype(jnp.float32)
    with pytest.raises(ValueError, match="Cannot use float64 as qtype"):
        canonical_qtype("float64")
    with pytest.raises(ValueError, match="Cannot use None as qtype"):
        canonical_qtype(None)
    with pytest.raises(ValueError, match="Cannot use 3 as qtype"):
        canonical_qtype(3)


def test_bounds():
    bounds = {"int8": 127.5, "int4": 7.5, "int16": 32768, "int2": 1.5, "int7": 63.5, "nf4": 1.0}
    bounds |= {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float4_e2m1fn": 6, "mxfp4": 6}
    for name, bound in bounds.items():
        assert numerics.get_symmetric_bound(name) == bound
    assert numerics.get_asymmetric_bound("int3") == (-4, 3)
    with pytest.raises(ValueError, match="nf4 doesn't support asymmetric quantization.*int8"):
        numerics.get_asymmetric_bound("nf4")
    with pytest.raises(ValueError, match="uint8 doesn't support symmetric.*'minmax', or int8"):
        numerics.get_symmetric_bound("uint8")


def test_true_bits():
    assert numerics.bits_per_weight("int4") == 4
    assert numerics.bits_per_weight("int3", tile=32, scale_dtype="float16") == 3.5
    assert numerics.bits_per_weight("int4", 32, "float16", zero_point=True) == 4.625
    assert numerics.bits_per_weight("mxfp4") == 4.25
    assert numerics.bits_per_weight("nvfp4") == 4.5


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_are_the_nearest_numbers(name, dtype):
    bound = FORMATS[name].bound or 255.0
    span = min(bound * 1.1, 60000.0)
    x = jnp.linspace(-span, span, 500).astype(dtype)
    x = jnp.concatenate([x, jnp.array([0.0, 0.5, 1.5, 2.5, -0.5, -1.5], dtype)])
    numbers = oracle.grid(name)
    if name == "int16":
        numbers = [float(n) for n in range(-32768, 32768)]
        x = jnp.array([-33000, -1.5, 0.5, 2.5, 1000, 32767, 40000], jnp.float32).astype(dtype)
    codes = jax.jit(lambda x: convert_to(x, name))(x)
    assert codes.dtype == FORMATS[name].storage
    got = np.asarray(jax.jit(lambda c: convert_from(c, name))(codes), np.float64)
    numbers = np.asarray(numbers)
    exact = np.asarray(x, np.float64)
    if name == "int1":
        expected = np.where(exact < 0, -1.0, 1.0)
    elif name == "int16":
        expected = np.clip(np.round(exact), -32768, 32767)
    else:
        expected = np.array([oracle.nearest(v, numbers.tolist(), name) for v in exact])
    near_tie = np.zeros(len(exact), bool)
    if name == "nf4":  # table values are rounded to float32
        gaps = np.sort(np.abs(exact[:, None] - numbers[None]), axis=1)
        near_tie = gaps[:, 1] - gaps[:, 0] < 1e-6
    np.testing.assert_allclose(got[~near_tie], expected[~near_tie], rtol=tolerances.F32_ULP)


@pytest.mark.parametrize("name", ALL)
def test_eager_and_jit_agree_and_abstract_works(name):
    x = jnp.linspace(-3, 3, 64)
    eager, jitted = convert_to(x, name), jax.jit(lambda x: convert_to(x, name))(x)
    np.testing.assert_array_equal(
        np.asarray(convert_from(eager, name)), np.asarray(convert_from(jitted, name))
    )
    shape = jax.eval_shape(lambda x: convert_from(convert_to(x, name), name, "bfloat16"), x)
    assert shape.dtype == jnp.bfloat16
    assert jax.vmap(lambda x: convert_to(x, name))(x.reshape(4, 16)).shape == (4, 16)


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "int16", "float8_e4m3fn"])
def test_codes_saturate_where_a_sum_takes_them_at_once(name):
    """A compiler may drop a cast and the one back; the sum is large enough to be one kernel."""
    x = jax.random.normal(jax.random.key(0), (20_000,)) * 1e5
    codes = np.asarray(convert_to(x, name)).astype(np.float64)
    found = jax.jit(lambda x: jnp.sum(jnp.square(convert_from(convert_to(x, name), name))))(x)
    np.testing.assert_allclose(found, np.sum(codes**2), rtol=1e-3)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_beside_a_tie_are_rounded_once(name):
    """Where XLA looks at a cast's bits in the same kernel it may cast by way of another type."""
    storage = format_of(name).storage
    codes = np.arange(2 ** (jnp.finfo(storage).bits - 1), dtype=np.uint8).view(storage)
    values = np.unique(codes.astype(np.float32)[np.isfinite(codes.astype(np.float32))])
    ties = (values[1:] + values[:-1]) / 2
    numbers = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, 1e9)])
    numbers = np.concatenate([numbers, -numbers]).astype(np.float32)
    wanted = numbers.astype(storage).view(np.uint8)
    bits = jax.jit(lambda x: to_bit_patterns(convert_to(x, name), jnp.finfo(storage).bits))
    np.testing.assert_array_equal(bits(numbers), wanted & (2 ** jnp.finfo(storage).bits - 1))
    looped = jax.jit(lambda x: jax.lax.map(bits, x.reshape(2, -1)).reshape(-1))
    np.testing.assert_array_equal(looped(numbers), bits(numbers))
    np.testing.assert_array_equal(np.asarray(convert_to(numbers, name)).view(np.uint8), wanted)


def test_scale_types_decode_under_jit():
    for dtype in ("float8_e8m0fnu", "float8_e4m3fn"):
        x = jnp.array([0.5, 2.0, 64.0]).astype(dtype)
        decoded = jax.jit(lambda x: x.astype(jnp.float32))(x)
        np.testing.assert_array_equal(decoded, [0.5, 2.0, 64.0])


def test_nf4_first_on_ties():
    values = np.asarray(oracle.NF4)
    middle = jnp.asarray((values[:-1] + values[1:]) / 2, jnp.float32)
    codes = numerics.fp_to_nf4(jnp.nextafter(middle, jnp.full_like(middle, -2)))
    np.testing.assert_array_equal(np.asarray(codes).astype(int), np.arange(15))
    assert int(numerics.fp_to_nf4(jnp.array([(0.0 + 0.07958029955625534) / 2]))[0]) == 7
    np.testing.assert_array_equal(
        np.asarray(numerics.fp_to_nf4(numerics.get_nf4_buckets())).astype(int), np.arange(16)
    )


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "fp8", "e5m2", "fp4", "nf4", "int1"])
def test_stochastic_rounding_is_unbiased(name):
    x = jnp.array([0.03, 0.3, -0.45, 0.7, 0.95, -0.9])
    wide = jnp.broadcast_to(x[:, None], (6, 4096))
    key = jax.random.key(0)
    noise = lambda shape: jax.random.uniform(key, shape, minval=-0.5, maxval=0.5)  # noqa: E731
    numbers = np.asarray(convert_from(convert_to(wide, name, noise), name), np.float64)
    assert all(len(set(row)) <= 2 for row in numbers.tolist())
    step = max(row.max() - row.min() for row in numbers)
    assert np.abs(numbers.mean(1) - np.asarray(x)).max() < tolerances.STOCHASTIC_MEAN * step


def test_noise_broadcasts():
    x = jnp.full((4, 3), 0.5)
    codes = convert_to(x, "int8", lambda shape: jnp.full((shape[0], 1), 0.25))
    np.testing.assert_array_equal(codes, np.ones((4, 3)))


def test_only_real_floats_are_quantized():
    assert all(map(numerics.should_quantize, ("bfloat16", "float16", "float32", "float64")))
    assert not any(map(numerics.should_quantize, ("int32", "float8_e4m3fn", "bool", "complex64")))
