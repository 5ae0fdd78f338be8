"""QArray: against float64 for every format and granularity; its laws; its life as a pytree."""

import copy
import dataclasses
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from oracles import arrays as oracle

from fewbit import numerics
from fewbit.numerics import FORMATS
from fewbit.qarray import (
    HowToQuantize,
    QArray,
    WithAux,
    calibrate,
    check_finite,
    compute_scale_zero_point,
    dequantize,
    get_scale_shape,
    pack,
    quantize,
    quantize_with,
    quantize_with_scale_zero_point,
    to_panels,
    unpack,
    validate_qarray,
)
from fewbit.qarray._ranges import split_two_levels

SYMMETRIC = sorted(name for name, row in FORMATS.items() if row.bound and not row.tile)
ASYMMETRIC = sorted(name for name, row in FORMATS.items() if row.asymmetric)
BLOCK = sorted(name for name, row in FORMATS.items() if row.tile)
GRANULARITY = {
    "tensor": ({}, (6, 20)),
    "channel": ({"channelwise_axes": (0,)}, (1, 20)),
    "tile": ({"channelwise_axes": (0,), "tiled_axes": {1: 5}}, (1, 5)),
    "uneven": ({"channelwise_axes": (0,), "tiled_axes": {1: 8}}, (1, 8)),
    "blocks": ({"tiled_axes": {0: 4, 1: 0.25}}, (4, 5)),
}


def normal(shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.fixture
def op_by_op():
    """Single operations are compiled once for all formats, whole programs once for each."""
    with jax.disable_jit():
        yield


def same(a, b):
    """Equal trees, with the codes compared as numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


def close_to_oracle(q, x, wanted, scale):
    """Equal, but where the quotient lies on a tie, as the edge of an integer range always does."""
    x, back = np.asarray(x, np.float64), np.asarray(dequantize(q), np.float64)
    off = np.abs(back - wanted) > tolerances.F32_DECODE * np.abs(wanted)
    for axis, (dim, tile) in enumerate(zip(q.shape, q.tile_shape, strict=True)):
        if scale.shape[axis] != dim:
            scale = np.repeat(scale, tile, axis)
            scale = np.take(scale, range(dim), axis)
    to_tie = np.abs(np.abs(x / scale) % 1 - 0.5) if q.zero_point is None else 0.0
    assert (off <= (to_tie < tolerances.TIE)).all() and off.mean() < 0.3
    slack = 1e-3 * scale + tolerances.F32_DECODE * np.abs(x)
    np.testing.assert_array_less(np.abs(back - x), np.abs(wanted - x) + slack)


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_equals_float64(name, granularity, op_by_op):
    kwargs, tile_shape = GRANULARITY[granularity]
    x = normal((6, 20))
    q = quantize(x, name, **kwargs)
    if name == "int16":  # its grid is too long for the obvious oracle
        back = np.asarray(dequantize(q))
        assert np.abs(back - np.asarray(x)).max() <= 2 * tolerances.HALF_STEP * float(q.scale.max())
        return
    scale, decoded = oracle.symmetric(x, name, tile_shape)
    assert q.tile_shape == tile_shape and q.scale.shape == scale.shape
    np.testing.assert_allclose(np.asarray(q.scale, np.float64), scale, rtol=tolerances.F32_SCALE)
    close_to_oracle(q, x, decoded, scale)


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("name", ASYMMETRIC)
def test_asymmetric_equals_float64(name, granularity, op_by_op):
    kwargs, tile_shape = GRANULARITY[granularity]
    x = normal((6, 20)) + 0.7
    q = quantize(x, name, calibration_method="minmax", **kwargs)
    scale, zero, decoded = oracle.asymmetric(x, name, tile_shape)
    np.testing.assert_allclose(np.asarray(q.scale, np.float64), scale, rtol=tolerances.F32_SCALE)
    np.testing.assert_array_equal(np.asarray(q.zero_point, np.float64), zero)
    close_to_oracle(q, x, decoded, scale)


@pytest.mark.parametrize("length", [64, 40])
@pytest.mark.parametrize("name", BLOCK)
def test_block_formats_equal_float64(name, length, op_by_op):
    tile = FORMATS[name].tile
    x = normal((3, length))
    q = quantize(x, name, channelwise_axes=(0,), tiled_axes={1: tile})
    numbers = oracle.grid(name)
    for row in range(3):
        for n, at in enumerate(range(0, length, tile)):
            part = np.asarray(x, np.float64)[row, at : at + tile]
            absmax = np.abs(part).max()
            scale = float(q.scale[row, n])
            if name == "nvfp4":
                scale *= float(q.tensor_scale[0, 0])
                assert abs(scale / (absmax / 6) - 1) <= 2.0**-4
            else:
                assert scale == oracle.power_of_two(absmax, name)
            wanted = [oracle.nearest(v / scale, numbers, name) * scale for v in part]
            np.testing.assert_allclose(dequantize(q)[row, at : at + tile], wanted, rtol=1e-6)


PINNED = [
    ("int8", "absmax", {}, 0.00765991),
    ("int4", "absmax", {}, 0.122559),
    ("int4", "absmax", {1: 32}, 0.122559),
    ("int8", "minmax", {}, 0.00521851),
    ("int8", "minmax", {1: 32}, 0.00521851),
    ("nf4", "absmax", {1: 32}, 0.0986328),
    ("int8", "rms,7", {1: 1 / 8}, 0.017334),
    ("int8", "fixed,3", {}, 0.00765991),
    ("mxfp8", "absmax", {2: 32}, 0.0223389),
    ("mxfp4", "absmax", {2: 32}, 0.106445),
    ("nvfp4", "absmax", {2: 16}, 0.0893555),
]


@pytest.mark.parametrize("name, method, tiled, error", PINNED)
def test_pinned_errors(name, method, tiled, error):
    block = FORMATS[name].tile is not None
    shape, axes = ((10, 128, 64), (0, 1)) if block else ((10, 256, 16), (0,))
    with jax.threefry_partitionable(False):
        x = jax.random.normal(jax.random.key(42), shape, jnp.bfloat16)
    x = x + 1 if method == "minmax" else x
    q = quantize(x, name, channelwise_axes=axes, tiled_axes=tiled, calibration_method=method)
    back = dequantize(q)
    assert back.dtype == jnp.bfloat16
    got = float(jnp.mean(jnp.abs(back - x)) / jnp.mean(jnp.abs(x)))
    assert abs(got - error) < tolerances.PINNED_ERROR


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("int8", "float32"),
        ("int8", "bfloat16"),
        ("int8", "float16"),
        ("int3", "bfloat16"),
        ("nf4", "float16"),
        ("fp8", "float32"),
        ("mxfp4", "float16"),
        ("nvfp4", "bfloat16"),
        ("int1", "float32"),
    ],
)
def test_transformations(name, dtype):
    name = numerics.qtype_name(name)
    tile = FORMATS[name].tile or 16
    x = normal((3, 5, 36), dtype)
    fn = lambda x: quantize(x, name, channelwise_axes=(0,), tiled_axes={1: tile})  # noqa: E731
    q = fn(x[0])
    assert q.dtype == dtype and dequantize(q).dtype == dtype
    with jax.disable_jit():
        same(fn(x[0]), q)
    mapped = jax.vmap(fn)(x)
    assert mapped.shape == (3, 5, 36) and mapped.tile_shape == (1, 1, tile)[-3:]
    if name != "nvfp4":  # whose second level differs from slice to slice
        np.testing.assert_array_equal(
            np.asarray(dequantize(mapped)[1], np.float32),
            np.asarray(dequantize(fn(x[1])), np.float32),
        )
    assert jax.tree.structure(jax.eval_shape(fn, x[0])) == jax.tree.structure(q)
    grad = jax.grad(lambda s: dequantize(q.replace(scale=s)).astype(jnp.float32).sum())
    if FORMATS[name].scale_dtype is None:
        assert grad(q.scale).shape == q.scale.shape


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    case=st.sampled_from([("int8", "absmax"), ("int5", "absmax"), ("uint8", "minmax")]),
    magnitude=st.floats(1e-6, 1e6),
)
def test_round_trip_is_within_half_a_step(seed, case, magnitude):
    name, method = case
    x = normal((4, 20), seed=seed) * magnitude
    q = quantize(x, name, channelwise_axes=(0,), tiled_axes={1: 8}, calibration_method=method)
    step = np.repeat(np.asarray(q.scale), 8, axis=1)[:, :20]
    # A zero point is rounded too, so an edge of the range may lose half a step more.
    steps = tolerances.HALF_STEP if method == "absmax" else 2 * tolerances.HALF_STEP
    assert (np.abs(np.asarray(dequantize(q) - x)) <= steps * step).all()


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99), name=st.sampled_from(["int4", "int7", "nf4", "fp8", "mxfp8", "nvfp4"])
)
def test_quantizing_again_changes_nothing(seed, name):
    tile = numerics.format_of(name).tile or 8
    x = normal((4, 36), seed=seed)
    q = quantize(x, name, channelwise_axes=(0,), tiled_axes={1: tile})
    scale = q.scale
    if q.tensor_scale is not None:
        scale = scale.astype(jnp.float32) * q.tensor_scale
    again = quantize_with_scale_zero_point(dequantize(q), name, scale, tiles=((1, tile),))
    same(again, q)


def test_two_levels_split_the_same_way_twice():
    for largest in (1.75, 1.76, 1.8125, 1.82, 1.999, 1.0):
        scale, power = split_two_levels(jnp.array([largest, 0.3]))
        wide = scale.astype(jnp.float32) * power
        again, power_again = split_two_levels(wide)
        assert 224 < float(scale[0]) <= 448 and power_again.tolist() == power.tolist()
        assert again.tolist() == scale.tolist()


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99), name=st.sampled_from(["int8", "int4", "nf4", "fp8", "mxfp4"]))
def test_tiles_are_quantized_as_if_alone(seed, name):
    x = normal((4, 72), seed=seed)
    q = quantize(x, name, channelwise_axes=(0,), tiled_axes={1: 32})
    for n, at in enumerate((0, 32, 64)):
        part = x[:, at : at + 32]
        tiled = {1: 32} if part.shape[1] == 32 and name == "mxfp4" else {}
        if name == "mxfp4" and not tiled:
            continue
        alone = quantize(part, name, channelwise_axes=(0,), tiled_axes=tiled)
        np.testing.assert_array_equal(
            np.asarray(q.qvalue[:, at : at + 32], np.float32), np.asarray(alone.qvalue, np.float32)
        )
        np.testing.assert_array_equal(
            np.asarray(q.scale[:, n : n + 1], np.float32), np.asarray(alone.scale, np.float32)
        )


def test_logical_dtype_and_stored_scale():
    x = normal((64, 8))
    how = HowToQuantize(
        qtype="int4", channelwise_axes=(1,), tiled_axes={0: 32}, scale_dtype="float16"
    )
    q = quantize_with(x, how)
    assert (q.scale.dtype, q.dtype, dequantize(q).dtype) == (jnp.float16, jnp.float32, jnp.float32)
    wide = q.replace(scale=q.scale.astype(jnp.float32), dtype=None)
    np.testing.assert_array_equal(dequantize(q), dequantize(wide))
    same(quantize_with_scale_zero_point(x, "int4", q.scale), q)
    assert dequantize(quantize(x, "int4", scale_dtype="bfloat16")).dtype == jnp.bfloat16
    assert dequantize(quantize(x, "mxfp4", tiled_axes={0: 32})).dtype == jnp.float32
    assert q.astype(jnp.bfloat16).scale.dtype == jnp.bfloat16
    assert q.with_dtype(jnp.bfloat16).scale.dtype == jnp.float16
    assert dequantize(q.with_dtype(jnp.bfloat16)).dtype == jnp.bfloat16
    same(q.with_dtype(jnp.float16).with_dtype(jnp.float32), q)
    assert dequantize(q, jnp.float64 if jax.config.jax_enable_x64 else jnp.float16).shape == (64, 8)
    mx = quantize(x.astype(jnp.bfloat16), "mxfp4", tiled_axes={0: 32})
    assert mx.dtype == jnp.bfloat16 and mx.astype(jnp.float32).scale.dtype == jnp.float8_e8m0fnu
    same(quantize(x, "int8"), quantize_with(x, HowToQuantize(qtype=jnp.int8)))


def test_one_bit_is_the_sign_and_the_mean():
    x = jnp.array([[1.0, -3.0], [0.0, 0.0]])
    back = dequantize(quantize(x, "int1", channelwise_axes=(0,)))
    np.testing.assert_array_equal(back, [[2.0, -2.0], [0.0, 0.0]])


def test_how_is_a_value():
    a = HowToQuantize(qtype="int8", channelwise_axes=[1], tiled_axes={0: 32})
    b = HowToQuantize(qtype=jnp.int8, channelwise_axes=(1,), tiled_axes={0: np.int64(32)})
    assert a == b and hash(a) == hash(b) and a.tiled_axes == {0: 32}
    one, whole = ({"tiled_axes": {0: t}, "qtype": "int8"} for t in (1, 1.0))
    assert HowToQuantize(**one) != HowToQuantize(**whole)
    assert get_scale_shape((8, 4), HowToQuantize(**one)) == (8, 1)
    assert get_scale_shape((8, 4), HowToQuantize(**whole)) == (1, 1)
    assert get_scale_shape((100, 4), HowToQuantize(qtype="int8", tiled_axes={-2: 32})) == (4, 1)
    assert pickle.loads(pickle.dumps(a)) == a


@pytest.mark.parametrize(
    "shape, kwargs, message",
    [
        ((4, 16), {"tiled_axes": {1: 50}}, r"\(4, 16\) cannot be tiled as \{1: 50\}.*1 to 16"),
        ((4, 16), {"tiled_axes": {1: 0}}, r"cannot be tiled as \{1: 0\}"),
        ((4, 16), {"tiled_axes": {1: 0.01}}, r"cannot be tiled as"),
        ((4, 16), {"tiled_axes": {1: "a"}}, "cannot have the tile 'a'"),
        ((4, 16), {"tiled_axes": {1: 4}, "channelwise_axes": (1,)}, "both channelwise and tiled."),
        ((4, 16), {"tiled_axes": {-1: 4}, "channelwise_axes": (1,)}, "both channelwise and tiled."),
        ((4, 16), {"channelwise_axes": (2,)}, "Axis 2 is out of range"),
        ((4, 16), {"qtype": "mxfp4"}, "Format mxfp4 requires `tiled_axes` to be specified."),
        (
            (4, 32),
            {"qtype": "mxfp4", "tiled_axes": {1: 16}},
            "Format mxfp4 requires a tile size of 32, but axis 1 got 16.",
        ),
    ],
)
def test_granularity_errors(shape, kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones(shape), **({"qtype": "int8"} | kwargs))


def test_refusals():
    with pytest.raises(ValueError, match="Refuse to quantize: int32"):
        quantize(jnp.ones(4, jnp.int32), "int8")
    with pytest.raises(ValueError, match="block/w holds 2 values that are NaN.*index \\(0, 1\\)"):
        check_finite(jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0]]), "block/w")
    check_finite(jnp.ones(3), "w")
    jax.jit(lambda x: check_finite(x, "w"))(jnp.array([jnp.nan]))


def test_validation():
    codes = jnp.zeros((4, 8), jnp.int8)
    validate_qarray(QArray(codes, jnp.ones((2, 8))))
    cases = [
        (QArray(codes, jnp.ones(8)), "should have the same rank as qvalue"),
        (QArray(codes, jnp.ones((3, 8))), "should be broadcastable to qvalue.*axis 0, 3"),
        (QArray(codes.astype(jnp.float32), jnp.ones((1, 8))), "float32 is not a valid type for qv"),
        (QArray(codes, jnp.ones((1, 8), jnp.int32)), "int32 is not a valid type for scale"),
        (QArray(codes, jnp.ones((1, 8)), jnp.zeros(8, jnp.int8)), "Zero point .8,. should have"),
        (QArray(codes, jnp.ones((1, 8)), jnp.zeros((1, 8))), "not a valid type for zero point"),
        (QArray(codes, jnp.ones((1, 8)), None, "int4"), "int4 is stored as int4"),
    ]
    for q, message in cases:
        with pytest.raises(ValueError, match=message):
            dequantize(q)
    validate_qarray(QArray(PartitionSpec("x"), PartitionSpec(None)))


def test_pytree():
    q = quantize(normal((4, 40)), "int4", tiled_axes={1: 32}, calibration_method="minmax")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".qvalue", ".scale", ".zero_point"]
    same(jax.tree.map(lambda x: x, q), q)
    assert jax.tree.structure(quantize(normal((2, 2)), jnp.int8)) == jax.tree.structure(
        quantize(normal((2, 2)), "int8")
    )
    boxes = jax.tree.map(lambda _: object(), q)
    assert isinstance(boxes, QArray) and boxes.qtype == jnp.int4
    assert QArray(object(), object()).qtype is None
    same(pickle.loads(pickle.dumps(q)), q)
    same(copy.deepcopy(q), q)
    with pytest.raises(AttributeError, match=r"q.replace\(scale=...\)"):
        q.scale = 1
    assert q != quantize(normal((4, 40)), "int4") and q == q and hash(q) == hash(q)


def test_repr_and_sizes():
    q = quantize(jnp.ones((32, 64)), "int8", channelwise_axes=(1,))
    assert repr(q) == "QArray(qvalue=int8[32,64], scale=float32[1,64], qtype=int8)"
    assert q.nbytes == 32 * 64 + 64 * 4 and q.size == 2048 and len(q) == 32
    assert quantize(jnp.ones((32, 64)), "int4", channelwise_axes=(1,)).nbytes == 1024 + 256
    three = pack(quantize(jnp.ones((2, 100)), "int3", tiled_axes={1: 32}))
    assert "tiles=((-1, 32),)" in repr(three) and "layout=bits" in repr(three)
    assert "qvalue=int8[32,64]" in repr(jax.eval_shape(lambda: q))
    how = HowToQuantize(qtype="int8")
    assert repr(WithAux(q, how)).startswith("WithAux(array=QArray(qvalue=int8[32,64]")


def test_arithmetic_teaches():
    q = quantize(jnp.ones((2, 2)), "int8")
    x = jnp.ones((2, 2))
    acts = [lambda: q + 1, lambda: 1 - q, lambda: x * q, lambda: q @ x, lambda: x @ q]
    acts += [lambda: np.ones((2, 2)) @ q, lambda: np.asarray(q), lambda: q / x, lambda: -q]
    acts += [lambda: x @ WithAux(q, HowToQuantize(qtype="int8"))]
    for act in acts:
        with pytest.raises(TypeError, match="fewbit.dot_general.*fewbit.dequantize"):
            act()


def test_with_aux():
    how = HowToQuantize(qtype="int8", channelwise_axes=(1,))
    w = WithAux(quantize_with(normal((4, 6)), how), how)
    assert (w.shape, w.ndim, w.dtype, w.value) == ((4, 6), 2, jnp.float32, w.array)
    assert w.astype(jnp.bfloat16).dtype == jnp.bfloat16
    assert w.reshape(2, 2, 6).shape == (2, 2, 6) and w[0].shape == (6,)
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(w)
    assert jax.tree_util.keystr(path) == ".array.qvalue"
    assert jax.jit(lambda w: w)(w).how == how


def test_known_scales():
    x = normal((4, 100))
    how = HowToQuantize(qtype="int8", tiled_axes={1: 32})
    scale, zero = compute_scale_zero_point(calibrate(x, how), "int8")
    same(
        quantize_with_scale_zero_point(x, "int8", scale, zero, tiles=((1, 32),)),
        quantize_with(x, how),
    )
    with pytest.raises(ValueError, match="pass tiles="):
        quantize_with_scale_zero_point(x, "int8", jnp.ones((1, 3)))


def test_noise_reaches_the_codes():
    how = HowToQuantize(
        qtype="int8", calibration_method="fixed,127.5", noise_fn=lambda s: jnp.full(s, 0.4)
    )
    assert quantize_with(jnp.array([0.2, 1.0]), how).qvalue.tolist() == [1, 1]


def test_the_edge_of_a_range():
    for name, edge in (("int8", 127), ("int4", 7)):
        assert quantize(jnp.array([1.0, -1.0]), name).qvalue.tolist() == [edge, -edge]


# --- equality -------------------------------------------------------------------------------------


def made(qtype="int8", **fields):
    fields = dict(channelwise_axes=(1,)) | fields
    return quantize(normal((8, 6)), qtype, **fields)


def test_equal_arrays_are_equal_and_others_are_not():
    q = made()
    for other in (made(), made(jnp.int8), made(np.dtype("int8")), copy.deepcopy(q)):
        assert (
            q == other
            and hash(q) == hash(other)
            and jax.tree.structure(q) == (jax.tree.structure(other))
        )
    assert q == pickle.loads(pickle.dumps(q)) and q == jax.tree.map(lambda part: part, q)
    assert q in [made("int4"), made()] and {q: 1}[made()] == 1
    different = [
        made("int4"),
        made(channelwise_axes=(0,)),
        q.T,
        q.replace(scale=q.scale * 2),
        q.replace(qvalue=q.qvalue.at[0, 0].add(1)),
        q.astype(jnp.bfloat16),
        q.with_dtype(jnp.bfloat16),
        q.replace(qtype="int7"),
        q.replace(scale=None),
    ]
    for other in different:
        assert q != other and other != q and not q == other
    assert (q == None) is False and q != "int8" and q != ()  # noqa: E711
    nan = q.replace(scale=q.scale * jnp.nan)
    assert nan == q.replace(scale=q.scale * jnp.nan)  # scales that are still to come are NaN
    assert pack(made("int4")) != made("int4") and pack(made("int4")) == pack(made("int4"))


def test_equality_of_abstract_values_and_specs():
    abstract = jax.eval_shape(made)
    assert abstract == jax.eval_shape(made) != jax.eval_shape(lambda: made("int4"))
    assert abstract != made()
    specs = jax.tree.map(lambda part: PartitionSpec(None, "x"), made())
    assert specs == jax.tree.map(lambda part: PartitionSpec(None, "x"), made())
    assert specs != jax.tree.map(lambda part: PartitionSpec("x", None), made())


def test_equality_of_parameters():
    how = HowToQuantize(qtype="int8", channelwise_axes=[1])
    same_how = HowToQuantize(qtype=jnp.int8, channelwise_axes=(1,), calibration_method="AbsMax, 1")
    plain = HowToQuantize(qtype="int8", channelwise_axes=(1,), calibration_method="AbsMax")
    assert how == plain and hash(how) == hash(plain) and how != same_how
    assert WithAux(made(), how) == WithAux(made(), plain)
    assert hash(WithAux(made(), how)) == hash(WithAux(made(), plain))
    assert WithAux(made(), how) != WithAux(made(), how.replace(rule="other"))
    assert WithAux(made(), how) != WithAux(made("int4"), how) and WithAux(made(), how) != made()
    assert WithAux(jnp.ones(3), how) == WithAux(jnp.ones(3), how)  # a static scale
    tree, other = ({"w": WithAux(made(), h), "b": None} for h in (how, plain))
    assert tree == other and jax.tree.structure(tree) == jax.tree.structure(other)
    one, shared = (HowToQuantize(qtype="int8", tiled_axes={0: t}) for t in (1, 1.0))
    assert one != shared


@pytest.mark.parametrize("wrap", [lambda q: q, lambda q: WithAux(q, HowToQuantize(qtype="int8"))])
def test_equality_that_has_no_answer(wrap):
    q = wrap(made())
    for other in (jnp.ones((8, 6)), np.ones((8, 6)), np.float32(1), 1.0, 0):
        for compare in (lambda a, b: a == b, lambda a, b: b == a, lambda a, b: a != b):
            with pytest.raises(TypeError, match=r"QArray\(.*has no answer.*dequantize"):
                compare(q, other)
    with pytest.raises(TypeError, match="is being traced.*jax.tree.map.jax.numpy.array_equal, a"):
        jax.jit(lambda a, b: a == b)(q, wrap(made()))


@pytest.mark.parametrize("name", ["plain", "bits", "panels", "copy"])
def test_dataclasses_replace_keeps_what_the_parts_mean(name):
    """It knows parts alone: an int3 array would come back as one of int4."""
    tiled = dict(tiled_axes={0: 4}) if name != "panels" else {}
    q = made("int3", **tiled)
    q = {"bits": pack, "panels": lambda q: to_panels(q, "kn")}.get(name, lambda q: q)(q)
    change = (
        getattr(copy, "replace", dataclasses.replace) if name == "copy" else dataclasses.replace
    )
    again = change(q, scale=2 * q.scale)
    assert (again.layout, again.dtype) == ("plain", q.dtype)
    assert (again.qtype, again.tiles) == (q.qtype, q.tiles)
    assert jnp.array_equal(dequantize(again), 2 * dequantize(q))
    assert change(q).replace(dtype=None) == unpack(q).replace(dtype=None)
    assert change(q, qtype="int4").qtype == jnp.dtype("int4")
    how = HowToQuantize(qtype="int3")
    assert change(WithAux(q, how), array=again) == WithAux(again, how)
    assert [field.name for field in dataclasses.fields(q)] == [
        *("qvalue", "scale", "zero_point", "tensor_scale")
    ]
    assert [field.name for field in dataclasses.fields(WithAux(q, how))] == ["array"]
    assert dict(inspect.getmembers(q))["shape"] == q.shape
    assert q.scale_tile_shape == q.tile_shape
    half = change(made("int8").replace(dtype="bfloat16"), scale=q.scale)
    assert half.dtype == jnp.bfloat16
