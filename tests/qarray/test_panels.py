"""The panel layout: bytes against a slow oracle, moves against those of the plain array."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.interpreter._traced import float_view
from fewbit.numerics import format_of
from fewbit.numerics._bits import to_bit_patterns
from fewbit.qarray import _moves as moves
from fewbit.qarray import dequantize, pack, quantize
from fewbit.qarray._packing_panels import _signed, pack_panels, unpack_panels
from fewbit.qarray._panels import PanelArray, to_panels, why_no_panels

INTEGERS = ("int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8")
TABLES = ("uint4", "uint8", "nf4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


def slow_panels(patterns, bits):
    """Bit patterns [K, N], both whole numbers of blocks, as bytes: one code at a time."""
    rows, columns = patterns.shape
    data = np.zeros((columns // 64, rows // 32, bits, 64, 4), np.uint8)
    for k in range(rows):
        for n in range(columns):
            code = int(patterns[k, n])
            block, inside = divmod(k, 32)
            quad, byte = divmod(inside, 4)
            panel, column = divmod(n, 64)
            word, low = 0, 0
            for width in (8,) if bits == 8 else (4, 2, 1):
                if bits != 8 and not bits & width:
                    continue
                j, t = divmod(quad, 8 // width)
                piece = (code >> low) & (2**width - 1)
                data[panel, block, word + j, column, byte] |= piece << (t * width)
                word, low = word + width, low + width
    return data


def random_codes(rng, qtype, shape):
    row = format_of(qtype)
    patterns = rng.integers(0, 2**row.bits, shape).astype(np.uint8)
    return patterns, _signed(jnp.asarray(patterns), row)


def bytes_of(codes, qtype):
    return np.asarray(to_bit_patterns(codes, format_of(qtype).bits))


@pytest.mark.parametrize("qtype", INTEGERS + TABLES)
def test_bytes_are_where_the_layout_says(qtype):
    patterns, codes = random_codes(np.random.default_rng(0), qtype, (64, 64))
    expected = slow_panels(patterns, format_of(qtype).bits)
    np.testing.assert_array_equal(pack_panels(codes, qtype), expected)


@settings(max_examples=20, deadline=None)
@given(
    qtype=st.sampled_from(INTEGERS + TABLES),
    k=st.integers(1, 70),
    n=st.integers(1, 130),
    stack=st.sampled_from([(), (2,), (2, 1)]),
    seed=st.integers(0, 99),
)
def test_unpacking_gives_the_codes_back(qtype, k, n, stack, seed):
    _, codes = random_codes(np.random.default_rng(seed), qtype, (*stack, k, n))
    again = unpack_panels(pack_panels(codes, qtype), qtype, k, n)
    assert again.dtype == codes.dtype
    np.testing.assert_array_equal(bytes_of(again, qtype), bytes_of(codes, qtype))


def test_padding_stands_for_zero():
    q = quantize(jnp.ones((5, 3)), "int4", channelwise_axes=(1,))
    codes = unpack_panels(to_panels(q, "kn").data, "int4", 32, 64)
    assert not np.any(np.asarray(codes.astype(jnp.int8))[5:])
    assert not np.any(np.asarray(codes.astype(jnp.int8))[:, 3:])


CASES = {
    "matrix": ((70, 65), "kn", (1,), {}),
    "groups": ((96, 65), "kn", (1,), {0: 32}),
    "short last group": ((100, 65), "kn", (1,), {0: 32}),
    "table": ((65, 64), "nk", (0,), {1: 16}),
    "stack": ((3, 64, 65), "lkn", (0, 2), {1: 32}),
    "heads summed": ((4, 32, 10), "kkn", (2,), {1: 16}),
    "heads kept": ((64, 4, 8), "knn", (1, 2), {0: 32}),
    "one scale": ((64, 8), "kn", (), {}),
}
FORMATS = ("int1", "int3", "int4", "int8", "nf4", "fp8", "mxfp4", "nvfp4", "mxfp8")


def packed_pair(case, qtype, method="absmax"):
    shape, roles, channelwise, tiled = CASES[case]
    own = format_of(qtype).tile
    if own:
        tiled = {axis: own for axis in tiled} or {roles.index("k"): own}
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    q = quantize(
        x, qtype, channelwise_axes=channelwise, tiled_axes=tiled, calibration_method=method
    )
    return q, roles


def same(packed, plain):
    assert packed.shape == plain.shape and packed.dtype == plain.dtype
    np.testing.assert_array_equal(dequantize(packed), dequantize(plain))


def stays(packed):
    assert packed.layout == "panels"
    return packed


# Every format in one case, every case in three formats: each pair compiles programs of its own.
PAIRS = [("groups", qtype) for qtype in FORMATS]
PAIRS += [(case, qtype) for case in CASES for qtype in ("int4", "fp8", "nvfp4") if case != "groups"]


@pytest.mark.parametrize(("case", "qtype"), PAIRS)
def test_packing_and_unpacking_are_inverse(case, qtype):
    q, roles = packed_pair(case, qtype)
    reason = why_no_panels(q, roles)
    if reason is not None:
        assert qtype == "mxfp8" or qtype == "mxfp4"
        return
    p = to_panels(q, roles)
    assert jax.tree.structure(p.plain()) == jax.tree.structure(q)
    for new, old in zip(jax.tree.leaves(p.plain()), jax.tree.leaves(q), strict=True):
        assert new.dtype == old.dtype and np.asarray(new).tobytes() == np.asarray(old).tobytes()
    abstract = jax.eval_shape(lambda q: to_panels(q, roles), q)
    assert jax.tree.structure(abstract) == jax.tree.structure(
        to_panels(jax.eval_shape(lambda: q), roles)
    )
    assert (abstract.shape, abstract.dtype) == (q.shape, q.dtype)
    same(pickle.loads(pickle.dumps(p)), q)
    same(p.with_dtype("bfloat16"), q.with_dtype("bfloat16"))


@pytest.mark.parametrize("qtype", ("int8", "int4", "nf4"))
def test_transposes_and_reshapes_leave_the_bytes(qtype):
    q, roles = packed_pair("heads kept", qtype)
    p = to_panels(q, roles)
    same(stays(p.T), q.T)
    flat_p, flat_q = moves.reshape(p, (64, 32)), moves.reshape(q, (64, 32))
    same(stays(flat_p), flat_q)
    same(stays(moves.reshape(flat_p.T, (2, 2, 8, 64))), moves.reshape(flat_q.T, (2, 2, 8, 64)))
    same(stays(moves.expand_dims(p, (1,))), moves.expand_dims(q, (1,)))
    same(stays(moves.squeeze(moves.expand_dims(p, (3,)), (3,))), q)
    wide = dict(shape=(64, 1, 4, 8), broadcast_dimensions=(0, 2, 3))
    same(stays(moves.broadcast_in_dim(p, **wide)), moves.broadcast_in_dim(q, **wide))


def test_what_no_view_can_say_is_unpacked():
    q, roles = packed_pair("matrix", "int8")
    p = to_panels(q, roles)
    cut = (0, 0), (70, 10)
    same(moves.slice_(p, *cut), moves.slice_(q, *cut))
    same(moves.rev(p, (1,)), moves.rev(q, (1,)))
    same(moves.concatenate([p, p], 1), moves.concatenate([q, q], 1))
    for new, old in zip(moves.split(p, (5, 60), 1), moves.split(q, (5, 60), 1), strict=True):
        same(new, old)
    same(p[3:5], q[3:5])


@pytest.mark.parametrize("qtype", ("int8", "int4", "fp8"))
def test_an_entry_of_a_stack_is_a_number_beside_the_bytes(qtype):
    q, roles = packed_pair("stack", qtype)
    p = to_panels(q, roles)
    same(stays(p.at_layer(1)), q.at_layer(1))
    assert p.at_layer(1).data is p.data
    same(stays(p[-1]), q[-1])
    kept = (1, 0, 0), (1, 64, 65)
    same(stays(moves.dynamic_slice(p, *kept)), moves.dynamic_slice(q, *kept))
    same(stays(moves.squeeze(moves.dynamic_slice(p, *kept), (0,))), q[1])
    pick = jax.jit(lambda w, i: dequantize(w.at_layer(i)))
    np.testing.assert_array_equal(pick(p, 2), pick(q, 2))
    np.testing.assert_array_equal(jax.vmap(dequantize)(p), jax.vmap(dequantize)(q))
    with pytest.raises(IndexError, match="out of range"):
        p[3]


@pytest.mark.parametrize("mode", ("clip", "fill", "wrap"))
@pytest.mark.parametrize("qtype", ("int8", "int4", "nf4", "int3"))
def test_rows_of_a_table_are_read_from_their_panels(qtype, mode):
    q, roles = packed_pair("table", qtype)
    p, ids = to_panels(q, roles), jnp.array([[0, 3, 64], [-1, 70, 5]])
    same(moves.take_rows(p, ids, 0, mode), moves.take_rows(q, ids, 0, mode))
    assert moves.take_rows(p, jnp.zeros((0,), jnp.int32), 0, mode).shape == (0, 64)


@pytest.mark.parametrize(
    ("shape", "roles", "kwargs", "reason"),
    [
        ((8, 8), "kn", dict(qtype="int16"), "no native product"),
        ((8, 8), "kl", dict(qtype="int8"), "no stack of matrices"),
        ((8, 3, 8), "knl", dict(qtype="int8"), "no stack of matrices"),
        ((0, 8), "kn", dict(qtype="int8", channelwise_axes=(0,)), "empty"),
        ((48, 8), "kn", dict(qtype="int8", tiled_axes={0: 24}), "no groups of rows"),
        ((8, 8), "kn", dict(qtype="int8", channelwise_axes=(0,)), "no groups of rows"),
    ],
)
def test_what_cannot_be_packed_says_why(shape, roles, kwargs, reason):
    q = quantize(jnp.ones(shape), **kwargs)
    assert reason in why_no_panels(q, roles)
    with pytest.raises(ValueError, match=reason):
        to_panels(q, roles)


@pytest.mark.parametrize("packed", [lambda q: to_panels(q, "kn"), pack], ids=["panels", "bits"])
def test_what_a_packed_weight_stands_for_is_told_without_unpacking_it(packed):
    q = packed(quantize(jnp.linspace(-1, 1, 64 * 64).reshape(64, 64), "int4"))
    assert q.layout != "plain"
    views = []

    def look(q):
        views.append(float_view(q))
        return q.data

    assert not jax.make_jaxpr(look)(q).eqns
    for view in (*views, float_view(q)):
        assert view.shape == (64, 64) and view.dtype == jnp.float32


def test_zero_points_are_packed_too():
    q, roles = packed_pair("groups", "int4", "minmax")
    p = to_panels(q, roles)
    assert isinstance(p, PanelArray) and p.packed_parts[2].dtype == jnp.uint8
    same(p, q)
    np.testing.assert_array_equal(p.zero_point, q.zero_point)
