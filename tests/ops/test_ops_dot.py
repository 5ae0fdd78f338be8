"""dot_general, dot and take against float64 products of what the codes stand for."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import products
from oracles.products import (
    BFLOAT16_RESULT,
    FLOAT32_SUM,
    drawn,
    normal,
    random_codes,
    relative_mae,
    values,
    worst,
)

import fewbit
from fewbit.ops import describe_dot, dot, dot_general, dot_how, take, take_how
from fewbit.qarray import HowToQuantize, QArray, dequantize, pack, quantize

PLAIN = (((1,), (0,)), ((), ()))
FORMATS = ["int8", "int4", "int3", "int2", "int1", "int6", "int16", "float8_e4m3fn",
           "float8_e5m2", "float4_e2m1fn", "nf4", "mxfp8", "mxfp4", "nvfp4"]  # fmt: skip
TILES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


def operand(for_lhs, qtype, k=64, shape=None, dtype="float32", **kw):
    kw = dict(tile_size=TILES.get(qtype)) | kw
    how = dot_how(dimension_numbers=PLAIN, ndims=(2, 2), for_lhs=for_lhs, qtype=qtype, **kw)
    shape = shape or ((6, k) if for_lhs else (k, 5))
    return random_codes(shape, how, seed=0 if for_lhs else 1, dtype=dtype)


def pair(lhs_type, rhs_type, k=64, dtype="float32", lhs_kw=None, rhs_kw=None):
    lhs = operand(True, lhs_type, k, dtype=dtype, **(lhs_kw or {}))
    return lhs, operand(False, rhs_type, k, dtype=dtype, **(rhs_kw or {}))


run = jax.jit(dot_general, static_argnums=2)


def test_every_pair_of_formats_matches_float64():
    operands = {qtype: pair(qtype, qtype) for qtype in FORMATS}
    operands[None] = (normal(0, (6, 64)), normal(1, (64, 5)))
    # Not under jit: the float product is then compiled once for all pairs that end in it.
    for lhs_type, rhs_type in itertools.product(operands, operands):
        lhs, rhs = operands[lhs_type][0], operands[rhs_type][1]
        out = dot_general(lhs, rhs, PLAIN)
        assert out.dtype == jnp.float32
        expected = products.dot_general(lhs, rhs, PLAIN)
        assert worst(out, expected) < FLOAT32_SUM, (lhs_type, rhs_type)
        if (lhs_type is None) != (rhs_type is None):
            assert describe_dot(lhs, rhs, PLAIN) == "dequantize + float dot"


@pytest.mark.parametrize(
    "lhs_type,rhs_type,path",
    [
        ("int8", "int8", "int8 dot"),
        ("int4", "int4", "int8 dot"),
        ("int1", "int3", "int8 dot"),
        ("float8_e4m3fn", "float8_e5m2", "fp8 dot"),
        ("int8", "float8_e4m3fn", "dequantize + float dot"),
        ("int8", "nf4", "dequantize + float dot"),
        ("mxfp8", "mxfp8", "dequantize + float dot"),
        ("int16", "int8", "dequantize + float dot"),
        ("float4_e2m1fn", "float4_e2m1fn", "dequantize + float dot"),
    ],
)
def test_the_described_path_is_the_path_taken(lhs_type, rhs_type, path):
    lhs, rhs = pair(lhs_type, rhs_type)
    abstract = jax.eval_shape(lambda a, b: (a, b), lhs, rhs)
    assert describe_dot(*abstract, PLAIN) == path
    text = str(jax.make_jaxpr(lambda a, b: dot_general(a, b, PLAIN))(lhs, rhs))
    (equation,) = [line for line in text.splitlines() if "dot_general[" in line]
    assert ("i32[6,5]" in equation) == (path == "int8 dot")
    assert ("f8_e" in text.split("lambda")[1].split("let")[0]) or path != "fp8 dot"


def test_two_float_operands_pass_through():
    x, w = normal(0, (6, 64)), normal(1, (64, 5))
    assert describe_dot(x, w, PLAIN) == "float dot"
    np.testing.assert_array_equal(dot_general(x, w, PLAIN), jax.lax.dot_general(x, w, PLAIN))


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("k,tiled", [(256, "both"), (300, "both"), (300, "lhs"), (300, "rhs")])
def test_tiled_contraction_with_even_and_uneven_last_tile(qtype, k, tiled):
    lhs, rhs = pair(
        qtype,
        qtype,
        k,
        lhs_kw=dict(tile_size=None if tiled == "rhs" else 128),
        rhs_kw=dict(tile_size=None if tiled == "lhs" else 128),
    )
    assert describe_dot(lhs, rhs, PLAIN) in ("int8 dot", "fp8 dot")
    out = run(lhs, rhs, PLAIN)
    assert worst(out, products.dot_general(lhs, rhs, PLAIN)) < FLOAT32_SUM


def test_two_dimensional_block_scales():
    x = operand(True, "float8_e4m3fn", 256, tile_size=128)
    w = operand(False, "float8_e4m3fn", shape=(256, 260), tile_size={0: 128, 1: 128})
    assert w.scale.shape == (2, 3)
    assert describe_dot(x, w, PLAIN) == "fp8 dot"
    assert worst(run(x, w, PLAIN), products.dot_general(x, w, PLAIN)) < FLOAT32_SUM


def test_small_tiles_and_per_value_scales_are_dequantized():
    for tile in (32, 1):
        lhs, rhs = pair("int8", "int8", lhs_kw=dict(tile_size=tile))
        assert describe_dot(lhs, rhs, PLAIN) == "dequantize + float dot"
        out = run(lhs, rhs, PLAIN)
        assert worst(out, products.dot_general(lhs, rhs, PLAIN)) < FLOAT32_SUM


def test_different_tiles_are_refused():
    lhs, rhs = pair("int8", "int8", 512, lhs_kw=dict(tile_size=128), rhs_kw=dict(tile_size=256))
    with pytest.raises(ValueError, match="Contracting axes must be tiled with the same tile size"):
        dot_general(lhs, rhs, PLAIN)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("qtype,tile,k", [
    ("int8", None, 64), ("int8", 128, 300), ("uint8", 128, 300), ("uint4", 128, 300)])  # fmt: skip
def test_one_zero_point_is_corrected_exactly(qtype, side, tile, k):
    asymmetric = dict(calibration_method="minmax", tile_size=tile)
    types = (qtype, "int8") if side == "lhs" else ("int8", qtype)
    kw = {"tile_size": tile}
    lhs, rhs = pair(*types, k, **{f"{side}_kw": asymmetric}, **{
        "rhs_kw" if side == "lhs" else "lhs_kw": kw})  # fmt: skip
    assert (lhs if side == "lhs" else rhs).zero_point is not None
    assert describe_dot(lhs, rhs, PLAIN) == "int8 dot"
    out = run(lhs, rhs, PLAIN)
    assert worst(out, products.dot_general(lhs, rhs, PLAIN)) < FLOAT32_SUM


def test_two_zero_points_are_refused():
    minmax = dict(calibration_method="minmax")
    lhs, rhs = pair("int8", "int8", lhs_kw=minmax, rhs_kw=minmax)
    with pytest.raises(ValueError, match="Only one operand can be asymmetric"):
        dot_general(lhs, rhs, PLAIN)


def unit(codes):
    codes = jnp.asarray(codes, jnp.int8)
    return QArray(codes, jnp.ones((1,) * codes.ndim, jnp.float32), qtype="int8")


def test_accumulators_are_exact_integers():
    # Beyond 2**24 float32 has gaps, so a float accumulator would lose the odd last unit here.
    lhs = np.full((1, 2048), 127, np.int8)
    rhs = np.full((2048, 1), 127, np.int8)
    rhs[0, 0] = 126
    text = str(jax.make_jaxpr(lambda a, b: dot_general(a, b, PLAIN))(unit(lhs), unit(rhs)))
    assert "i32[1,1]" in text
    exact = int(lhs.astype(np.int64)[0] @ rhs.astype(np.int64)[:, 0])
    assert float(dot_general(unit(lhs), unit(rhs), PLAIN)[0, 0]) == float(np.float32(exact))


def test_a_sum_that_could_leave_int32_is_not_left_to_luck():
    lhs, rhs = unit(np.full((1, 140_000), -128)), unit(np.full((140_000, 1), -128))
    assert describe_dot(lhs, rhs, PLAIN) == "dequantize + float dot"
    np.testing.assert_allclose(dot_general(lhs, rhs, PLAIN), 140_000 * 128.0**2, rtol=1e-5)


@st.composite
def dot_cases(draw):
    n_batch, n_contract, n_left, n_right = (draw(st.integers(0, 2)) for _ in range(4))
    size = st.integers(1, 4)
    batch, contract = draw(st.tuples(*[size] * n_batch)), draw(st.tuples(*[size] * n_contract))
    sides = []
    for n_free in (n_left, n_right):
        free = draw(st.tuples(*[size] * n_free))
        shape = [*batch, *contract, *free]
        order = draw(st.permutations(range(len(shape))))
        where = {axis: place for place, axis in enumerate(order)}
        sides.append((
            tuple(shape[axis] for axis in order),
            tuple(where[n_batch + i] for i in range(n_contract)),
            tuple(where[i] for i in range(n_batch)),
        ))  # fmt: skip
    (ls, lc, lb), (rs, rc, rb) = sides
    return ls, rs, ((lc, rc), (lb, rb))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(dot_cases(), st.sampled_from(["int8", "float8_e4m3fn", "nf4"]), st.booleans())
def test_any_dimension_numbers(case, qtype, asymmetric):
    lhs_shape, rhs_shape, numbers = case
    common = dict(dimension_numbers=numbers, ndims=(len(lhs_shape), len(rhs_shape)), qtype=qtype)
    method = "minmax" if asymmetric and qtype == "int8" else "absmax"
    lhs = random_codes(lhs_shape, dot_how(**common, for_lhs=True, calibration_method=method))
    rhs = random_codes(rhs_shape, dot_how(**common, for_lhs=False), 1)
    out = run(lhs, rhs, numbers)
    assert worst(out, products.dot_general(lhs, rhs, numbers)) < FLOAT32_SUM


@pytest.mark.parametrize("shapes", [((0, 4), (4, 3)), ((2, 0), (0, 3)), ((1, 1), (1, 1))])
def test_empty_and_single_dims(shapes):
    lhs, rhs = (
        QArray(jnp.ones(s, jnp.int8), jnp.ones((1, 1), jnp.float32), qtype="int8") for s in shapes
    )
    expected = jax.lax.dot_general(jnp.ones(shapes[0]), jnp.ones(shapes[1]), PLAIN)
    np.testing.assert_array_equal(dot_general(lhs, rhs, PLAIN), expected)


def test_result_dtype_follows_logical_dtypes_and_preference():
    lhs, rhs = pair("int8", "int8", dtype="bfloat16")
    half = normal(0, (6, 64), "bfloat16")
    for left, dtype in ((lhs, "bfloat16"), (half, "bfloat16"), (normal(0, (6, 64)), "float32")):
        out = jax.eval_shape(lambda a, b: dot_general(a, b, PLAIN), left, rhs)
        assert out.dtype == jnp.dtype(dtype)
    out = dot_general(lhs, rhs, PLAIN, preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    assert worst(out, products.dot_general(lhs, rhs, PLAIN)) < FLOAT32_SUM
    wide = dot_general(half, rhs, PLAIN, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32
    assert worst(wide, products.dot_general(half, rhs, PLAIN)) < BFLOAT16_RESULT


@pytest.mark.parametrize("qtype", ["int3", "int1", "nf4"])
def test_packed_codes_give_the_same_product(qtype):
    _, rhs = pair(qtype, qtype)
    lhs = pair("int8", "int8")[0]
    assert pack(rhs).layout == "bits"
    for left in (lhs, dequantize(lhs)):
        packed, plain = (run(left, q, PLAIN) for q in (pack(rhs), rhs))
        np.testing.assert_array_equal(packed, plain)
        assert describe_dot(left, pack(rhs), PLAIN) == describe_dot(left, rhs, PLAIN)


def test_precision_reaches_the_float_dot():
    _, rhs = pair("int8", "int8")
    x = normal(0, (6, 64))
    text = str(jax.make_jaxpr(lambda x: dot_general(x, rhs, PLAIN, jax.lax.Precision.HIGHEST))(x))
    assert "HIGHEST" in text


def test_logical_dtype_wins_over_a_half_precision_scale():
    lhs, rhs = pair("int8", "int8", rhs_kw=dict(scale_dtype="float16"))
    assert rhs.scale.dtype == jnp.float16
    out = dot_general(lhs, rhs, PLAIN)
    assert out.dtype == jnp.float32
    assert worst(out, products.dot_general(lhs, rhs, PLAIN)) < FLOAT32_SUM


def test_vmap_grad_and_eval_shape():
    lhs, rhs = pair("int8", "int8")
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), lhs)
    out = jax.vmap(lambda q: dot_general(q, rhs, PLAIN))(stack)
    np.testing.assert_array_equal(out[1], dot_general(lhs, rhs, PLAIN))
    x = normal(0, (6, 64))
    gradient = jax.grad(lambda x: dot_general(x, rhs, PLAIN).sum())(x)
    np.testing.assert_allclose(gradient, np.tile(values(rhs).sum(1), (6, 1)), rtol=1e-4, atol=1e-4)

    def of_scale(scale):
        return dot_general(x, rhs.replace(scale=scale), PLAIN).sum()

    expected = (np.asarray(x).sum(0)[:, None] * np.asarray(rhs.qvalue)).sum(0, keepdims=True)
    np.testing.assert_allclose(jax.grad(of_scale)(rhs.scale), expected, rtol=1e-3, atol=1e-3)
    assert jax.eval_shape(lambda: dot_general(lhs, rhs, PLAIN)).shape == (6, 5)


DOT_SHAPES = [((64,), (64,)), ((3, 64), (64,)), ((64,), (64, 5)), ((2, 3, 64), (4, 64, 5)),
              ((), (3, 4)), ((3,), ())]  # fmt: skip


@pytest.mark.parametrize("shapes", DOT_SHAPES)
def test_dot_has_the_shapes_of_numpy(shapes):
    a, b = (normal(i, s) for i, s in enumerate(shapes))
    qa, qb = (random_codes(s, HowToQuantize(qtype="int8"), i) for i, s in enumerate(shapes))
    sides = ((qa, qb), (qa, b), (a, qb))
    outs = jax.jit(lambda sides: [dot(left, right) for left, right in sides])(sides)
    for (left, right), out in zip(sides, outs, strict=True):
        expected = np.dot(values(left), values(right))
        assert out.shape == expected.shape
        close = dict(rtol=1e-4, atol=1e-4 * abs(expected).max())
        np.testing.assert_allclose(out, expected, **close)


E4M3 = "float8_e4m3fn"
BATCHED = (((1,), (0,)), ((2,), (2,)))
TWO = (((3, 4), (1, 0)), ((0,), (3,)))
LONG, LARGE = (128, 2, 128, 32, 64), (64, 32, 128, 128)
# Upper bounds on the error against float, relative to the quantized result, each for its own
# problem: (shape, type, tile of each axis) per side. Values are normal / 10, or uniform for an
# asymmetric lhs, in float32.
BOUNDS = {
    "int8 by int4": (((128, 512, 4), "int8", {0: 1, 1: 128, 2: 1}),
                     ((512, 256, 4), "int4", {0: 128, 1: 1, 2: 1}), BATCHED, 0.12),
    "e4m3 blocks": (((4, 128, 256), E4M3, {0: 1, 1: 1, 2: 128}),
                    ((256, 256), E4M3, {0: 128, 1: 128}), (((2,), (0,)), ((), ())), 0.04),
    "nf4 weight": (((128, 512, 4), None, {}), ((512, 256, 4), "nf4", {1: 1, 2: 1}), BATCHED, 0.11),
    "asymmetric": (((128, 512, 3), "int8", {}), ((512, 256, 3), "int4", {}), BATCHED, 0.19),
    "asymmetric tiled": (((128, 512, 3), "int8", {0: 1, 1: 1 / 4, 2: 1}),
                         ((512, 256, 3), "int4", {0: 1 / 4, 1: 1, 2: 1}), BATCHED, 0.128906),
    "two contracted, weight only": ((LONG, None, {}), (LARGE, "int8", {}), TWO, 0.013),
    "two contracted, both tiled": ((LONG, "int8", {0: 1, 1: 1, 2: 1, 3: 8, 4: 8}),
                                   (LARGE, "int8", {0: 8, 1: 8, 2: 1, 3: 1}), TWO, 0.01),
    "two contracted, one tiled": ((LONG, "int8", {0: 1, 1: 1, 2: 1, 4: 16}),
                                  (LARGE, "int8", {0: 16, 2: 1, 3: 1}), TWO, 0.011),
    "scales on a contracted axis": (((16, 128, 128), "int8", {0: 1, 1: 1}),
                                    ((128, 128, 16), "int8", {0: 1, 2: 1}),
                                    (((1, 2), (0, 1)), ((), ())), 0.01),
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def float_problem(lhs_shape, rhs_shape, numbers, asymmetric):
    if asymmetric:
        x = drawn(lhs_shape, "float32", 1, "uniform")
    else:
        x = drawn(lhs_shape, "float32", 1) / np.float32(10)
    x, w = jnp.asarray(x), jnp.asarray(drawn(rhs_shape, "float32", 2) / np.float32(10))
    return x, w, float_dot(x, w, numbers)


float_dot = jax.jit(jax.lax.dot_general, static_argnums=2)


@pytest.mark.parametrize("name", BOUNDS)
def test_upper_bounds_against_float(name):
    (lhs_shape, lhs_type, lhs_tiles), (rhs_shape, rhs_type, rhs_tiles), numbers, bound = BOUNDS[
        name
    ]
    method = "minmax" if name.startswith("asymmetric") else "absmax"
    x, w, exact = float_problem(lhs_shape, rhs_shape, numbers, method == "minmax")
    qx, qw = x, quantize(w, rhs_type, tiled_axes=rhs_tiles)
    if lhs_type is not None:
        qx = quantize(x, lhs_type, tiled_axes=lhs_tiles, calibration_method=method)
    out = run(qx, qw, numbers)
    assert relative_mae(exact, out) <= bound
    if describe_dot(qx, qw, numbers) in ("int8 dot", "fp8 dot"):
        first = float_dot(dequantize(qx), dequantize(qw), numbers)
        assert relative_mae(out, first) <= 0.003


SPECS = [
    (P("x", None), P(None, "y"), None),
    (P("x", None), P(None, None), None),
    (P(None, "x"), P("x", "y"), P(None, "y")),
    (P("x", None), P(None, "y"), P("y", "x")),
]


INT8 = ("int8", "int8")


@pytest.mark.parametrize("kind,lhs_spec,rhs_spec,out_spec,qtypes,tile", [
    *((AxisType.Explicit, *specs, INT8, None) for specs in SPECS),
    *((AxisType.Explicit, *specs, INT8, 128) for specs in SPECS[1:]),
    (AxisType.Explicit, *SPECS[2], (None, "int4"), None),
    (AxisType.Auto, *SPECS[2], INT8, None), (AxisType.Auto, *SPECS[2], INT8, 128)])  # fmt: skip
def test_sharding_equals_the_float_op(kind, lhs_spec, rhs_spec, out_spec, qtypes, tile):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x, w = normal(0, (8, 256)), normal(1, (256, 16))
    method = "minmax" if qtypes[0] and not tile else "absmax"

    def place(array, spec):
        return jax.tree.map(
            lambda leaf: jax.device_put(
                leaf,
                jax.NamedSharding(
                    mesh,
                    P(*(s if n % 8 == 0 else None for s, n in zip(spec, leaf.shape, strict=True))),
                ),
            ),
            array,
        )

    qx = x
    if qtypes[0]:
        kw = dict(tile_size=tile, calibration_method=method)
        qx = operand(True, qtypes[0], shape=x.shape, **kw)
    qw = operand(False, qtypes[1], shape=w.shape, tile_size=tile)
    expected = products.dot_general(qx, qw, PLAIN)
    if kind is AxisType.Auto:
        out_spec = None
    with jax.set_mesh(mesh):
        run = jax.jit(lambda a, b: dot_general(a, b, PLAIN, out_sharding=out_spec))
        out = run(place(qx, lhs_spec), place(qw, rhs_spec))
        plain = jax.jit(lambda a, b: jax.lax.dot_general(a, b, PLAIN, out_sharding=out_spec))(
            place(x, lhs_spec), place(w, rhs_spec)
        )
        if kind is AxisType.Explicit:
            assert jax.typeof(out).sharding == jax.typeof(plain).sharding
    assert worst(out, expected) < FLOAT32_SUM


@pytest.mark.parametrize("qtype,tile", [("int8", None), ("int4", 16), ("nf4", 16), ("mxfp4", 32)])
def test_take_equals_take_from_the_dequantized_table(qtype, tile):
    table = random_codes((10, 64), take_how(2, tile_size=tile, qtype=qtype))
    indices = jnp.array([[0, 9, -1], [3, 12, 4]])
    modes = (None, "clip", "wrap", "fill")
    outs = jax.jit(lambda table: [take(table, indices, mode=mode) for mode in modes])(table)
    for mode, out in zip(modes, outs, strict=True):
        expected = jnp.take(dequantize(table), indices, axis=0, mode=mode)
        np.testing.assert_array_equal(out, expected)


def test_take_on_other_axes_and_on_tiled_rows():
    table = random_codes((8, 64), HowToQuantize(qtype="int8", tiled_axes={0: 4}))
    for axis, indices in (
        (1, jnp.array([5, 2])),
        (0, jnp.array([7, 0, 3])),
        (None, jnp.array([9])),
    ):
        expected = jnp.take(dequantize(table), indices, axis=axis)
        np.testing.assert_array_equal(take(table, indices, axis=axis), expected)
    x = normal(0, (8, 4))
    np.testing.assert_array_equal(take(x, jnp.array([1]), axis=0), x[1:2])


def _whole(dtype, *shape):
    info = jnp.iinfo(dtype)
    drawn = np.random.default_rng(len(shape)).integers(info.min, info.max + 1, shape)
    return jnp.asarray(drawn).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4"])
@pytest.mark.parametrize("op", ["dot_general", "dot", "einsum", "three", "conv", "ragged_dot"])
def test_plain_whole_numbers_of_a_byte_are_summed_in_int32(op, dtype):
    shapes = dict(conv=[(2, 3, 9, 9), (4, 3, 3, 3)], ragged_dot=[(8, 90), (2, 90, 5)])
    shapes |= dict(three=[(4, 6), (6, 5), (5, 3)])
    arrays = [_whole(dtype, *shape) for shape in shapes.get(op, [(4, 90), (90, 5)])]
    products = dict(
        dot_general=lambda *x, **s: fewbit.dot_general(*x, PLAIN, **s),
        dot=fewbit.dot,
        einsum=lambda *x, **s: fewbit.einsum("ab,bc->ac", *x, **s),
        three=lambda *x, **s: fewbit.einsum("ab,bc,cd->ad", *x, **s),
        conv=lambda *x, **s: fewbit.conv_general_dilated(*x, (1, 1), "SAME", **s),
        ragged_dot=lambda *x, **s: fewbit.ragged_dot(*x, jnp.array([5, 3]), **s),
    )
    out = products[op](*arrays)
    assert out.dtype == jnp.int32
    with jax.enable_x64(True):
        exact = products[op](*(jnp.asarray(np.asarray(x).astype(np.float64)) for x in arrays))
        np.testing.assert_array_equal(np.asarray(out, np.int64), np.asarray(exact, np.int64))
    as_float = products[op](*arrays, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(as_float, out.astype(jnp.float32))  # summed in int32 too


def test_plain_float8_products_are_bfloat16_and_wider_types_are_as_in_jax():
    x = jnp.full((4, 64), 96, jnp.float8_e4m3fn)  # 589824 is beyond what float8 holds
    assert dot_general(x, x.T, PLAIN).dtype == jnp.bfloat16
    np.testing.assert_array_equal(dot_general(x, x.T, PLAIN).astype(jnp.float32), 96 * 96 * 64)
    assert dot_general(x, x.T, PLAIN, None, jnp.float32).dtype == jnp.float32
    for dtype in ("int16", "int32", "bfloat16", "float32"):
        x = jnp.ones((4, 4), dtype)
        assert dot_general(x, x, PLAIN).dtype == dtype
