"""einsum: the shapes of jnp.einsum, the values of float64."""

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
    FLOAT32_SUM,
    drawn,
    normal,
    random_codes,
    relative_mae,
    values,
    worst,
)

from fewbit.ops import einsum, einsum_how
from fewbit.qarray import HowToQuantize, dequantize, quantize, quantize_with

SHARED = HowToQuantize(qtype="int8")
SHIFTED = HowToQuantize(qtype="int8", calibration_method="minmax")


def per_value(qtype, shape):
    return HowToQuantize(qtype=qtype, channelwise_axes=tuple(range(len(shape))))


CASES = [
    ("ab,bc->ac", [(4, 8), (8, 3)]),
    ("ab,bc", [(4, 8), (8, 3)]),
    ("ab,bc->ca", [(4, 8), (8, 3)]),
    ("io,bi->bo", [(8, 3), (4, 8)]),
    ("btd,dnh->btnh", [(2, 3, 8), (8, 4, 5)]),
    ("btnh,nhd->btd", [(2, 3, 4, 5), (4, 5, 8)]),
    ("...a,ab->...b", [(2, 3, 8), (8, 4)]),
    ("...ab,...bc->...ac", [(2, 3, 8), (2, 8, 4)]),
    ("...ab,...bc->...ac", [(2, 3, 8), (8, 4)]),
    ("bij,bjk->bik", [(2, 3, 8), (1, 8, 4)]),
    ("ab,bc->ac", [(4, 1), (8, 3)]),
    ("ab,cb->c", [(4, 8), (5, 8)]),
    ("ab,ab->", [(4, 8), (4, 8)]),
    ("a,b->ab", [(4,), (8,)]),
    ("aab,bc->ac", [(4, 4, 8), (8, 3)]),
    ("ab,bc,cd->ad", [(4, 8), (8, 3), (3, 5)]),
    ("ab,bc,cd,de->ea", [(2, 8), (8, 3), (3, 5), (5, 2)]),
    ("ab,ab,ab->b", [(4, 8), (4, 8), (4, 8)]),
    ("ab->ba", [(4, 8)]),
    ("aa", [(4, 4)]),
    ("ab->", [(4, 8)]),
    ("abc,cd->dba", [(1, 2, 8), (8, 1)]),
]


@pytest.mark.parametrize("subscripts,shapes", CASES)
def test_shape_and_value(subscripts, shapes):
    last = len(shapes) - 1
    variants = []
    for chosen, qtype in (({*range(last + 1)}, "int8"), ({0}, "int8"), ({last}, "nf4")):
        operands = [
            random_codes(shape, per_value(qtype, shape), i) for i, shape in enumerate(shapes)
        ]
        variants.append(
            [q if i in chosen else values(q).astype("f4") for i, q in enumerate(operands)]
        )
    outs = jax.jit(lambda variants: [einsum(subscripts, *xs) for xs in variants])(variants)
    for operands, out in zip(variants, outs, strict=True):
        assert worst(out, products.einsum(subscripts, *operands)) < 2 * FLOAT32_SUM


def test_interleaved_spelling():
    x, w = normal(0, (4, 8)), random_codes((8, 3), SHARED, 1)
    expected = einsum("ab,bc->ca", x, w)
    np.testing.assert_array_equal(einsum(x, [0, 1], w, [1, 2], [2, 0]), expected)
    np.testing.assert_array_equal(einsum(x, [0, 1], w, [1, 2]), expected.T)


@st.composite
def einsum_cases(draw):
    letters = "abcd"
    sizes = {c: draw(st.integers(1, 3)) for c in letters}
    n = draw(st.integers(1, 3))
    labels = [draw(st.text(letters, min_size=1, max_size=3)) for _ in range(n)]
    used = sorted(set("".join(labels)))
    output = "".join(draw(st.permutations(used))[: draw(st.integers(0, len(used)))])
    shapes = []
    for part in labels:
        shape = [sizes[c] for c in part]
        if len(set(part)) == len(part):
            # A 1-wide axis stretches to the others' size.
            shape = [1 if draw(st.integers(0, 4)) == 0 else s for s in shape]
        shapes.append(tuple(shape))
    implicit = draw(st.booleans())
    return ",".join(labels) + ("" if implicit else "->" + output), shapes


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(einsum_cases(), st.sets(st.integers(0, 2)), st.booleans())
def test_any_subscripts(case, quantized, asymmetric):
    subscripts, shapes = case
    operands = [
        random_codes(shape, SHIFTED if asymmetric and i == 0 else SHARED, i)
        for i, shape in enumerate(shapes)
    ]
    plain = [values(q).astype("f4") for q in operands]
    mixed = [
        q if i in quantized else x for i, (q, x) in enumerate(zip(operands, plain, strict=True))
    ]
    out = jax.jit(lambda xs: einsum(subscripts, *xs))(mixed)
    expected = jax.eval_shape(lambda xs: jnp.einsum(subscripts, *xs), plain)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert worst(out, products.einsum(subscripts, *mixed)) < 2 * FLOAT32_SUM


def test_settings_are_honoured():
    x, w = normal(0, (4, 8), "bfloat16"), random_codes((8, 3), SHARED, 1, "bfloat16")
    assert jax.eval_shape(lambda: einsum("ab,bc->ac", x, w)).dtype == jnp.bfloat16
    wide = jax.eval_shape(lambda: einsum("ab,bc->ac", x, w, preferred_element_type=jnp.float32))
    assert wide.dtype == jnp.float32
    text = str(jax.make_jaxpr(lambda x: einsum("ab,bc->ac", x, w, precision="highest"))(x))
    assert "HIGHEST" in text
    x = normal(0, (4, 8))
    assert jax.eval_shape(lambda: einsum("ab,bc->ac", x, w)).dtype == jnp.float32
    with pytest.raises(TypeError, match="unknown arguments"):
        einsum("ab,bc->ac", x, w, precison="highest")


def test_plain_operands_pass_through():
    x, w = normal(0, (4, 8)), normal(1, (8, 3))
    np.testing.assert_array_equal(einsum("ab,bc->ac", x, w), jnp.einsum("ab,bc->ac", x, w))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_out_sharding_follows_the_transposed_output(kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x = random_codes((8, 64), HowToQuantize(qtype="int8", channelwise_axes=(0,)))
    w = random_codes((64, 16), HowToQuantize(qtype="int8", channelwise_axes=(1,)), 1)
    expected = products.einsum("ab,bc->ca", x, w)
    with jax.set_mesh(mesh):
        codes = jax.device_put(x.qvalue, P("x", None))
        x = x.replace(qvalue=codes)
        spec = P("y", "x") if kind is AxisType.Explicit else None
        out = jax.jit(lambda x, w: einsum("ab,bc->ca", x, w, out_sharding=spec))(x, w)
        if spec is not None:
            assert jax.typeof(out).sharding.spec == spec
    assert worst(out, expected) < FLOAT32_SUM


def test_how_uses_each_operands_own_order():
    common = dict(einsum_str="abc,cbd->ad", ndims=(3, 3), tile_size=4, qtype="int8")
    left, right = (einsum_how(for_lhs=side, **common) for side in (True, False))
    assert (left.channelwise_axes, dict(left.tiled_axes)) == ((0,), {2: 4})
    assert (right.channelwise_axes, dict(right.tiled_axes)) == ((2,), {1: 4})
    how = einsum_how(einsum_str="...d,df->...f", ndims=(4, 2), for_lhs=True, qtype="int8")
    assert how.channelwise_axes == (0, 1, 2)
    how = einsum_how(einsum_str="ab,bc->ac", ndims=(2, 2), for_lhs=True, qtype="int8",
                     disable_channelwise_axes=True)  # fmt: skip
    assert how.channelwise_axes == ()


E4M3 = "float8_e4m3fn"
# Upper bounds on the error of a bfloat16 matmul against float: activation type, weight type, tile.
# Both operands, (1024, 4096) and (4096, 32768), are normal(key(42)).
MATMUL_BOUNDS = [
    (None, "int8", None, 0.009), (None, "int8", 128, 0.009),
    ("int8", "int8", None, 0.02), ("int8", "int8", 128, 0.02),
    (None, "int4", None, 0.12), (None, "int4", 128, 0.11),
    ("int8", "int4", None, 0.12), ("int8", "int4", 128, 0.11),
    ("int4", "int4", None, 0.17), ("int4", "int4", 128, 0.16),
    (None, E4M3, None, 0.03), (E4M3, E4M3, None, 0.038), (E4M3, E4M3, 1 / 32, 0.038),
    ("nf4", "nf4", 128, 0.14),
]  # fmt: skip


def quantized(subscripts, shapes, x, w, tile, lhs_type, rhs_type, method="absmax"):
    common = dict(einsum_str=subscripts, ndims=tuple(map(len, shapes)), tile_size=tile)
    if lhs_type is not None:
        how = einsum_how(**common, for_lhs=True, qtype=lhs_type, calibration_method=method)
        x = quantize_with(x, how)
    return x, quantize_with(w, einsum_how(**common, for_lhs=False, qtype=rhs_type))


@pytest.fixture(scope="module", params=["block", pytest.param("whole", marks=pytest.mark.long)])
def matmul_problem(request):
    """Operands and float result: of the whole problem, or of fewer rows and columns.

    An entry of the result depends on one row of x, one column of w and their own scales. The block
    has as long a contraction and numbers drawn alike, so its errors are a sample of the whole's.
    """
    rows, columns = (1024, 32768) if request.param == "whole" else (64, 1024)
    x, w = drawn((rows, 4096), "bfloat16"), drawn((4096, columns), "bfloat16")
    x, w = jnp.asarray(x), jnp.asarray(w)
    return x, w, jnp.einsum("ab,bc->ac", x, w)


@pytest.mark.parametrize("act,weight,tile,bound", MATMUL_BOUNDS)
def test_upper_bounds_of_a_matmul(matmul_problem, act, weight, tile, bound):
    x, w, exact = matmul_problem
    qx, qw = quantized("ab,bc->ac", (x.shape, w.shape), x, w, tile, act, weight)
    out = jax.jit(lambda x, w: einsum("ab,bc->ac", x, w))(qx, qw)
    assert out.dtype == exact.dtype
    assert relative_mae(out, exact) <= bound


# The same for other subscripts, each with its own problem: both operands are normal(key(42)) in
# bfloat16, plus one for an asymmetric lhs.
THREE = ((10, 256, 16), (256, 16, 128))
BOUNDS = {
    "two contracted": ("a b c, b c d -> a d", THREE, "int8", "absmax", None, 0.011),
    "ellipsis on both": ("...ab,...bc->...ac", ((10, 256, 16), (10, 16, 128)), "int8", "absmax",
                         None, 0.009),
    "ellipsis on lhs": ("...ab,bc->...ac", ((10, 256, 16), (16, 128)), "int8", "absmax", None,
                        0.009),
    "asymmetric": ("abc,bcd->acd", THREE, "int8", "minmax", None, 0.015),
    "asymmetric tiled": ("abc,bcd->acd", THREE, "int8", "minmax", 1 / 4, 0.010),
    "nf4 tiled": ("abc,bcd->acd", THREE, "nf4", "absmax", 1 / 4, 0.14),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_upper_bounds_against_float(name):
    subscripts, shapes, qtype, method, tile, bound = BOUNDS[name]
    x, w = (drawn(shape, "bfloat16") for shape in shapes)
    x = x + jnp.bfloat16(method == "minmax")
    qx, qw = quantized(subscripts, shapes, x, w, tile, qtype, qtype, method)

    @jax.jit
    def run(x, w, qx, qw):
        return einsum(subscripts, qx, qw), jnp.einsum(subscripts, x, w)

    out, exact = run(x, w, qx, qw)
    assert out.dtype == exact.dtype
    assert relative_mae(out, exact) <= bound


def test_problems_are_the_draws_they_are_said_to_be():
    expected = jax.random.normal(jax.random.key(42), (10, 16, 128), jnp.bfloat16)
    np.testing.assert_array_equal(drawn((10, 16, 128), "bfloat16"), expected)


def test_fake_quantized_equals_quantized():
    x = drawn((512, 512), "float32")
    q = quantize(x, "int8")
    fake = jnp.einsum("ab,bc->ac", dequantize(q), dequantize(q), precision="highest")
    assert relative_mae(einsum("ab,bc->ac", q, q), fake) <= 1e-6
