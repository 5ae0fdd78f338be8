"""Products of int8 codes by the kernels: equal to XLA's bit for bit, in every order of axes."""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from machines import PATHS
from tolerances import CODES_STEP, CODES_TILES

import fewbit
from fewbit import kernels, ops
from fewbit.kernels import codes_dot
from fewbit.kernels._codes import CodesProduct, _bind, _call, codes_dot_p
from fewbit.qarray import quantize

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

ROOT = pathlib.Path(__file__).parents[2]
MATMUL = (((1,), (0,)), ((), ()))
NONE = np.zeros((0,), np.float32)


def codes(*shape, seed=0, low=-128):
    return np.random.default_rng(seed).integers(low, 128, shape).astype(np.int8)


def scales(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.01, 2, shape).astype(np.float32)


def native(lhs, rhs, numbers, *scales, out="int32"):
    """The call itself, however small the product."""
    spec = CodesProduct(numbers, out)
    return jax.jit(functools.partial(_call, spec=spec))(lhs, rhs, *(scales or (NONE, NONE)))


def xla(lhs, rhs, numbers):
    return lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.int32)


def exact(lhs, rhs, numbers):
    """By int64, modulo 2^32."""
    (lc, rc), (lb, rb) = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(letters) for _ in lhs.shape]
    right = [next(letters) for _ in rhs.shape]
    for mine, other in ((lc, rc), (lb, rb)):
        for a, b in zip(mine, other, strict=True):
            right[b] = left[a]
    batch = [left[a] for a in lb]
    out = batch + [c for c in left if c not in right] + [c for c in right if c not in left]
    text = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    return np.einsum(text, lhs.astype(np.int64), rhs.astype(np.int64)).astype(np.int32)


def same(lhs, rhs, numbers):
    np.testing.assert_array_equal(native(lhs, rhs, numbers), exact(lhs, rhs, numbers))


def check_scaled(lhs, rhs, numbers, out):
    (lc, rc), (lb, rb) = numbers

    def lines(x, summed, batch):
        free = [a for a in range(x.ndim) if a not in (*summed, *batch)]
        return scales(*(x.shape[a] for a in (*batch, *free)), seed=x.ndim)

    left, right = lines(lhs, lc, lb), lines(rhs, rc, rb)
    rows, columns = left.ndim - len(lb), right.ndim - len(lb)
    total = exact(lhs, rhs, numbers).astype(np.float32)
    total = total * left.reshape((*left.shape, *[1] * columns))
    total = total * right.reshape((*right.shape[: len(lb)], *[1] * rows, *right.shape[len(lb) :]))
    got = native(lhs, rhs, numbers, left, right, out=out)
    np.testing.assert_array_equal(np.asarray(got), total.astype(got.dtype))


# --- the call: shapes and orders ------------------------------------------------------------------

ORDERS = {
    "mk,kn": MATMUL,
    "mk,nk": (((1,), (1,)), ((), ())),
    "km,kn": (((0,), (0,)), ((), ())),
    "km,nk": (((0,), (1,)), ((), ())),
}


def shaped(order, m, k, n, seed=0):
    sizes = dict(m=m, k=k, n=n)
    left, right = order.split(",")
    return codes(*(sizes[c] for c in left), seed=seed), codes(*(sizes[c] for c in right), seed=1)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_columns_and_lengths_that_are_multiples_of_nothing(order):
    for m in (1, 2, 3, 4, 5, 6, 7, 13, 70):
        for k, n in ((1, 1), (3, 17), (31, 16), (33, 5), (64, 64), (100, 130), (37, 1), (66, 65)):
            same(*shaped(order, m, k, n, seed=m), ORDERS[order])


@pytest.mark.parametrize("order", ORDERS)
def test_long_sums_in_pieces_and_wide_rows_in_blocks(order):
    for m, k, n in ((1, 2500, 3), (3, 70, 5000), (9, 2500, 70), (300, 1100, 70), (5000, 40, 2)):
        same(*shaped(order, m, k, n), ORDERS[order])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("m", (1, 9))
def test_the_smallest_codes_and_sums_beyond_int32(order, m):
    lhs, rhs = shaped(order, m, 2**17, 2)
    for low in (-128, 127):
        lhs[:], rhs[:] = low, low
        same(lhs, rhs, ORDERS[order])
        np.testing.assert_array_equal(native(lhs, rhs, ORDERS[order]), xla(lhs, rhs, ORDERS[order]))
    rhs[:] = -128
    same(lhs, rhs, ORDERS[order])


ATTENTION = {
    "scores": ((2, 9, 3, 64), (2, 33, 3, 64), (((3,), (3,)), ((0, 2), (0, 2)))),
    "values": ((2, 3, 9, 33), (2, 33, 3, 64), (((3,), (1,)), ((0, 1), (0, 2)))),
    "one query": ((2, 1, 3, 64), (2, 70, 3, 64), (((3,), (3,)), ((0, 2), (0, 2)))),
    "its values": ((2, 3, 1, 70), (2, 70, 3, 64), (((3,), (1,)), ((0, 1), (0, 2)))),
    "odd heads": ((2, 3, 1, 71), (2, 71, 3, 20), (((3,), (1,)), ((0, 1), (0, 2)))),
    "summed over heads": ((5, 3, 20), (3, 20, 30), (((1, 2), (0, 1)), ((), ()))),
    "summed in another order": ((5, 3, 20), (20, 30, 3), (((1, 2), (2, 0)), ((), ()))),
    "scattered": ((3, 4, 17, 5), (5, 3, 4, 17), (((0, 3), (1, 0)), ((1,), (2,)))),
    "weight on the left": ((40, 30), (2, 7, 40), (((0,), (2,)), ((), ()))),
    "many entries": ((300, 3, 5), (300, 5, 4), (((2,), (1,)), ((0,), (0,)))),
    "vectors": ((50,), (50,), (((0,), (0,)), ((), ()))),
    "no contraction": ((5,), (6,), (((), ()), ((), ()))),
    "nothing but a batch": ((5,), (5,), (((), ()), ((0,), (0,)))),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_operands_are_read_as_they_lie(name):
    left, right, numbers = ATTENTION[name]
    lhs, rhs = codes(*left), codes(*right, seed=1)
    same(lhs, rhs, numbers)
    for out in ("float32", "bfloat16"):
        check_scaled(lhs, rhs, numbers, out)


@pytest.mark.parametrize("m", (1, 4, 9))
def test_scaled_sums_have_the_bits_of_the_xla_program(m):
    for n in (1, 3, 70, 300):
        for order in ORDERS:
            check_scaled(*shaped(order, m, 50, n), ORDERS[order], "float32")
            check_scaled(*shaped(order, m, 50, n), ORDERS[order], "bfloat16")


def test_scales_that_are_not_finite_reach_their_row_and_column_alone():
    for m in (2, 9):
        left, right = np.ones(m, np.float32), np.ones(40, np.float32)
        left[1], right[5] = np.nan, np.inf
        lhs, rhs = codes(m, 8, low=1), codes(8, 40, low=1)
        out = np.array(native(lhs, rhs, MATMUL, left, right, out="float32"))
        assert np.isnan(out[1]).all() and np.isinf(out[0, 5])
        assert np.isfinite(np.delete(out[0], 5)).all()
        half = np.array(native(lhs, rhs, MATMUL, left, right, out="bfloat16"))
        assert np.isnan(half[1].astype(np.float32)).all()


def test_empty_axes():
    for m, k, n in ((0, 5, 6), (5, 0, 6), (5, 6, 0), (1, 0, 6), (0, 0, 0)):
        same(codes(m, k), codes(k, n), MATMUL)
    check_scaled(codes(5, 0), codes(0, 6), MATMUL, "float32")
    same(codes(0, 5, 6), codes(0, 6, 7), (((2,), (1,)), ((0,), (0,))))


@st.composite
def problems(draw):
    kinds = draw(st.permutations("bbkkmm"))[: draw(st.integers(1, 4))]
    sizes = {kind + str(i): draw(st.integers(1, 40)) for i, kind in enumerate(kinds)}
    left = draw(st.permutations(list(sizes)))
    shared = {name: size for name, size in sizes.items() if name[0] in "bk"}
    extra = {f"n{i}": draw(st.integers(1, 40)) for i in range(draw(st.integers(0, 2)))}
    right = draw(st.permutations([*shared, *extra]))
    sizes |= extra

    def axes(kind):
        names = [name for name in shared if name[0] == kind]
        return tuple(left.index(n) for n in names), tuple(right.index(n) for n in names)

    shapes = tuple(sizes[n] for n in left), tuple(sizes[n] for n in right)
    return *shapes, (axes("k"), axes("b"))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_any_dimension_numbers(problem):
    left, right, numbers = problem
    if np.prod(left) > 30000 or np.prod(right) > 30000:
        left, right = (tuple(min(size, 6) for size in shape) for shape in (left, right))
    lhs, rhs = codes(*left), codes(*right, seed=1)
    same(lhs, rhs, numbers)
    np.testing.assert_array_equal(native(lhs, rhs, numbers), xla(lhs, rhs, numbers))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(lhs=codes(5, 7).astype(np.int16)), "lhs must be int8"),
        (dict(rhs=codes(8, 6)), r"contracting axes \[1\] of lhs \[5,7\] and \[0\] of rhs \[8,6\]"),
        (dict(lhs_summed=(2,)), "lhs has no axis 2"),
        (dict(lhs_summed=(-1,)), "lhs has no axis -1"),
        (dict(rhs_summed=(0, 0)), "rhs has no axis 0, or it is named twice"),
        (dict(lhs_summed=()), "differ in number or length"),
        (dict(lhs_batch=(0,), rhs_batch=(1,)), r"batch axes \[0\] of lhs"),
        (dict(shape=(5, 5)), r"the result must have the shape \[5,6\] but has \[5,5\]"),
        (dict(dtype=np.int8), "the result must be int32, float32 or bfloat16"),
        (dict(dtype=np.float32), r"lhs_scale must have the shape \[5\] but has \[0\]"),
        (dict(lhs_scale=np.ones(5, np.float32)), "lhs_scale belongs to a float result"),
        (dict(rhs_scale=np.zeros(0, np.int32)), "rhs_scale must be float32"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_read(change, message):
    operands = dict(lhs=codes(5, 7), rhs=codes(7, 6), lhs_scale=NONE, rhs_scale=NONE)
    axes = dict(lhs_batch=(), rhs_batch=(), lhs_summed=(1,), rhs_summed=(0,))
    operands |= {k: v for k, v in change.items() if k in operands}
    axes |= {k: v for k, v in change.items() if k in axes}
    result = jax.ShapeDtypeStruct(change.get("shape", (5, 6)), change.get("dtype", np.int32))
    call = jax.ffi.ffi_call("fewbit_codes_dot", result)
    attributes = {k: np.asarray(v, np.int64) for k, v in axes.items()}
    with pytest.raises(Exception, match=message):
        jax.jit(lambda a: call(*a, **attributes))(tuple(operands.values())).block_until_ready()


def test_the_python_side_says_what_it_multiplies():
    with pytest.raises(TypeError, match="int8 by int8, got int16"):
        codes_dot(jnp.zeros((2, 2), jnp.int16), jnp.zeros((2, 2), jnp.int8), MATMUL)
    with pytest.raises(ValueError, match="float32 does not go with 0 scales"):
        codes_dot(codes(2, 2), codes(2, 2), MATMUL, out_dtype=jnp.float32)
    with pytest.raises(ValueError, match="int32 does not go with 2 scales"):
        codes_dot(codes(2, 2), codes(2, 2), MATMUL, scales(2), scales(2))


def portable():
    for order in ORDERS:
        for m, k, n in ((1, 37, 19), (3, 100, 70), (4, 33, 200), (9, 1100, 66), (70, 64, 5)):
            same(*shaped(order, m, k, n), ORDERS[order])
        check_scaled(*shaped(order, 3, 50, 33), ORDERS[order], "bfloat16")
    for left, right, numbers in ATTENTION.values():
        same(codes(*left), codes(*right), numbers)


@pytest.mark.parametrize("isa", ("portable", "avx2", "avx512_vnni"))
def test_instruction_sets_agree(isa):
    code = "import test_codes_dot as t; from fewbit import kernels; i = kernels.info(); \
print(i.missing or i.isa); i.native and (t.portable(), print('right'))"
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


# --- the primitive: transformations ---------------------------------------------------------------


def both_ways(function, *args):
    """A program with the primitive, and with XLA's product in its place."""
    with_kernels = jax.jit(lambda *a: function(codes_dot, *a)).lower(*args)
    assert "fewbit_codes_dot" in with_kernels.as_text()
    plain = jax.jit(lambda *a: function(xla, *a))(*args)
    jax.tree.map(np.testing.assert_array_equal, with_kernels.compile()(*args), plain)


A, B = codes(40, 70), codes(70, 50)
STACK_A, STACK_B = codes(3, 40, 70), codes(70, 3, 50)


def test_vmap_of_either_side_and_of_both():
    def product(dot, a, b):
        return dot(a, b, MATMUL)

    for dims, args in (
        ((0, None), (STACK_A, B)),
        ((None, 1), (A, STACK_B)),
        ((0, 1), (STACK_A, STACK_B)),
    ):
        for out in (0, 1, 2):
            both_ways(
                lambda dot, a, b, dims=dims, out=out: jax.vmap(
                    functools.partial(product, dot), dims, out
                )(a, b),
                *args,
            )
    numbers = (((2,), (1,)), ((0,), (0,)))
    entries = codes(3, 2, 40, 70), codes(2, 70, 50, 3)
    both_ways(lambda dot, a, b: jax.vmap(lambda a, b: dot(a, b, numbers), (0, 3))(a, b), *entries)


@pytest.mark.parametrize("dims", [(0, None, 0, None), (0, 1, None, 0), (None, None, 1, None),
                                  (None, 1, None, 1), (0, 1, 1, 1)])  # fmt: skip
def test_vmap_with_scales(dims):
    shapes = [STACK_A, STACK_B, scales(40, 3), scales(50, 3)]
    args = [
        (A, B, shapes[2][:, 0], shapes[3][:, 0])[i] if d is None else
        np.moveaxis(shapes[i], (0, 1, 1, 1)[i], d)
        for i, d in enumerate(dims)
    ]  # fmt: skip
    spec = CodesProduct(MATMUL, "float32")
    each = jax.vmap(functools.partial(_bind, spec=spec), dims)
    whole = [
        np.moveaxis(a, d, 0) if d is not None else np.broadcast_to(a, (3, *a.shape))
        for a, d in zip(args, dims, strict=True)
    ]
    for got, *one in zip(jax.jit(each)(*args), *whole, strict=True):
        want = exact(one[0], one[1], MATMUL).astype(np.float32) * one[2][:, None] * one[3][None]
        np.testing.assert_array_equal(got, want)


def test_control_flow():
    def loop(dot, a, b):
        def step(a, _):
            total = dot(a, b, MATMUL)
            return (total[:, :1] + a.astype(jnp.int32)).astype(jnp.int8), total

        return lax.scan(step, a, None, length=3)

    both_ways(loop, A, B)

    def either(dot, a, b):
        return lax.cond(a[0, 0] > 0, lambda: dot(a, b, MATMUL), lambda: dot(-a, b, MATMUL))

    both_ways(either, A, B)
    with jax.disable_jit():
        np.testing.assert_array_equal(codes_dot(A, B, MATMUL), exact(A, B, MATMUL))


def test_scales_have_derivatives_and_codes_have_none():
    left, right = scales(40), scales(50)

    def loss(left, right, dot):
        return jnp.sum(jnp.sin(dot(left, right)))

    def ours(left, right):
        return codes_dot(A, B, MATMUL, left, right, jnp.float32)

    def plain(left, right):
        return xla(A, B, MATMUL).astype(jnp.float32) * left[:, None] * right[None]

    for argnums in (0, 1, (0, 1)):
        got = jax.jit(jax.grad(loss, argnums), static_argnums=2)(left, right, ours)
        want = jax.jit(jax.grad(loss, argnums), static_argnums=2)(left, right, plain)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)

    def of_rounded(x):
        return codes_dot(jnp.round(x).astype(jnp.int8), B, MATMUL)

    x = jnp.asarray(A, jnp.float32)
    got = jax.jvp(of_rounded, (x,), (x,))
    assert got[1].dtype == jax.dtypes.float0


def test_small_products_symbolic_ones_and_other_platforms_are_plain():
    assert not kernels.runs_natively(A[:2, :3], B[:3], MATMUL)
    assert kernels.runs_natively(A, B, MATMUL)
    dot = jax.jit(lambda a, b: codes_dot(a, b, MATMUL))
    for platform in ("tpu", "cuda"):
        text = dot.trace(A, B).lower(lowering_platforms=(platform,)).as_text()
        assert "fewbit" not in text and "tensor<70x50xi8>) -> tensor<40x50xi32>" in text
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(dot)(jax.ShapeDtypeStruct((rows, 70), jnp.int8), B)
    np.testing.assert_array_equal(exported.call(A, B), exact(A, B, MATMUL))
    static = jax.export.export(dot)(A, B)
    np.testing.assert_array_equal(static.call(A, B), exact(A, B, MATMUL))
    assert "custom_call @fewbit" not in static.mlir_module()


def test_many_python_threads():
    cases = [(codes(300, 64, seed=i), codes(64, 80, seed=i)) for i in range(4)]
    cases += [(codes(1, 640, seed=i), codes(640, 800, seed=i)) for i in range(4)]
    want = [exact(a, b, MATMUL) for a, b in cases]
    dot = jax.jit(lambda a, b: codes_dot(a, b, MATMUL))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: np.asarray(dot(*cases[i % 8])), range(64)))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, want[i % 8])


# --- devices --------------------------------------------------------------------------------------


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def placed(array, spec, kind=AxisType.Auto):
    return jax.device_put(array, NamedSharding(mesh(kind), spec))


@pytest.mark.parametrize("lhs, rhs, out, moves", [
    (P("x"), P(), P("x"), ""),
    (P("x"), P(None, "y"), P("x", "y"), ""),
    (P(), P(None, ("x", "y")), P(None, ("x", "y")), ""),
    (P(None, "x"), P("x"), None, "all-reduce"),
    (P("y", "x"), P("x"), None, "all-reduce"),
])  # fmt: skip
@pytest.mark.parametrize("scaled", (False, True))
def test_devices_share_rows_columns_and_sums_without_gathering(lhs, rhs, out, moves, scaled):
    a, b, left, right = codes(48, 72), codes(72, 80), scales(48), scales(80)
    want = exact(a, b, MATMUL)
    more = []
    if scaled:
        more = [left, right]
        want = want.astype(np.float32) * left[:, None] * right[None]

    def dot(a, b, *more):
        return codes_dot(a, b, MATMUL, *more, out_dtype=jnp.float32 if more else jnp.int32)

    args = (placed(a, lhs), placed(b, rhs), *more)
    compiled = jax.jit(dot).lower(*args).compile()
    text = compiled.as_text()
    assert "fewbit_codes_dot" in text and "all-gather" not in text and moves in text
    result = compiled(*args)
    assert out is None or result.sharding.spec == out
    np.testing.assert_array_equal(result, want)


def test_devices_share_a_batch():
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    a, b = codes(4, 9, 2, 64), codes(4, 33, 2, 64)
    args = placed(a, P("x", None, "y")), placed(b, P("x", None, "y"))
    compiled = jax.jit(lambda a, b: codes_dot(a, b, numbers)).lower(*args).compile()
    assert "fewbit_codes_dot" in compiled.as_text() and "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(*args), exact(a, b, numbers))


def test_shard_map_and_explicit_meshes():
    each = jax.jit(
        jax.shard_map(
            lambda a, b: lax.psum(codes_dot(a, b, MATMUL), "y"),
            mesh=mesh(),
            in_specs=(P("x", "y"), P("y")),
            out_specs=P("x"),
        )
    )
    a, b = codes(512, 256), codes(256, 96)
    assert "fewbit_codes_dot" in each.lower(a, b).as_text()
    np.testing.assert_array_equal(each(a, b), exact(a, b, MATMUL))
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    q = quantize(x, "int8", channelwise_axes=(0,))
    want = ops.dot_general(q, q, (((1,), (1,)), ((), ())))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        there = jax.tree.map(lambda part: placed(part, P("x"), AxisType.Explicit), q)
        out = jax.jit(
            lambda q: ops.dot_general(q, q, (((1,), (1,)), ((), ())), out_sharding=P("x"))
        )
        np.testing.assert_array_equal(out(there), want)


# --- the ops on top, and models -------------------------------------------------------------------


def through_xla(monkeypatch):
    monkeypatch.setattr("fewbit.kernels._codes._FEWEST_PRODUCTS", 2**62)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("how", ["plain", "tiled", "asymmetric", "shared", "int4"])
def test_quantized_products_keep_their_bits(how, dtype, monkeypatch):
    tiled = {1: 128} if how == "tiled" else None
    kind = "int4" if how == "int4" else "int8"
    method = "minmax" if how == "asymmetric" else "absmax"
    axes = () if how == "shared" else (0,)
    x, w = (jnp.asarray(normal(40, 300, seed=i), dtype) for i in range(2))
    numbers = (((1,), (1,)), ((), ()))

    def product(x, w):
        left = quantize(x, kind, channelwise_axes=axes, tiled_axes=tiled, calibration_method=method)
        right = quantize(w, "int8", channelwise_axes=(0,), tiled_axes=tiled)
        return ops.dot_general(left, right, numbers), ops.describe_dot(left, right, numbers)

    def run():
        words = []
        out = jax.jit(lambda x, w: (words.append(product(x, w)), words[0][0])[1])(x, w)
        return np.asarray(out), words[0][1]

    ours, word = run()
    through_xla(monkeypatch)
    plain, other = run()
    if how == "tiled":  # XLA fuses a scale with the sum over tiles, and rounds once for both
        np.testing.assert_allclose(ours, plain, rtol=0, atol=CODES_TILES * np.abs(plain).max())
    else:
        np.testing.assert_array_equal(ours, plain)
    assert (word, other) == ("native int8", "int8 dot")


def attention(params, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 8.0)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


@pytest.mark.parametrize("length", (1, 24))
def test_attention_runs_natively_as_the_plan_says_and_equals_xla(length, monkeypatch):
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    params = {name: normal(64, 3, 40, seed=i) / 8 for i, name in enumerate("qkv")}
    x = normal(2, 70, 64)

    def model(params, x):
        return attention(params, x)[:, :length]

    plan = fewbit.plan(model, rules, params, x)
    assert {row.runs_on for row in plan.sites} == {"native int8"}
    qparams = fewbit.unpack(fewbit.quantize_params(params, plan))
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    grad = jax.jit(jax.grad(lambda x: jnp.sum(quantized(qparams, x) ** 2)))
    ours = np.asarray(jax.jit(quantized)(qparams, x)), np.asarray(grad(x))
    assert jax.jit(quantized).lower(qparams, x).as_text().count("@fewbit_codes_dot") == 5
    through_xla(monkeypatch)
    jax.clear_caches()
    again = fewbit.quantize_model(model, fewbit.PtqProvider(rules))
    plain = jax.jit(again)(qparams, x)
    np.testing.assert_array_equal(ours[0], plain)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(again(qparams, x) ** 2)))
    np.testing.assert_allclose(ours[1], grad(x), rtol=1e-4, atol=1e-4)


@jax.custom_vjp
def int8_dense(x, w):
    return forward(x, w)[0]


def int8(x, axis):
    return quantize(x, "int8", channelwise_axes=(axis,))


def forward(x, w):
    return ops.dot_general(int8(x, 0), int8(w, 1), MATMUL), (x, w)


def backward(saved, g):
    x, w = saved
    dx = ops.dot_general(int8(g, 0), int8(w, 0), (((1,), (1,)), ((), ())))
    dw = ops.dot_general(int8(x, 1), int8(g, 1), (((0,), (0,)), ((), ())))
    return dx, dw


int8_dense.defvjp(forward, backward)


def test_a_quantized_training_step_equals_the_xla_one(monkeypatch):
    params = [normal(64, 90, seed=1) / 8, normal(90, 64, seed=2) / 8]
    x, y = normal(33, 64), normal(33, 64, seed=3)

    def step(params, x, y):
        def loss(params):
            return jnp.mean((int8_dense(jnp.tanh(int8_dense(x, params[0])), params[1]) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    text = jax.jit(step).lower(params, x, y).as_text()
    assert text.count("@fewbit_codes_dot") == 5  # nobody asks for the gradient of x
    ours = jax.jit(step)(params, x, y)
    through_xla(monkeypatch)
    jax.clear_caches()
    plain = jax.jit(lambda *a: step(*a))(params, x, y)
    # XLA fuses the last scale with what follows, and the last place of a number may turn a code.
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=CODES_STEP * np.abs(b).max())


def test_the_primitive_says_its_name():
    text = str(jax.make_jaxpr(lambda a, b: codes_dot(a, b, MATMUL))(A, B))
    assert codes_dot_p.name in text and dataclasses.is_dataclass(CodesProduct)
