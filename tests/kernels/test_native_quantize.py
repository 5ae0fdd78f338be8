"""Operands quantized on the way to a product: the codes and scales of `fewbit.quantize`."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from machines import PATHS

from fewbit import kernels, ops
from fewbit.kernels import _quantize
from fewbit.kernels._quantize import quantize_int8_p, quantize_natively
from fewbit.qarray import HowToQuantize, quantize_with

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

# Shape, and the axes that share a scale (first, last).
CASES = [
    ((70, 100), (1, 2)),
    ((70, 100), (0, 1)),
    ((70, 100), (0, 2)),
    ((100, 700), (0, 1)),
    ((3, 50, 4, 20), (3, 4)),
    ((3, 50, 4, 20), (1, 2)),
    ((3, 50, 4, 20), (1, 3)),
    ((2, 1, 5000), (1, 3)),
    ((5000,), (0, 1)),
    ((300, 33), (0, 1)),
    ((200, 257), (0, 1)),
]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def how_of(shape, axes):
    own = [a for a in range(len(shape)) if not axes[0] <= a < axes[1]]
    return HowToQuantize(qtype="int8", channelwise_axes=own)


def compare(x, axes):
    want = quantize_with(x, how_of(x.shape, axes))
    got = quantize_natively(jnp.asarray(x), how_of(x.shape, axes))
    assert got is not None and got.qtype == want.qtype and got.dtype == want.dtype
    np.testing.assert_array_equal(got.qvalue, want.qvalue)
    np.testing.assert_array_equal(got.scale, want.scale)


def check_all():
    for number, (shape, axes) in enumerate(CASES):
        compare(normal(*shape, seed=number) * np.float32(10.0 ** (number % 7 - 3)), axes)


def test_codes_and_scales_are_those_of_quantize():
    check_all()
    for seed in range(10):
        for axes in ((0, 1), (1, 2)):
            compare(normal(64, 128, seed=seed), axes)
    x = normal(64, 128)
    x[3], x[:, 5], x[7, 0] = 0.0, 0.0, -0.0
    x[9] *= np.float32(1e-25)
    x[:, 11] *= np.float32(1e25)
    for axes in ((0, 1), (1, 2), (0, 2)):
        compare(x, axes)


@pytest.mark.parametrize("isa", ("portable", "avx2"))
def test_instruction_sets_agree(isa):
    code = "import test_native_quantize as t; from fewbit import kernels; i = kernels.info(); \
print(i.missing or i.isa); i.native and (t.check_all(), print('right'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATHS, "FEWBIT_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if "does not have" not in done.stdout:
        assert done.stdout.split() == [isa, "right"]


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_makes_its_scale_nan_and_no_other(bad):
    x = normal(64, 128)
    x[5, 7] = bad
    for axes, at in (((1, 2), (5, 0)), ((0, 1), (0, 7))):
        q = quantize_natively(jnp.asarray(x), how_of(x.shape, axes))
        assert np.isnan(q.scale[at]) and np.isnan(q.scale).sum() == 1
        out = np.asarray(ops.dot(q, normal(128, 3)) if axes == (1, 2) else q.scale)
        assert np.isnan(out).any() and np.isfinite(out).any()


def test_what_is_left_to_xla():
    x, how = jnp.asarray(normal(64, 128)), how_of((64, 128), (1, 2))
    assert quantize_natively(x, how) is not None
    for other in (
        HowToQuantize(qtype="int4", channelwise_axes=(0,)),
        HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="minmax"),
        HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes={1: 32}),
        HowToQuantize(qtype="int8", channelwise_axes=(0,), scale_dtype="float16"),
        HowToQuantize(qtype="int8", channelwise_axes=(0, 1)),
    ):
        assert quantize_natively(x, other) is None
    assert quantize_natively(x.astype(jnp.bfloat16), how) is None
    assert quantize_natively(x[:2], how) is None
    middle = HowToQuantize(qtype="int8", channelwise_axes=(1,))
    assert quantize_natively(x.reshape(4, 16, 128), middle) is None


def test_transformations(monkeypatch):
    monkeypatch.setattr(_quantize, "_FEWEST_VALUES", 0)
    x = jnp.asarray(normal(3, 5, 7, 11))
    for axes in ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3)):
        for dim in range(4):
            each = jax.vmap(lambda x, axes=axes: quantize_int8_p.bind(x, axes=axes), dim)
            codes, scale = jax.jit(each)(x)
            for i in range(x.shape[dim]):
                one = jnp.take(x, i, dim)
                want = quantize_with(one, how_of(one.shape, axes))
                np.testing.assert_array_equal(codes[i], want.qvalue)
                np.testing.assert_array_equal(scale[i], want.scale)
    x, how = x[0, 0], how_of((7, 11), (1, 2))
    native = jax.grad(lambda x: jnp.sum(quantize_natively(x, how).scale ** 2))(x)
    plain = jax.grad(lambda x: jnp.sum(quantize_with(x, how).scale ** 2))(x)
    np.testing.assert_array_equal(native, plain)
    with jax.disable_jit():
        np.testing.assert_array_equal(
            quantize_natively(x, how).qvalue, quantize_with(x, how).qvalue
        )


def test_devices_and_other_platforms_keep_xla_which_can_share_the_work():
    x, how = normal(64, 128), how_of((64, 128), (1, 2))
    run = jax.jit(lambda x: quantize_natively(x, how).qvalue)
    assert "@fewbit_quantize_int8" in run.lower(x).as_text()
    text = run.trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "@fewbit" not in text
    assert "custom_call @fewbit" not in jax.export.export(run)(x).mlir_module()
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
        there = jax.device_put(x, NamedSharding(mesh, P("x")))
        quantized = jax.jit(lambda x: ops.Deferred(x, how).quantized().qvalue)
        compiled = quantized.lower(there).compile()
        assert "all-gather" not in compiled.as_text() and "fewbit_q" not in compiled.as_text()
        np.testing.assert_array_equal(compiled(there), quantize_with(x, how).qvalue)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(first=1, last=1), "do not name axes"),
        (dict(first=-1), "do not name axes"),
        (dict(last=3), "do not name axes"),
        (dict(codes=(5, 8)), r"the codes must have x's shape \[5,7\] but have \[5,8\]"),
        (dict(scale=(5, 7)), r"scale must have the shape \[5,1\] but has \[5,7\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    results = (
        jax.ShapeDtypeStruct(change.get("codes", (5, 7)), jnp.int8),
        jax.ShapeDtypeStruct(change.get("scale", (5, 1)), jnp.float32),
    )
    call = jax.ffi.ffi_call("fewbit_quantize_int8", results)
    axes = {k: np.int64(change.get(k, v)) for k, v in dict(first=1, last=2).items()}
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(lambda x: call(x, **axes))(normal(5, 7)))
