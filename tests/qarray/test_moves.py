"""Layout moves: decoding the moved array equals moving the decoded one, to the last bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from oracles import arrays as oracle

from fewbit.qarray import QArray, dequantize, pack, quantize, validate_qarray
from fewbit.qarray import _moves as moves
from fewbit.qarray._moves import CannotMove

SHAPE = (4, 6, 8)
CASES = {
    "tensor": ("int8", {}),
    "channel": ("int4", {"channelwise_axes": (1, 2)}),
    "tile": ("int8", {"channelwise_axes": (0,), "tiled_axes": {1: 3, 2: 4}}),
    "uneven": ("nf4", {"channelwise_axes": (0,), "tiled_axes": {1: 4, 2: 3}}),
    "zero": ("int8", {"tiled_axes": {1: 2}, "channelwise_axes": (2,)}),
    "packed": ("int3", {"channelwise_axes": (0,), "tiled_axes": {2: 4}}),
}


@functools.cache
def make(case):
    name, kwargs = CASES[case]
    x = jax.random.normal(jax.random.key(0), SHAPE)
    method = "minmax" if case == "zero" else "absmax"
    q = quantize(x, name, calibration_method=method, **kwargs)
    return pack(q) if case == "packed" else q


def decode(q):
    """`dequantize` in NumPy, which compiles nothing: these tests meet hundreds of shapes."""
    validate_qarray(q)

    def spread(part):
        part = np.asarray(part, np.float32)
        for axis, (dim, tile) in enumerate(zip(q.shape, q.tile_shape, strict=True)):
            if part.shape[axis] != dim:
                repeats = dim if part.shape[axis] == 1 else tile
                part = np.take(np.repeat(part, repeats, axis), range(dim), axis)
        return part

    numbers = np.asarray(q.qvalue, np.float32)
    if q.qtype == "nf4":
        numbers = np.asarray(oracle.NF4, np.float32)[numbers.astype(int)]
    if q.zero_point is not None:
        numbers = numbers - spread(q.zero_point)
    scale = spread(q.scale)
    if q.tensor_scale is not None:
        assert q.tensor_scale.shape == (1,) * q.ndim
        scale = scale * np.asarray(q.tensor_scale)
    return numbers * scale


def same(moved, expected):
    """The moved QArray decodes to the expected array exactly, NaN included."""
    assert isinstance(moved, QArray)
    np.testing.assert_array_equal(decode(moved), np.asarray(expected))


@pytest.mark.parametrize("case", CASES)
def test_the_decoder_used_here(case):
    np.testing.assert_array_equal(decode(make(case)), np.asarray(dequantize(make(case))))


@pytest.mark.parametrize("case", CASES)
def test_moves_that_always_work(case):
    q = make(case)
    x = decode(q)
    for perm in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
        same(moves.transpose(q, perm), x.transpose(perm))
    same(q.T, x.T)
    same(q.mT, x.mT)
    same(q.swapaxes(0, 1), x.swapaxes(0, 1))
    for dims in ((0,), (1, 3), (-1,)):
        same(moves.expand_dims(q, dims), np.expand_dims(x, dims))
        same(moves.squeeze(moves.expand_dims(q, dims), dims), x)
    same(moves.broadcast_in_dim(q, (2, *SHAPE), (1, 2, 3)), np.broadcast_to(x, (2, *SHAPE)))
    one = moves.slice_(q, (1, 0, 0), (2, 6, 8))
    wide = moves.broadcast_in_dim(one, (5, 6, 8), (0, 1, 2))
    same(wide, np.broadcast_to(x[1:2], (5, 6, 8)))
    assert wide.scale.shape[0] == 1
    same(moves.rev(q, (0,)), x[::-1])
    if q.scale.shape[0] == 4:
        same(moves.concatenate(moves.split(q, (1, 3), 0), 0), x)
    for axis, places in enumerate(((0, 3), (2, 5), (1, 7))):
        for i in places:
            expected = np.take(x, i, axis)
            same(moves.index(q, i, axis), expected)
        traced = jax.jit(lambda i, a=axis: moves.index(q, i, a))(jnp.int32(places[1]))
        same(traced, expected)
    same(q.at_layer(jnp.int32(2)), x[2])


@pytest.mark.parametrize("case", CASES)
def test_indexing(case):
    q, x = make(case), decode(make(case))
    keys = [1, -1, slice(1, 3), (slice(None), 2), (..., 3), (None, ..., 0), (0, None, 1)]
    keys += [(slice(0, 2), None, slice(None)), slice(None, None, -1), ()]
    keys += [jnp.array([3, 0, 0]), (slice(None), jnp.array([[1, 2]]))]
    for key in keys:
        same(q[key], x[key])
    assert [layer.shape for layer in q] == [(6, 8)] * 4
    with pytest.raises(IndexError, match="Index 4 is out of range for axis 0"):
        q[4]
    with pytest.raises(IndexError, match="too many"):
        q[0, 0, 0, 0]
    with pytest.raises(CannotMove, match="boolean"):
        q[jnp.array([True, False, True, True])]


def test_slices_of_tiles():
    q = make("tile")
    x = decode(q)
    same(moves.slice_(q, (0, 3, 4), (4, 6, 8)), x[:, 3:6, 4:8])
    same(q[1:3, 4:6], x[1:3, 4:6])
    same(moves.slice_(q, (0, 0, 0), (4, 5, 8)), x[:, :5])  # the last tile becomes shorter
    same(moves.slice_(q, (0, 0, 4), (4, 6, 8), (2, 1, 2)), x[::2, :, 4::2])
    with pytest.raises(CannotMove, match="axis 1 has tiles of 3, which the slice 2:5:1 cuts open"):
        moves.slice_(q, (0, 2, 0), (4, 5, 8))
    uneven = make("uneven")
    same(uneven[:, 4:], decode(uneven)[:, 4:])
    same(uneven[:, :, 3:7], decode(uneven)[:, :, 3:7])
    with pytest.raises(CannotMove, match="shorter last tile"):
        moves.rev(uneven, (1,))
    same(q[:, 2:2], x[:, 2:2])


@pytest.mark.parametrize("case", CASES)
def test_dynamic_slices(case):
    q, x = make(case), decode(make(case))
    size = 1 if case == "zero" else 2
    slide = jax.jit(lambda i: moves.dynamic_slice(q, (i, 0, 0), (size, 6, 8)))
    for start in (0, 2, 9, -3):  # the primitive clamps; wrapping is done before it
        at = min(max(start, 0), 4 - size)
        same(slide(jnp.int32(start)), x[at : at + size])
        same(moves.dynamic_slice(q, (start, 0, 0), (size, 6, 8)), x[at : at + size])


def test_dynamic_slice_of_a_tiled_axis():
    q = make("tile")
    slide = jax.jit(lambda i, n: moves.dynamic_slice(q, (0, i, 0), (4, n, 8)), static_argnums=1)
    same(slide(jnp.int32(4), 1), decode(q)[:, 4:5])
    with pytest.raises(CannotMove, match="axis 1 has tiles of 3, which 2 elements from a start"):
        slide(jnp.int32(3), 2)
    same(moves.dynamic_slice(q, (0, jnp.int32(3), 0), (4, 3, 8)), decode(q)[:, 3:])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_take(case, axis):
    q, x = make(case), decode(make(case))
    ids = jnp.array([[0, 3], [2, 2], [-1, -9], [99, 1]])
    for mode in (None, "fill", "clip", "wrap"):
        same(moves.take_rows(q, ids, axis, mode=mode), jnp.take(x, ids, axis, mode=mode))
    fill = moves.take_rows(q, ids, axis, mode="fill", fill_value=0.25)
    same(fill, jnp.take(x, ids, axis, mode="fill", fill_value=0.25))
    inside = jnp.array([1, 2, 0])
    kept = moves.take_rows(q, inside, axis, mode="clip")
    same(kept, jnp.take(x, inside, axis, mode="clip"))
    if q.scale.shape[axis] == 1:
        assert kept.scale.shape[axis] == 1


def embedding_gather(fn, table, ids):
    """The gather that indexing a table becomes, called on another object than the table."""
    jaxpr = jax.make_jaxpr(lambda t: t.at[ids].get(mode="fill"))(table)
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "gather":
                found.append(eqn.params)
            for value in eqn.params.values():
                if hasattr(value, "jaxpr"):
                    look(value.jaxpr)

    look(jaxpr.jaxpr)
    names = ("dimension_numbers", "slice_sizes", "mode", "fill_value")
    return fn({name: found[0][name] for name in names})


@pytest.mark.parametrize("ids", [3, [1, 11, 5], [[0, 1], [31, -2]]])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "mxfp4", "nvfp4"])
def test_gather_of_an_embedding(name, ids):
    table = jax.random.normal(jax.random.key(0), (12, 40))
    tile = {"mxfp4": 32, "nvfp4": 16}.get(name, 16)
    q = quantize(table, name, channelwise_axes=(0,), tiled_axes={1: tile})
    x = decode(q)
    start = jnp.asarray(ids)[..., None]
    embedding_gather(
        lambda p: same(
            moves.gather(q, start, **p),
            lax.gather(
                x,
                start,
                p["dimension_numbers"],
                p["slice_sizes"],
                mode=p["mode"],
                fill_value=p["fill_value"],
            ),
        ),
        table,
        jnp.asarray(ids),
    )


def test_gather_with_batching_and_windows():
    q = make("channel")
    x = decode(q)
    ids = jnp.array([[1], [0], [5], [2]])
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    got = moves.gather(q, ids, dimension_numbers=numbers, slice_sizes=(1, 1, 8), mode="clip")
    same(got, lax.gather(x, ids, numbers, (1, 1, 8), mode="clip"))
    window = lax.GatherDimensionNumbers((0, 1, 2), (), (0,))
    with pytest.raises(CannotMove, match="axis 0 is indexed in windows of 2"):
        moves.gather(q, ids[0], dimension_numbers=window, slice_sizes=(2, 6, 8), mode="clip")


def test_joining():
    q = make("tile")
    x = decode(q)
    for axis in (0, 1, 2):
        same(moves.concatenate([q, q], axis), np.concatenate([x, x], axis))
    whole = make("tensor")
    same(moves.concatenate([whole, whole], 1), np.concatenate([decode(whole)] * 2, 1))
    uneven = make("uneven")
    even, short = uneven[:, :4], uneven[:, 4:]
    same(moves.concatenate([even, short], 1), decode(uneven))
    with pytest.raises(CannotMove, match="does not continue tiles of 2"):
        moves.concatenate([short, even], 1)
    with pytest.raises(CannotMove, match="the first one QArray"):
        moves.concatenate([q, make("channel")], 0)
    nv = quantize(jnp.ones((4, 32)), "nvfp4", tiled_axes={1: 16})
    same(moves.concatenate(moves.split(nv, (16, 16), 1), 1), decode(nv))
    with pytest.raises(CannotMove, match="scale for the whole tensor"):
        moves.concatenate([nv, quantize(jnp.ones((4, 32)), "nvfp4", tiled_axes={1: 16})], 1)


@pytest.mark.parametrize(
    "shape, scale, new, expected",
    [
        ((2, 2, 6), (2, 1, 3), (4, 3, 2), (2, 3, 1)),
        ((2, 2, 6), (1, 2, 2), (4, 3, 2), None),
        ((8, 12), (1, 3), (8, 3, 4), (1, 3, 1)),
        ((8, 12), (1, 12), (8, 3, 4), (1, 3, 4)),
        ((8, 3, 4), (1, 3, 4), (8, 12), (1, 12)),
        ((8, 3, 4), (8, 1, 1), (8, 12), (8, 1)),
        ((8, 3, 4), (1, 3, 1), (8, 12), (1, 3)),
        ((8, 3, 4), (1, 1, 4), (8, 12), None),
        ((4, 16), (1, 16), (64,), None),
        ((4, 16), (4, 1), (64,), (4,)),
        ((4, 16), (4, 4), (2, 2, 16), (2, 2, 4)),
        ((4, 16), (4, 4), (4, 1, 16, 1), (4, 1, 4, 1)),
        ((4, 16), (4, 4), (8, 8), (8, 2)),
        ((12,), (3,), (6, 2), (3, 1)),
        ((24,), (12,), (8, 3), None),
        ((6, 4), (1, 1), (3, -1), (1, 1)),
    ],
)
def test_reshape(shape, scale, new, expected):
    key = jax.random.key(0)
    codes = jax.random.randint(key, shape, -100, 100).astype(jnp.int8)
    q = QArray(codes, jax.random.uniform(key, scale))
    if expected is None:
        with pytest.raises(CannotMove, match=r"Cannot reshape \(.*\) into \(.*\) for \(.*\)\."):
            q.reshape(*new)
        return
    moved = q.reshape(new)
    assert moved.scale.shape == expected
    same(moved, decode(q).reshape(new))


def test_reshape_of_uneven_tiles():
    q = make("uneven")
    x = decode(q)
    same(q.reshape(2, 2, 6, 8), x.reshape(2, 2, 6, 8))
    same(q.reshape(4, 6, 1, 8), x.reshape(4, 6, 1, 8))
    with pytest.raises(CannotMove, match="last tile of 4"):
        q.reshape(4, 48)
    with pytest.raises(ValueError, match="the sizes differ"):
        q.reshape(4, 5)
    packed = make("packed")
    moved = packed.reshape(2, 2, 6, 8)
    assert moved.layout == "bits"
    same(moved, decode(packed).reshape(2, 2, 6, 8))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_walks_commute_with_decoding(data):
    q = make(data.draw(st.sampled_from(["tile", "channel", "uneven", "zero", "packed"])))
    x = decode(q)
    for _ in range(data.draw(st.integers(1, 4))):
        act = data.draw(st.sampled_from(["transpose", "slice", "reshape", "expand"]))
        if act == "transpose":
            perm = data.draw(st.permutations(range(q.ndim)))
            move = lambda a, p=perm: a.transpose(p)  # noqa: E731
        elif act == "slice":
            axis = data.draw(st.integers(0, q.ndim - 1))
            start = data.draw(st.integers(0, q.shape[axis] - 1))
            stop = data.draw(st.integers(start + 1, q.shape[axis]))
            key = (slice(None),) * axis + (slice(start, stop),)
            move = lambda a, k=key: a[k]  # noqa: E731
        elif act == "reshape":
            divisors = [n for n in range(1, q.size + 1) if q.size % n == 0]
            first = data.draw(st.sampled_from(divisors))
            move = lambda a, n=first: a.reshape(n, -1)  # noqa: E731
        else:
            move = lambda a: a[None]  # noqa: E731
        try:
            q = move(q)
        except CannotMove:
            continue
        x = move(x)
    same(q, x)


def test_vmap_over_moves_with_uneven_tiles():
    q = quantize(
        jax.random.normal(jax.random.key(0), (3, 4, 10)),
        "int8",
        channelwise_axes=(0, 1),
        tiled_axes={2: 4},
    )
    moved = jax.vmap(lambda q: moves.transpose(q, (1, 0)))(q)
    same(moved, decode(q).transpose(0, 2, 1))


def test_stacked_layers_of_two_level_scales():
    x = (
        jax.random.normal(jax.random.key(0), (3, 4, 32))
        * jnp.array([1.0, 1e-3, 50.0])[:, None, None]
    )
    how = {"channelwise_axes": (0,), "tiled_axes": {1: 16}}
    q = jax.vmap(lambda x: quantize(x, "nvfp4", **how))(x)
    assert q.tensor_scale.shape == (3, 1, 1)
    for i in range(3):
        alone = decode(quantize(x[i], "nvfp4", **how))
        same(q.at_layer(i), alone)
        same(moves.take_rows(q, jnp.array(i)), alone)


def test_packed_codes_stay_packed_where_they_can():
    q = make("packed")
    assert moves.index(q, 1, 0).layout == "bits"
    assert moves.transpose(q, (1, 0, 2)).layout == "bits"
    assert moves.take_rows(q, jnp.array([0, 1]), 0).layout == "bits"
    assert moves.transpose(q, (2, 0, 1)).layout == "plain"
    assert moves.slice_(q, (0, 0, 0), (4, 6, 4)).layout == "plain"
