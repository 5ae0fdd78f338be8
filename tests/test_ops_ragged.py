"""ragged_dot against a float64 loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fewbit.ops import describe_ragged_dot, ragged_dot, ragged_dot_general, ragged_dot_how
from fewbit.qarray import dequantize, quantize, quantize_with
from tests.oracles import products
from tests.oracles.products import FLOAT32_SUM, relative_mae, worst

FORMATS = ["int8", "int4", "int3", "int1", "float8_e4m3fn", "float8_e5m2", "nf4", "mxfp8", "mxfp4",
           "nvfp4", None]  # fmt: skip
TILES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def pair(lhs_type, rhs_type, k=64, lhs_kw=None, rhs_kw=None, m=12, n=5, dtype=jnp.float32):
    x = normal(0, (m, k), dtype)
    # Experts of very different size: a scale of the wrong group cannot go unnoticed.
    w = normal(1, (3, k, n), dtype) * jnp.array([1, 10, 100], dtype).reshape(3, 1, 1)
    operands = []
    for array, qtype, for_lhs, kw in ((x, lhs_type, True, lhs_kw), (w, rhs_type, False, rhs_kw)):
        if qtype is not None:
            kw = dict(tile_size=TILES.get(qtype)) | (kw or {})
            array = quantize_with(array, ragged_dot_how(for_lhs=for_lhs, qtype=qtype, **kw))
        operands.append(array)
    return operands


def check(x, w, sizes=(5, 0, 7)):
    sizes = jnp.array(sizes, jnp.int32)
    out = jax.jit(ragged_dot)(x, w, sizes)
    assert worst(out, products.ragged_dot(x, w, sizes)) < FLOAT32_SUM


@pytest.mark.parametrize("lhs_type", ["int8", "int3", "float8_e4m3fn", "nf4", "mxfp4", None])
def test_every_pair_of_formats_matches_float64(lhs_type):
    pairs = jax.jit(lambda: [pair(lhs_type, rhs_type) for rhs_type in FORMATS])()
    sizes = jnp.array([5, 0, 7], jnp.int32)
    outs = jax.jit(lambda ps: [ragged_dot(x, w, sizes) for x, w in ps])(pairs)
    for rhs_type, (x, w), out in zip(FORMATS, pairs, outs, strict=True):
        assert worst(out, products.ragged_dot(x, w, sizes)) < FLOAT32_SUM, rhs_type


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("k,lhs_tile,rhs_tile", [
    (64, 16, 16), (70, 16, 16), (64, None, 16), (64, 32, None), (64, None, {1: 16, 2: 2}),
    (64, 16, {0: 2, 1: 16})])  # fmt: skip
def test_tiles_of_k_and_n(qtype, k, lhs_tile, rhs_tile):
    x, w = pair(qtype, qtype, k, dict(tile_size=lhs_tile), dict(tile_size=rhs_tile))
    assert "dequantize" not in describe_ragged_dot(x, w)
    check(x, w)
    check(x, w, (2, 3, 4))  # rows past the last group are zero


def test_shared_and_per_tensor_scales():
    x, w = pair(None, None)
    for axes in ((), (0,), (2,), (0, 2)):
        check(quantize(x, "int8"), quantize(w, "int8", channelwise_axes=axes))
        check(x, quantize(w, "int8", channelwise_axes=axes))


def test_zero_points_are_dequantized():
    minmax = dict(calibration_method="minmax")
    x, w = pair("int8", "int8", lhs_kw=minmax, rhs_kw=minmax)
    assert describe_ragged_dot(x, w) == "dequantize + float ragged_dot"
    check(x, w)


def test_different_tiles_are_refused():
    x, w = pair("int8", "int8", lhs_kw=dict(tile_size=16), rhs_kw=dict(tile_size=32))
    with pytest.raises(ValueError, match="Contracting axes must be tiled with the same tile size"):
        check(x, w)


@pytest.mark.parametrize("lhs_type,rhs_type,path", [
    ("int8", "int4", "int8 ragged_dot"), ("float8_e4m3fn", "float8_e5m2", "fp8 ragged_dot"),
    (None, "int8", "dequantize + float ragged_dot"), (None, None, "float ragged_dot"),
    ("int8", "nf4", "dequantize + float ragged_dot")])  # fmt: skip
def test_the_described_path_is_the_path_taken(lhs_type, rhs_type, path):
    assert describe_ragged_dot(*jax.eval_shape(lambda: pair(lhs_type, rhs_type))) == path
    x, w = pair(lhs_type, rhs_type)
    text = str(jax.make_jaxpr(ragged_dot)(x, w, jnp.array([5, 0, 7])))
    assert ("i32[12,5] = ragged_dot" in text) == (path == "int8 ragged_dot")


GENERAL = {
    "batched rows": (((2,), (2,)), ((0,), (0,)), [1], [1], (2, 6, 8), (2, 3, 8, 5)),
    "two row axes": (((2,), (1,)), ((), ()), [1], [0], (2, 6, 8), (3, 8, 5)),
    "group last": (((0,), (1,)), ((), ()), [1], [2], (8, 6), (5, 8, 3)),
    "ragged contraction": (((1,), (0,)), ((), ()), [1], [], (4, 6), (6, 5)),
    "ragged batch": (((2,), (1,)), ((0,), (0,)), [0], [], (6, 4, 8), (6, 8, 5)),
}


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("lhs_axes,rhs_axes", [("all", "all"), ("none", "none"), ("all", "none")])
def test_general_dimension_numbers(name, lhs_axes, rhs_axes):
    contracting, batch, ragged, group, lhs_shape, rhs_shape = GENERAL[name]
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    keep = [
        tuple(a for a in range(len(shape)) if a not in contracting[side]) if which == "all" else ()
        for side, (shape, which) in enumerate(((lhs_shape, lhs_axes), (rhs_shape, rhs_axes)))
    ]
    x = quantize(normal(0, lhs_shape), "int8", channelwise_axes=keep[0])
    w = quantize(normal(1, rhs_shape), "int8", channelwise_axes=keep[1])
    assert describe_ragged_dot(x, w, numbers) == "int8 ragged_dot"
    sizes = jnp.array([1, 3, 2], jnp.int32)
    out = jax.jit(lambda x, w: ragged_dot_general(x, w, sizes, numbers))(x, w)
    plain = lax.ragged_dot_general(dequantize(x), dequantize(w), sizes, numbers)
    np.testing.assert_allclose(out, plain, rtol=1e-4, atol=1e-4)


def test_result_dtype_vmap_and_grad():
    x, w = pair("int8", "int8", dtype=jnp.bfloat16)
    sizes = jnp.array([5, 0, 7], jnp.int32)
    assert ragged_dot(x, w, sizes).dtype == jnp.bfloat16
    assert ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).dtype == jnp.float32
    x, w = pair("int8", "int8")
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (x, w, sizes))
    out = jax.vmap(ragged_dot)(*stack)
    np.testing.assert_allclose(out[1], ragged_dot(x, w, sizes), rtol=1e-6)
    plain = normal(0, (12, 64))
    gradient = jax.grad(lambda x: ragged_dot(x, w, sizes).sum())(plain)
    exact = jax.grad(lambda x: lax.ragged_dot(x, dequantize(w), sizes).sum())(plain)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
BOUNDS = [
    ("int8", (), (), None, "absmax", 0.03), ("int8", (), (0,), None, "absmax", 0.03),
    ("int8", (), (), None, "minmax", 0.07), (E4M3, (0,), (2,), {1: 128}, "absmax", 0.04),
    (E4M3, (0,), (), {1: 128, 2: 32}, "absmax", 0.04),
    (E4M3, (0,), (0,), {1: 128, 2: 32}, "absmax", 0.04),
    (E5M2, (0,), (2,), None, "absmax", 0.08), (E5M2, (0,), (0, 2), None, "absmax", 0.08),
]  # fmt: skip


@pytest.mark.parametrize("qtype,lhs_axes,rhs_axes,tiles,method,bound", BOUNDS)
def test_upper_bounds_against_float(qtype, lhs_axes, rhs_axes, tiles, method, bound):
    x, w = normal(0, (64, 256)), normal(1, (4, 256, 64))
    sizes = jnp.array([10, 20, 4, 30], jnp.int32)
    tiles = tiles or {}
    lhs_tiles = {1: tiles[1]} if 1 in tiles else None
    qx = quantize(
        x, qtype, channelwise_axes=lhs_axes, tiled_axes=lhs_tiles, calibration_method=method
    )
    qw = quantize(w, qtype, channelwise_axes=rhs_axes, tiled_axes=tiles)
    out = ragged_dot(qx, qw, sizes)
    assert relative_mae(out, lax.ragged_dot(x, w, sizes)) < bound
    slow = lax.ragged_dot(dequantize(qx), dequantize(qw), sizes)
    assert relative_mae(out, slow) < 0.003


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_out_sharding(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    x, w = pair("int8", "int8", n=8)
    sizes = jnp.array([5, 0, 7], jnp.int32)
    expected = products.ragged_dot(x, w, sizes)
    with jax.set_mesh(mesh):
        spec = P(None, "x") if kind is AxisType.Explicit else None
        placed = jax.tree.map(lambda leaf: jax.device_put(leaf, P(None, None, "x")), w)
        out = jax.jit(lambda x, w: ragged_dot(x, w, sizes, out_sharding=spec))(x, placed)
        if spec is not None:
            assert jax.typeof(out).sharding.spec == spec
    assert worst(out, expected) < FLOAT32_SUM


@pytest.mark.parametrize("name,lhs_tiled,rhs_tiled", [("group last", 0, 1), ("two row axes", 2, 1)])
def test_upper_bound_general_dims_with_tiles_of_64(name, lhs_tiled, rhs_tiled):
    contracting, batch, ragged, group, lhs_shape, rhs_shape = GENERAL[name]
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    x, w = (
        normal(seed, [256 if size == 8 else size for size in shape])
        for seed, shape in enumerate((lhs_shape, rhs_shape))
    )
    qx = quantize(x, "int8", channelwise_axes=(1,), tiled_axes={lhs_tiled: 64})
    qw = quantize(w, "int8", channelwise_axes=tuple(group), tiled_axes={rhs_tiled: 64})
    assert describe_ragged_dot(qx, qw, numbers) == "int8 ragged_dot"
    sizes = jnp.array([1, 3, 2], jnp.int32)
    out = ragged_dot_general(qx, qw, sizes, numbers)
    assert relative_mae(out, lax.ragged_dot_general(x, w, sizes, numbers)) < 0.04
    slow = lax.ragged_dot_general(dequantize(qx), dequantize(qw), sizes, numbers)
    assert relative_mae(out, slow) < 0.003
