"""Calibration methods: their language, ranges, the scales made from them, their statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from fewbit.calibration._statistics import SimpleMovingAverage
from fewbit.qarray import HowToQuantize, dequantize, quantize, quantize_with_scale_zero_point
from fewbit.qarray._how import Method, check_method, parse_method
from fewbit.qarray._ranges import calibrate, compute_scale_zero_point, compute_scales


def normal(shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def test_language():
    assert parse_method("ABSMAX") == Method("absmax", (1.0,))
    assert parse_method(" minmax , 0.9 ") == Method("minmax", (0.9,))
    assert parse_method("fixed,-1,3").asymmetric and not parse_method("fixed,-3,3").asymmetric
    assert parse_method("fixed,3").per_tensor
    assert parse_method("mse,7").args == (7.0,)
    assert parse_method("absmax,0.9").clips and not parse_method("absmax").clips


@pytest.mark.parametrize(
    "text, message",
    [
        ("msee", "Unsupported calibration: msee. Did you mean 'mse'"),
        ("absmin", "Unsupported calibration: absmin. Did you mean 'absmax'"),
        ("rms", "A scale factor is required for RMS calibration. Write 'rms,<factor>'"),
        ("fixed", "A fixed range is required for fixed calibration."),
        ("fixed,1,3", r"The range must contain 0 and be non-empty. 'fixed,1,3' means \[1, 3\]"),
        ("fixed,0", "The range must contain 0 and be non-empty."),
        ("percentile", "A percentile in"),
        ("percentile,101", "A percentile in"),
        ("mse,0", "whole number"),
        ("absmax,x", "must be numbers"),
        ("absmax,1,2", "2 numbers after the name"),
        ("absmax,-1", "must be positive"),
        ("absmax,nan", "finite"),
    ],
)
def test_mistakes_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_types_refuse_what_they_cannot_express():
    check_method("minmax", "int3")
    for bad in ("float8_e4m3fn", "nf4", "mxfp4", "int1"):
        with pytest.raises(ValueError, match="doesn't support asymmetric quantization"):
            check_method("minmax", bad)
    with pytest.raises(ValueError, match="doesn't support symmetric"):
        check_method("absmax", "uint8")
    with pytest.raises(ValueError, match="Format mxfp4 needs a scale for each tile of 32"):
        check_method("fixed,3", "mxfp4")
    with pytest.raises(ValueError, match="Refuse to quantize: int32"):
        calibrate(jnp.ones(4, jnp.int32), HowToQuantize(qtype="int8"))


@pytest.mark.parametrize("tile", [4, 5, 1 / 3])
def test_ranges_per_tile(tile):
    x = normal((3, 12)) + 0.3
    size = round(12 * tile) if isinstance(tile, float) else tile
    cuts = [np.asarray(x)[:, at : at + size] for at in range(0, 12, size)]

    def expect(method, fn):
        how = HowToQuantize(
            qtype="int8", channelwise_axes=(0,), tiled_axes={1: tile}, calibration_method=method
        )
        got = calibrate(x, how)
        want = np.stack([fn(c.astype(np.float64)) for c in cuts], axis=1)
        for key, value in got.items():
            col = {"absmax": 0, "min": 0, "max": 1}[key]
            wanted = want if want.ndim == 2 else want[..., col]
            np.testing.assert_allclose(value, wanted, rtol=1e-6)

    expect("absmax,0.5", lambda c: 0.5 * np.abs(c).max(1))
    expect("rms,3", lambda c: 3 * np.sqrt((c**2).mean(1)))
    expect("percentile,75", lambda c: np.percentile(np.abs(c), 75, axis=1))
    expect("minmax", lambda c: np.stack([np.minimum(c.min(1), 0), np.maximum(c.max(1), 0)], -1))


def test_fixed_is_per_tensor():
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="fixed,-1,3")
    got = calibrate(normal((4, 8), jnp.bfloat16), how)
    assert got["min"].shape == got["max"].shape == (1, 1)
    assert got["min"].dtype == jnp.bfloat16


def test_scale_of_nothing_is_one():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        zero = {"absmax": jnp.zeros((1, 2), dtype)}
        assert compute_scale_zero_point(zero, "int8")[0].tolist() == [[1.0, 1.0]]
    tiny = {"absmax": jnp.array([1e-30])}
    assert compute_scale_zero_point(tiny, "int8")[0].tolist() == [1.0]
    assert compute_scale_zero_point({"absmax": jnp.zeros(1)}, "int1")[0].tolist() == [0.0]


def test_small_float16_weights_survive():
    x = (normal((64, 8)) * 0.01).astype(jnp.float16)
    for scale_dtype in (None, "float16", "float32"):
        back = dequantize(quantize(x, "int8", channelwise_axes=(1,), scale_dtype=scale_dtype))
        error = jnp.abs(back.astype(jnp.float32) - x.astype(jnp.float32)).max()
        assert float(error) < 2e-4


def test_scale_is_stored_as_it_is_used():
    how = HowToQuantize(qtype="int4", tiled_axes={0: 32}, scale_dtype="float16")
    scale, _ = compute_scale_zero_point(calibrate(normal((64, 1)), how), "int4", "float16")
    assert scale.dtype == jnp.float16


def test_zero_point_of_a_ramp():
    x = jnp.arange(256) / 255
    q = quantize(x, "int8", calibration_method="minmax")
    np.testing.assert_array_equal(q.qvalue, np.arange(-128, 128))
    assert q.zero_point.tolist() == [-128] and q.zero_point.dtype == jnp.int8
    np.testing.assert_allclose(dequantize(q), x, atol=1e-7)
    shaken = x + 1e-7 * normal((256,))
    again = quantize(shaken, "int8", calibration_method="minmax")
    np.testing.assert_array_equal(again.qvalue, q.qvalue)
    np.testing.assert_allclose(dequantize(again), x, atol=1e-6)


@pytest.mark.parametrize("name", ["int4", "int2", "int3", "nf4", "fp4", "mxfp4", "int8", "fp8"])
@pytest.mark.parametrize("scale_dtype", [None, "float16"])
def test_mse_never_loses_to_absmax(name, scale_dtype):
    x = normal((64, 16)) * jnp.exp(normal((1, 16), seed=1))
    kwargs = dict(channelwise_axes=(1,), tiled_axes={0: 32})
    how = dict(scale_dtype=scale_dtype, **kwargs)

    def errors(method):
        back = dequantize(quantize(x, name, calibration_method=method, **how), jnp.float32)
        return np.asarray(jnp.square(back - x)).reshape(2, 32, 16).sum(1)

    base, best = errors("absmax"), errors("mse")
    assert (best <= base * (1 + 1e-6)).all()
    if name == "int4":
        assert best.sum() < tolerances.MSE_GAIN_INT4 * base.sum()


def test_mse_under_jit_vmap_and_uneven_tiles():
    x = normal((3, 40))
    fn = lambda x: dequantize(  # noqa: E731
        quantize(x, "int4", tiled_axes={0: 32}, calibration_method="mse,10")
    )
    together = jax.jit(jax.vmap(fn))(x)
    np.testing.assert_allclose(together, jnp.stack([fn(row) for row in x]), rtol=1e-6)
    assert jax.eval_shape(fn, jax.ShapeDtypeStruct((40,), jnp.bfloat16)).dtype == jnp.bfloat16


def test_mx_scales_are_powers_of_two():
    x = normal((4, 64)) * 10
    for name in ("mxfp8", "mxfp4"):
        scale = quantize(x, name, channelwise_axes=(0,), tiled_axes={1: 32}).scale
        assert scale.dtype == jnp.float8_e8m0fnu
        exponent = np.log2(np.asarray(scale, np.float64))
        np.testing.assert_array_equal(exponent, np.round(exponent))


@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 1e4])
def test_nvfp4_keeps_any_magnitude(magnitude):
    x = normal((8, 64)) * magnitude
    q = quantize(x, "nvfp4", channelwise_axes=(0,), tiled_axes={1: 16})
    assert q.scale.dtype == jnp.float8_e4m3fn
    assert q.tensor_scale.shape == (1, 1) and q.tensor_scale.dtype == jnp.float32
    assert 224 < float(jnp.max(q.scale.astype(jnp.float32))) <= 448
    assert np.log2(float(q.tensor_scale[0, 0])) % 1 == 0
    error = jnp.abs(dequantize(q) - x).mean() / jnp.abs(x).mean()
    assert float(error) < 0.1
    scale, _ = compute_scale_zero_point(
        calibrate(x, HowToQuantize(qtype="nvfp4", channelwise_axes=(0,), tiled_axes={1: 16})),
        "nvfp4",
    )
    again = quantize_with_scale_zero_point(x, "nvfp4", scale)
    np.testing.assert_array_equal(dequantize(again), dequantize(q))


def test_nvfp4_all_zero_and_one_zero_tile():
    x = jnp.zeros((1, 32)).at[0, 3].set(1e-5)
    for array in (x, jnp.zeros((1, 32))):
        q = quantize(array, "nvfp4", tiled_axes={1: 16})
        back = dequantize(q)
        assert bool(jnp.isfinite(back).all())
        np.testing.assert_array_equal(np.asarray(back) != 0, np.asarray(array) != 0)
    scale, zero_point, tensor = compute_scales({"absmax": jnp.zeros((1, 2))}, "nvfp4")
    assert zero_point is None and tensor.tolist() == [[1.0]] and (scale == 1).all()


def test_statistics():
    average = SimpleMovingAverage(bootstrap_steps=1)
    first = {"min": jnp.array([-1.0]), "max": jnp.array([2.0])}
    second = {"min": jnp.array([-3.0]), "max": jnp.array([1.0])}
    stat = average.init(first)
    assert stat["count"].dtype == jnp.int32 and int(stat["count"]) == 0
    stat = average.update(stat, first)
    assert average.get_calibration(stat, second)["min"].tolist() == [-3.0]  # still the default
    stat = jax.jit(average.update)(stat, second)
    assert set(stat) == {"count", "sum_of_min", "sum_of_max", "min_of_min", "max_of_max"}
    assert average.get_calibration(stat, first) == {"min": -2.0, "max": 1.5}
    assert average.get_calibration(stat, reduction="range") == {"min": -3.0, "max": 2.0}
    with pytest.raises(ValueError, match="Shape mismatch between"):
        average.update(stat, {"min": jnp.zeros(2), "max": jnp.zeros(2)})
    with pytest.raises(ValueError, match="no 'sum_of_absmax'"):
        average.update(stat, {"absmax": jnp.zeros(1)})
    bf16 = average.update(average.init(first), jax.tree.map(lambda x: x.astype("bfloat16"), first))
    assert bf16["sum_of_min"].dtype == jnp.float32
