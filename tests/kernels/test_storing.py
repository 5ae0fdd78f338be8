"""Big parameters quantized and packed slice by slice: the same bytes, without whole temporaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fewbit
from fewbit import kernels
from fewbit.kernels import _layouts
from fewbit.kernels._layouts import for_kernels, quantize_for_kernels
from fewbit.qarray import HowToQuantize, check_finite, quantize_with

needs_native = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

TABLE, KERNEL = (300, 96), (64, 520)  # vocabulary times width; rows times columns
CASES = {
    "table int8": (TABLE, "nk", dict(qtype="int8", channelwise_axes=(0,))),
    "table int4 in groups": (
        TABLE,
        "nk",
        dict(qtype="int4", channelwise_axes=(0,), tiled_axes={1: 32}, scale_dtype="float16"),
    ),
    "table nf4": (TABLE, "nk", dict(qtype="nf4", channelwise_axes=(0,), tiled_axes={1: 32})),
    "kernel int8": (KERNEL, "kn", dict(qtype="int8", channelwise_axes=(1,))),
    "kernel int3": (KERNEL, "kn", dict(qtype="int3", channelwise_axes=(1,))),
    "kernel fp8": (KERNEL, "kn", dict(qtype="float8_e4m3fn", channelwise_axes=(1,))),
    "kernel e5m2": (KERNEL, "kn", dict(qtype="float8_e5m2", channelwise_axes=(1,))),
    "one scale": (KERNEL, "kn", dict(qtype="int8")),
    "zero points": (
        KERNEL,
        "kn",
        dict(qtype="uint4", channelwise_axes=(1,), calibration_method="minmax"),
    ),
    "one zero point": (KERNEL, "kn", dict(qtype="uint8", calibration_method="minmax")),
    "fixed range": (
        KERNEL,
        "kn",
        dict(qtype="int8", channelwise_axes=(1,), calibration_method="fixed,-2,2"),
    ),
    "clipped": (
        KERNEL,
        "kn",
        dict(qtype="int4", channelwise_axes=(1,), calibration_method="absmax,0.7"),
    ),
    "mxfp4": (KERNEL, "kn", dict(qtype="mxfp4", channelwise_axes=(1,), tiled_axes={0: 32})),
    "nvfp4": (KERNEL, "kn", dict(qtype="nvfp4", channelwise_axes=(1,), tiled_axes={0: 16})),
    "share of an axis": (
        KERNEL,
        "kn",
        dict(qtype="int4", channelwise_axes=(1,), tiled_axes={0: 0.5}),
    ),
    "stack": ((7, 64, 96), "lkn", dict(qtype="int8", channelwise_axes=(0, 2))),
    "heads": ((64, 12, 24), "knn", dict(qtype="int8", channelwise_axes=(1, 2))),
    "heads of one scale each": ((64, 12, 64), "knn", dict(qtype="int8", channelwise_axes=(1,))),
    "output of heads": ((4, 32, 320), "kkn", dict(qtype="int8", channelwise_axes=(2,))),
    "convolution": ((3, 3, 32, 200), "kkcn", dict(qtype="int8", channelwise_axes=(3,))),
}


@pytest.fixture
def small_slices(monkeypatch):
    """Cut everything; and tell which cuts were made."""
    cuts = []
    real = _layouts._in_slices

    def spy(array, how, measured, cut):
        cuts.append(cut)
        return real(array, how, measured, cut)

    monkeypatch.setattr(_layouts, "SLICE_BYTES", 16384)
    monkeypatch.setattr(_layouts, "BIG", 1)
    monkeypatch.setattr(_layouts, "_in_slices", spy)
    return cuts


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@needs_native
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_slices_give_the_bytes_of_the_whole(name, dtype, small_slices):
    shape, roles, fields = CASES[name]
    how = HowToQuantize(**fields, roles=roles)
    array = normal(0, *shape).astype(dtype)
    found, scale = quantize_for_kernels(array, how)
    expected = quantize_with(array, how)
    assert small_slices and small_slices[0].length < shape[small_slices[0].axis]
    assert found.layout == "panels"
    assert_same(found, for_kernels(expected, how))
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(expected.scale))


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_a_program_that_closes_over_big_parameters(qtype, small_slices):
    """Values cannot be looked at, nor where they will live: plain codes, as of traced arrays."""
    f = lambda params, x: x @ params["w"]  # noqa: E731
    rules, params = [fewbit.QuantizationRule(weight_qtype=qtype)], {"w": normal(0, *KERNEL)}
    plan = fewbit.plan(f, rules, params, normal(1, 2, KERNEL[0]))
    wanted = fewbit.unpack(fewbit.quantize_params(params, plan))
    for args in ((), (params,)):
        make = lambda tree=params: fewbit.quantize_params(tree, plan)  # noqa: E731
        found = jax.jit(make)(*args)
        assert found["w"].array.layout == "plain"
        assert_same(found, wanted)
        assert jax.eval_shape(make, *args) == jax.eval_shape(lambda: wanted)
    assert bool(small_slices) == kernels.native_available()


@needs_native
@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn"])
def test_one_scale_kept_once_per_channel(qtype, small_slices):
    how = HowToQuantize(qtype=qtype, channelwise_axes=(0,), roles="nk")
    array = normal(0, *TABLE)
    found, scale = quantize_for_kernels(array, how, how.replace(channelwise_axes=()))
    one = quantize_with(array, HowToQuantize(qtype=qtype))
    assert small_slices
    assert scale.shape == (300, 1)
    assert_same(found, for_kernels(one.replace(scale=jnp.broadcast_to(one.scale, (300, 1))), how))


@needs_native
@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(
    columns=st.integers(129, 700),
    rows=st.sampled_from([32, 64, 96]),
    qtype=st.sampled_from(["int8", "int5", "int4", "float8_e4m3fn"]),
    turned=st.booleans(),
    slice_bytes=st.sampled_from([1, 20000, 60000]),
)
def test_any_number_of_columns(columns, rows, qtype, turned, slice_bytes):
    before = _layouts.SLICE_BYTES, _layouts.BIG
    _layouts.SLICE_BYTES, _layouts.BIG = slice_bytes, 1
    try:
        shape, axis = ((columns, rows), 0) if turned else ((rows, columns), 1)
        how = HowToQuantize(qtype=qtype, channelwise_axes=(axis,), roles="nk" if turned else "kn")
        array = normal(0, *shape)
        found, _ = quantize_for_kernels(array, how)
        assert_same(found, for_kernels(quantize_with(array, how), how))
    finally:
        _layouts.SLICE_BYTES, _layouts.BIG = before


@needs_native
@pytest.mark.parametrize("fields", [{}, {"channelwise_axes": (0,)}])
def test_the_temporary_is_a_slice(fields):
    how = HowToQuantize(qtype="int8", **fields, roles="nk")
    table = jax.ShapeDtypeStruct((65536, 256), jnp.float32)  # 64 MB
    cut = min(_layouts._cuts(table.shape, "nk", 4), key=lambda cut: cut.length)
    compiled = _layouts._in_slices.lower(table, how, how, cut).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * _layouts.SLICE_BYTES


@needs_native
@pytest.mark.parametrize("method", ["rms,3", "mse", "percentile,99"])
def test_a_range_that_depends_on_the_order_is_taken_whole(method, small_slices):
    how = HowToQuantize(qtype="int8", channelwise_axes=(1,), calibration_method=method, roles="kn")
    array = normal(0, *KERNEL)
    found, _ = quantize_for_kernels(array, how)
    assert not small_slices
    assert_same(found, for_kernels(quantize_with(array, how), how))


@needs_native
def test_an_array_on_several_devices_is_not_cut(small_slices):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    array = jax.device_put(normal(0, *(64, 256)), NamedSharding(mesh, PartitionSpec(None, "x")))
    how = HowToQuantize(qtype="int8", channelwise_axes=(1,), roles="kn")
    found, _ = quantize_for_kernels(array, how)
    assert not small_slices
    assert len(found.data.devices()) == 2


def test_without_kernels_the_codes_stay_plain(small_slices, monkeypatch):
    monkeypatch.setattr("fewbit.kernels._layouts.native_available", lambda: False)
    how = HowToQuantize(qtype="int8", channelwise_axes=(1,), roles="kn")
    found, _ = quantize_for_kernels(normal(0, *KERNEL), how)
    assert found.layout == "plain" and not small_slices


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sum_that_overflows_is_not_infinity(dtype):
    most = float(jnp.finfo(dtype).max)
    check_finite(jnp.full((1000,), most, dtype), "w")
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        with pytest.raises(ValueError, match=r"w holds 1 value that is NaN or infinite"):
            check_finite(jnp.ones((1000,), dtype).at[7].set(bad), "w")
    both = jnp.ones((1000,), dtype).at[7].set(jnp.inf).at[8].set(-jnp.inf)
    with pytest.raises(ValueError, match=r"w holds 2 values that are .* index \(7,\): inf"):
        check_finite(both, "w")
