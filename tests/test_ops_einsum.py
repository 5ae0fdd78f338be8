"""einsum: the shapes of jnp.einsum, the values of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fewbit.ops import einsum, einsum_how
from fewbit.qarray import dequantize, quantize, quantize_with
from tests.oracles import products
from tests.oracles.products import FLOAT32_SUM, random_codes, relative_mae, values, worst


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


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
        operands = [random_codes(shape, (), qtype) for shape in shapes]
        variants.append(
            [q if i in chosen else values(q).astype("f4") for i, q in enumerate(operands)]
        )
    outs = jax.jit(lambda variants: [einsum(subscripts, *xs) for xs in variants])(variants)
    for operands, out in zip(variants, outs, strict=True):
        assert worst(out, products.einsum(subscripts, *operands)) < 2 * FLOAT32_SUM


def test_interleaved_spelling():
    x, w = normal(0, (4, 8)), quantize(normal(1, (8, 3)), "int8")
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
        random_codes(shape, range(len(shape)), "int8", asymmetric and i == 0)
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
    x, w = normal(0, (4, 8), jnp.bfloat16), quantize(normal(1, (8, 3), jnp.bfloat16), "int8")
    assert einsum("ab,bc->ac", x, w).dtype == jnp.bfloat16
    assert einsum("ab,bc->ac", x, w, preferred_element_type=jnp.float32).dtype == jnp.float32
    text = str(jax.make_jaxpr(lambda x: einsum("ab,bc->ac", x, w, precision="highest"))(x))
    assert "HIGHEST" in text
    assert einsum("ab,bc->ac", normal(0, (4, 8)), w).dtype == jnp.float32
    with pytest.raises(TypeError, match="unknown arguments"):
        einsum("ab,bc->ac", x, w, precison="highest")


def test_plain_operands_pass_through():
    x, w = normal(0, (4, 8)), normal(1, (8, 3))
    np.testing.assert_array_equal(einsum("ab,bc->ac", x, w), jnp.einsum("ab,bc->ac", x, w))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_out_sharding_follows_the_transposed_output(kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x = quantize(normal(0, (8, 64)), "int8", channelwise_axes=(0,))
    w = quantize(normal(1, (64, 16)), "int8", channelwise_axes=(1,))
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


def quantized_pair(subscripts, shapes, lhs_kw, rhs_kw, tile=None, dtype=jnp.bfloat16):
    floats = [normal(i, shape, dtype) for i, shape in enumerate(shapes)]
    ndims = tuple(map(len, shapes))
    operands = []
    for side, kw in enumerate((lhs_kw, rhs_kw)):
        if kw is None:
            operands.append(floats[side])
            continue
        how = einsum_how(
            einsum_str=subscripts, ndims=ndims, for_lhs=side == 0, tile_size=tile, **kw
        )
        operands.append(quantize_with(floats[side], how))
    expected = np.einsum(subscripts, *map(values, floats))
    return operands, expected


INT8 = dict(qtype="int8")
MINMAX = dict(qtype="int8", calibration_method="minmax")


@pytest.mark.parametrize("subscripts,shapes,lhs,rhs,tile,bound", [
    ("btnh,nhd->btd", [(4, 8, 8, 32), (8, 32, 64)], INT8, INT8, None, 0.011),
    ("...ab,...bc->...ac", [(2, 16, 32), (2, 32, 16)], INT8, INT8, None, 0.009),
    ("...ab,bc->...ac", [(2, 16, 32), (32, 16)], INT8, INT8, None, 0.009),
    ("ab,bc->ac", [(64, 256), (256, 64)], MINMAX, INT8, None, 0.015),
    ("ab,bc->ac", [(64, 512), (512, 64)], MINMAX, INT8, 1 / 4, 0.010),
    ("ab,bc->ac", [(64, 256), (256, 64)], dict(qtype="nf4"), dict(qtype="nf4"), 1 / 4, 0.14),
])  # fmt: skip
def test_upper_bounds_against_float(subscripts, shapes, lhs, rhs, tile, bound):
    operands, expected = quantized_pair(subscripts, shapes, lhs, rhs, tile, jnp.float32)
    assert relative_mae(einsum(subscripts, *operands), expected) < bound


def test_fake_quantized_equals_quantized():
    operands, _ = quantized_pair("ab,bc->ac", [(64, 256), (256, 64)], INT8, INT8, None, jnp.float32)
    fake = jnp.einsum("ab,bc->ac", *map(dequantize, operands))
    assert relative_mae(einsum("ab,bc->ac", *operands), fake) <= 1e-6
