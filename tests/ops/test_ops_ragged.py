"""ragged_dot against a float64 loop over groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import products
from oracles.products import FLOAT32_SUM, drawn, normal, random_codes, relative_mae, worst

from fewbit.ops import describe_ragged_dot, ragged_dot, ragged_dot_general, ragged_dot_how
from fewbit.qarray import HowToQuantize, dequantize, quantize

FORMATS = ["int8", "int4", "int3", "int1", "float8_e4m3fn", "float8_e5m2", "nf4", "mxfp8", "mxfp4",
           "nvfp4", None]  # fmt: skip
TILES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
SIZES = np.array([5, 0, 7], np.int32)


def operand(for_lhs, qtype, k=64, m=12, n=5, dtype="float32", **kw):
    shape, seed = ((m, k), 0) if for_lhs else ((3, k, n), 1)
    if qtype is None:
        return normal(seed, shape, dtype)
    kw = dict(tile_size=TILES.get(qtype)) | kw
    return random_codes(shape, ragged_dot_how(for_lhs=for_lhs, qtype=qtype, **kw), seed, dtype)


def pair(lhs_type, rhs_type, lhs_kw=None, rhs_kw=None, **kw):
    lhs = operand(True, lhs_type, **(lhs_kw or {}), **kw)
    return lhs, operand(False, rhs_type, **(rhs_kw or {}), **kw)


run = jax.jit(ragged_dot)


def check(x, w, sizes=SIZES):
    sizes = np.array(sizes, np.int32)
    assert worst(run(x, w, sizes), products.ragged_dot(x, w, sizes)) < FLOAT32_SUM


def test_every_pair_of_formats_matches_float64():
    # Not under jit: the float product is then compiled once for all pairs that end in it.
    for lhs_type, rhs_type in itertools.product(FORMATS, FORMATS):
        x, w = pair(lhs_type, rhs_type)
        out = ragged_dot(x, w, SIZES)
        expected = products.ragged_dot(x, w, SIZES)
        assert worst(out, expected) < FLOAT32_SUM, (lhs_type, rhs_type)


@pytest.mark.parametrize("qtype,k,lhs_tile,rhs_tile", [
    ("int8", 70, 16, 16), ("int8", 64, None, 16), ("int8", 64, 32, None),
    ("int8", 64, None, {1: 16, 2: 2}), ("int8", 64, 16, {0: 2, 1: 16}),
    ("float8_e4m3fn", 70, 16, 16), ("float8_e4m3fn", 64, None, {1: 16, 2: 2})])  # fmt: skip
def test_tiles_of_k_and_n(qtype, k, lhs_tile, rhs_tile):
    x, w = pair(qtype, qtype, dict(tile_size=lhs_tile), dict(tile_size=rhs_tile), k=k)
    assert "dequantize" not in describe_ragged_dot(x, w)
    check(x, w)
    check(x, w, (2, 3, 4))  # rows past the last group are zero


@pytest.mark.parametrize("axes", [(), (0,), (2,), (0, 2)])
def test_shared_and_per_tensor_scales(axes):
    x = random_codes((12, 64), HowToQuantize(qtype="int8"))
    w = random_codes((3, 64, 5), HowToQuantize(qtype="int8", channelwise_axes=axes), 1)
    check(x, w)
    check(operand(True, None), w)


def test_zero_points_are_dequantized():
    minmax = dict(calibration_method="minmax")
    x, w = pair("int8", "int8", minmax, minmax)
    assert describe_ragged_dot(x, w) == "dequantize + float ragged_dot"
    check(x, w)


def test_different_tiles_are_refused():
    x, w = pair("int8", "int8", dict(tile_size=16), dict(tile_size=32))
    with pytest.raises(ValueError, match="Contracting axes must be tiled with the same tile size"):
        ragged_dot(x, w, SIZES)


@pytest.mark.parametrize("lhs_type,rhs_type,path", [
    ("int8", "int4", "int8 ragged_dot"), ("float8_e4m3fn", "float8_e5m2", "fp8 ragged_dot"),
    (None, "int8", "dequantize + float ragged_dot"), (None, None, "float ragged_dot"),
    ("int8", "nf4", "dequantize + float ragged_dot")])  # fmt: skip
def test_the_described_path_is_the_path_taken(lhs_type, rhs_type, path):
    x, w = pair(lhs_type, rhs_type)
    assert describe_ragged_dot(*jax.eval_shape(lambda x, w: (x, w), x, w)) == path
    text = str(jax.make_jaxpr(ragged_dot)(x, w, SIZES))
    assert ("i32[12,5] = ragged_dot" in text) == (path == "int8 ragged_dot")


GENERAL = {
    "batched rows": (((2,), (2,)), ((0,), (0,)), [1], [1], (2, 6, 8), (2, 3, 8, 5)),
    "two row axes": (((2,), (1,)), ((), ()), [1], [0], (2, 6, 8), (3, 8, 5)),
    "group last": (((0,), (1,)), ((), ()), [1], [2], (8, 6), (5, 8, 3)),
    "ragged contraction": (((1,), (0,)), ((), ()), [1], [], (4, 6), (6, 5)),
    "ragged batch": (((2,), (1,)), ((0,), (0,)), [0], [], (6, 4, 8), (6, 8, 5)),
}


@pytest.mark.parametrize("name", GENERAL)
def test_general_dimension_numbers(name):
    contracting, batch, ragged, group, *shapes = GENERAL[name]
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    sizes = np.array([1, 3, 2], np.int32)
    cases = []
    for full in ((True, True), (False, False), (True, False)):
        operands = []
        for side, shape in enumerate(shapes):
            kept = [a for a in range(len(shape)) if full[side] and a not in contracting[side]]
            how = HowToQuantize(qtype="int8", channelwise_axes=tuple(kept))
            operands.append(random_codes(shape, how, side))
        assert describe_ragged_dot(*operands, numbers) == "int8 ragged_dot"
        cases.append(operands)
    outs = jax.jit(lambda cases: [ragged_dot_general(*c, sizes, numbers) for c in cases])(cases)
    plain = jax.jit(lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers))
    for operands, out in zip(cases, outs, strict=True):
        exact = plain(*(products.values(q).astype("f4") for q in operands))
        np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


def test_result_dtype_vmap_and_grad():
    x, w = pair("int8", "int8", dtype="bfloat16")
    assert jax.eval_shape(ragged_dot, x, w, SIZES).dtype == jnp.bfloat16
    wide = jax.eval_shape(lambda: ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32))
    assert wide.dtype == jnp.float32
    x, w = pair("int8", "int8")
    stack = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), (x, w, SIZES))
    out = jax.jit(jax.vmap(ragged_dot))(*stack)
    np.testing.assert_allclose(out[1], run(x, w, SIZES), rtol=1e-6)
    plain, floats = operand(True, None), dequantize(w)

    @jax.jit
    def gradients(plain):
        return jax.grad(lambda x: ragged_dot(x, w, SIZES).sum())(plain), jax.grad(
            lambda x: lax.ragged_dot(x, floats, SIZES).sum()
        )(plain)

    np.testing.assert_allclose(*gradients(plain), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_out_sharding(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    x, w = pair("int8", "int8", n=8)
    expected = products.ragged_dot(x, w, SIZES)
    with jax.set_mesh(mesh):
        spec = P(None, "x") if kind is AxisType.Explicit else None
        placed = jax.tree.map(lambda leaf: jax.device_put(leaf, P(None, None, "x")), w)
        out = jax.jit(lambda x, w: ragged_dot(x, w, SIZES, out_sharding=spec))(x, placed)
        if spec is not None:
            assert jax.typeof(out).sharding.spec == spec
    assert worst(out, expected) < FLOAT32_SUM


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ROWS = dict(qtype=E4M3, channelwise_axes=(0,))
BLOCKS = dict(qtype=E4M3, channelwise_axes=(0,), tiled_axes={1: 128, 2: 128})
# Upper bounds on the error against float, relative to the quantized result, each for its own
# problem: float32 (128, 256) x (4, 256, n), normal but for an asymmetric lhs, which is uniform.
BOUNDS = {
    "int8": (dict(qtype="int8"), 64, dict(qtype="int8"), (64, 32, 16, 16), 0.03),
    "int8 per group": (dict(qtype="int8"), 64, dict(qtype="int8", channelwise_axes=(0,)),
                       (128, 0, 0, 0), 0.03),
    "asymmetric": (dict(qtype="int8", calibration_method="minmax"), 64, dict(qtype="int8"),
                   (50, 50, 28, 0), 0.07),
    "K tiles": (ROWS, 512, dict(qtype=E4M3, channelwise_axes=(2,), tiled_axes={1: 128}),
                (10, 20, 30, 68), 0.04),
    "K tiles per group": (ROWS, 512,
                          dict(qtype=E4M3, channelwise_axes=(0, 2), tiled_axes={1: 128}),
                          (10, 20, 30, 68), 0.04),
    "K and N tiles per group": (ROWS, 512, BLOCKS, (10, 20, 30, 68), 0.04),
    "K tiles on both": (ROWS | dict(tiled_axes={1: 128}), 512, BLOCKS, (10, 20, 30, 68), 0.04),
    "e5m2": (dict(qtype=E5M2, channelwise_axes=(0,)), 64,
             dict(qtype=E5M2, channelwise_axes=(2,)), (128, 100, 0, 28), 0.08),
    "e5m2 per group": (dict(qtype=E5M2, channelwise_axes=(0,)), 64,
                       dict(qtype=E5M2, channelwise_axes=(0, 2)), (128, 100, 0, 28), 0.08),
}  # fmt: skip
float_ragged_dot = jax.jit(lax.ragged_dot)


@pytest.mark.parametrize("name", BOUNDS)
def test_upper_bounds_against_float(name):
    lhs_kw, n, rhs_kw, sizes, bound = BOUNDS[name]
    sample = "uniform" if "calibration_method" in lhs_kw else "normal"
    x = drawn((128, 256), "float32", 1, sample)
    w = drawn((4, 256, n), "float32", 2)
    sizes = np.array(sizes, np.int32)
    qx, qw = quantize(x, **lhs_kw), quantize(w, **rhs_kw)
    out = run(qx, qw, sizes)
    assert relative_mae(float_ragged_dot(x, w, sizes), out) <= bound
    first = float_ragged_dot(dequantize(qx), dequantize(qw), sizes)
    assert relative_mae(out, first) <= 0.003


@pytest.mark.parametrize("name,lhs_shape,rhs_shape,lhs_tiled,rhs_tiled", [
    ("group last", (256, 128), (64, 256, 4), 0, 1),
    ("two row axes", (2, 128, 256), (4, 256, 64), 2, 1)])  # fmt: skip
def test_upper_bound_general_dims_with_tiles_of_64(
    name, lhs_shape, rhs_shape, lhs_tiled, rhs_tiled
):
    contracting, batch, ragged, group, *_ = GENERAL[name]
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    x, w = drawn(lhs_shape, "float32", 1), drawn(rhs_shape, "float32", 2)
    qx = quantize(x, "int8", tiled_axes={lhs_tiled: 64})
    qw = quantize(w, "int8", tiled_axes={rhs_tiled: 64})
    assert describe_ragged_dot(qx, qw, numbers) == "int8 ragged_dot"
    sizes = np.array([64, 32, 16, 16], np.int32)
    out = jax.jit(lambda x, w: ragged_dot_general(x, w, sizes, numbers))(qx, qw)
    plain = jax.jit(lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers))
    assert relative_mae(plain(x, w), out) <= 0.04
    assert relative_mae(out, plain(dequantize(qx), dequantize(qw))) <= 0.003
