"""The native product against float64 and int64, on every format, shape and instruction set."""

import concurrent.futures
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from machines import PATHS

import fewbit
from fewbit import kernels
from fewbit.kernels._matmul import FORMATS, matmul
from fewbit.numerics import get_nf4_buckets

ROOT = pathlib.Path(__file__).parents[2]
INTEGERS = tuple(name for name in FORMATS if "int" in name)
GROUPS = (0, 16, 32, 64, 128)
# The last two are cut like 32, in longer segments: checked in every format by `make test-all`.
EACH_GROUP = [*GROUPS[:3], *(pytest.param(g, marks=pytest.mark.long) for g in GROUPS[3:])]
ROWS = (0, 1, 2, 3, 5, 64)
SHAPES = ((37, 1), (96, 63), (1000, 65), (37, 130), (1000, 1), (96, 130), (33, 64))
SCALES = ("float32", "float16", "bfloat16", "float8_e8m0fnu", "float8_e4m3fn")
BOUND = 2e-6  # of sum |x| |w|

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"native part: {kernels.info().missing}"
)


def bits_of(name):
    return {"uint4": 4, "uint8": 8, "nf4": 4, "float4_e2m1fn": 4}.get(
        name, int(name[3]) if name.startswith("int") else 8
    )


def unsigned_zero(name):
    """The code of zero of an integer format without zero points."""
    return 2 ** (bits_of(name) - 1) if name.startswith("int") else 0


def padding(name):
    return 7 if name == "nf4" else unsigned_zero(name)


def values_of(codes, name):
    """float64 numbers of unsigned codes, before zero points and scales; int1 is a sign."""
    if name == "int1":
        return 2.0 * codes - 1
    if name in INTEGERS:
        return codes.astype(np.float64)
    if name == "nf4":
        return np.asarray(get_nf4_buckets(), np.float64)[codes]
    return codes.view(np.dtype(name)).astype(np.float64)


def pack(codes, name):
    """Codes [K, N] as bytes [N/64, K/32, bits, 64, 4], straight from the layout's definition."""
    bits = bits_of(name)
    k, n = (-(-size // unit) for size, unit in zip(codes.shape, (32, 64), strict=True))
    full = np.full((k * 32, n * 64), padding(name), np.uint8)
    full[: codes.shape[0], : codes.shape[1]] = codes
    blocks = full.reshape(k, 32, n, 64)
    data = np.zeros((n, k, bits, 64, 4), np.uint8)
    for inside in range(32):
        code = blocks[:, inside].transpose(1, 0, 2)  # [n, k, 64]
        byte = inside % 4
        if bits == 8:
            data[:, :, inside // 4, :, byte] = code
            continue
        row = low = 0
        for plane in (4, 2, 1):
            if bits & plane:
                word, place = divmod(inside // 4, 8 // plane)
                piece = code >> low & (2**plane - 1)
                data[:, :, row + word, :, byte] |= (piece << (place * plane)).astype(np.uint8)
                row, low = row + plane, low + plane
    return data


class Weight:
    """A random packed weight, what it stands for, and the arguments of the call."""

    def __init__(self, name, k, n, group=0, scale_dtype="float32", zero=False, seed=0, extreme=0):
        rng = np.random.default_rng(seed)
        self.name, self.k, self.n, self.group = name, k, n, group
        self.groups = -(-k // group) if group else 1
        codes = rng.integers(0, 2 ** bits_of(name), (k, n)).astype(np.uint8)
        if extreme:
            codes[:] = 0 if extreme < 0 else 2 ** bits_of(name) - 1
        if name.startswith("float8"):  # the codes that are no numbers
            codes[~np.isfinite(values_of(codes, name))] = 1
        panels = -(-n // 64)
        scale = rng.uniform(0.25, 2, (self.groups, n)) * 2.0 ** rng.integers(-5, 8)
        padded = np.ones((self.groups, panels * 64))
        padded[:, :n] = scale
        by_panel = padded.reshape(self.groups, panels, 64).transpose(1, 0, 2)
        self.data = pack(codes, name)
        self.scale = by_panel.astype(np.dtype(scale_dtype))
        stored = self.scale.astype(np.float64).transpose(1, 0, 2).reshape(self.groups, -1)[:, :n]
        zeros = np.full((self.groups, n), 0 if name == "int1" else unsigned_zero(name))
        self.zero = np.zeros((0,), np.uint8)
        if zero:
            zeros = rng.integers(0, 2 ** bits_of(name), (self.groups, n))
            padded[:, :n] = zeros
            by_panel = padded.reshape(self.groups, panels, 64).transpose(1, 0, 2)
            self.zero = by_panel.astype(np.uint8)
        every = np.arange(k) // (group or k)
        self.integers = values_of(codes, name) - zeros[every] * (name in INTEGERS)
        self.values = self.integers * stored[every]

    def times(self, x, act="none", act_scale=None, act_tile=0, out="float32", layer=0, factor=1.0):
        return matmul(
            jnp.asarray(x),
            self.data,
            self.scale,
            self.zero,
            np.float32(factor),
            np.int32(layer),
            np.zeros((0,), np.float32) if act_scale is None else jnp.asarray(act_scale),
            qtype=self.name,
            k=self.k,
            n=self.n,
            group=self.group,
            act=act,
            act_tile=act_tile,
            out_dtype=out,
        )


def check(result, x, weight, more=0.0):
    """Within the bound of the float64 product; `more` for the rounding of a 16-bit result."""
    x = np.asarray(x, np.float64)
    want, size = x @ weight.values, np.abs(x) @ np.abs(weight.values)
    got = np.asarray(result, np.float64)
    assert got.shape == want.shape
    error = np.abs(got - want) - BOUND * size - more * np.abs(want)
    assert error.size == 0 or error.max() <= 0, (weight.name, x.shape, weight.n, weight.group)


def normal(shape, dtype=np.float32, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def check_format(name, group, shape, rows, scale_dtype, zero):
    weight = Weight(name, *shape, group, scale_dtype, zero)
    x = normal((rows, weight.k))
    check(weight.times(x), x, weight)
    rng = np.random.default_rng(2)
    codes = rng.integers(-128, 128, x.shape).astype(np.int8)
    for tile in {0, group}:
        per = tile or weight.k
        scale = rng.uniform(0.1, 2, (rows, -(-weight.k // per))).astype(np.float32)
        result = weight.times(codes, act_scale=scale, act_tile=tile)
        check(result, codes * scale[:, np.arange(weight.k) // per].astype(np.float64), weight)


def check_codes(name, group, shape, rows, dtype=np.float32):
    """The kernel's own codes are those of fewbit.quantize: the results are the same bits."""
    weight = Weight(name, *shape, group)
    x = normal((rows, weight.k), dtype)
    for tile in {0, group}:
        tiled = {1: tile} if 0 < tile < weight.k else None
        q = fewbit.quantize(jnp.asarray(x), "int8", channelwise_axes=(0,), tiled_axes=tiled)
        given = weight.times(q.qvalue, act_scale=q.scale, act_tile=tile)
        dynamic = weight.times(x, act="dynamic", act_tile=tile)
        np.testing.assert_array_equal(np.asarray(dynamic), np.asarray(given))


def cases(name, group):
    """Shapes, scale types and zero points that take turns, so that all meet within a format."""
    start = FORMATS.index(name) * len(GROUPS) + GROUPS.index(group)
    for i, rows in enumerate(ROWS):
        zero = name in INTEGERS and name != "int1" and (start + i) % 2 == 1
        shape = SHAPES[(start + i) % len(SHAPES)]
        yield shape, rows, SCALES[(start + 2 * i) % len(SCALES)], zero


@pytest.mark.parametrize("group", EACH_GROUP)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_group(name, group):
    for shape, rows, scale_dtype, zero in cases(name, group):
        check_format(name, group, shape, rows, scale_dtype, zero)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("group", [0, 16, 32, 64])
def test_rows_are_quantized_as_by_quantize(group, rows):
    for i, name in enumerate(("int8", "int4", "nf4")):
        dtype = (np.float32, ml_dtypes.bfloat16)[i % 2]
        check_codes(name, group, SHAPES[(rows + group + i) % len(SHAPES)], rows, dtype)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_sums_are_exact(name):
    for rows, (k, n) in zip((1, 2, 4, 7, 64), SHAPES, strict=False):
        for zero in (False, True)[: 1 if name == "int1" else 2]:
            weight = Weight(name, k, n, zero=zero, seed=rows)
            codes = np.random.default_rng(rows).integers(-128, 128, (rows, k)).astype(np.int8)
            want = codes.astype(np.int64) @ weight.integers.astype(np.int64)
            np.testing.assert_array_equal(weight.times(codes, out="int32"), want)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("side", [-1, 1])
def test_the_longest_sums(rows, side):
    k = 2**17
    for name, zero in (("int8", False), ("uint8", False), ("int4", False), ("uint8", True)):
        weight = Weight(name, k, 3, zero=zero, extreme=side)
        codes = np.full((rows, k), -128 if side < 0 else 127, np.int8)
        check(weight.times(codes, act_scale=np.ones((rows, 1), np.float32)), codes, weight)
        want = codes[:1].astype(np.int64) @ weight.integers.astype(np.int64)
        if np.abs(codes[0].astype(np.int64)).sum() * 255 <= 2**31 - 1:
            np.testing.assert_array_equal(weight.times(codes, out="int32")[:1], want)
    with pytest.raises(Exception, match=r"row 0 over k=131072 may not fit int32"):
        codes = np.full((rows, k), -128, np.int8)
        Weight("int8", k, 3).times(codes, out="int32").block_until_ready()
    weight = Weight("int8", k, 3, extreme=side)
    codes = np.full((rows, k), -127, np.int8)
    want = codes.astype(np.int64) @ weight.integers.astype(np.int64)
    np.testing.assert_array_equal(weight.times(codes, out="int32"), want)


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "float8_e4m3fn"])
def test_bfloat16(name, rows):
    weight = Weight(name, 320, 70, 32, "float16")
    x = normal((rows, 320), ml_dtypes.bfloat16)
    check(weight.times(x), x, weight)
    check(weight.times(x, out="bfloat16"), x, weight, more=2.0**-8)


@pytest.mark.parametrize("rows", [1, 8])
def test_codes_of_many_rows_are_those_of_quantize(rows):
    k = 64
    weight = Weight("int8", k, 2)
    for seed in range(40):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = normal((rows, k), dtype, seed) * np.asarray(10.0 ** (seed % 7 - 3), dtype)
            q = fewbit.quantize(jnp.asarray(x), "int8", channelwise_axes=(0,))
            given = weight.times(q.qvalue, act_scale=q.scale)
            np.testing.assert_array_equal(weight.times(x, act="dynamic"), given)


def test_scales_of_activations_may_be_shared_and_narrow():
    weight = Weight("int8", 96, 70)
    codes = np.random.default_rng(0).integers(-128, 128, (5, 96)).astype(np.int8)
    for dtype in ("float32", "bfloat16", "float16"):
        scale = np.asarray([[0.125]], np.dtype(dtype))
        check(weight.times(codes, act_scale=scale), codes * 0.125, weight)


def test_a_result_has_the_factor_of_the_whole_tensor():
    weight = Weight("float4_e2m1fn", 96, 70, 16, "float8_e4m3fn")
    for rows in (1, 9):
        x = normal((rows, 96))
        plain, scaled = weight.times(x), weight.times(x, factor=2.0**-9)
        np.testing.assert_array_equal(np.asarray(plain) * np.float32(2.0**-9), scaled)


def test_subnormal_numbers_count():
    """fp8 has some, and XLA's threads flush them unless told otherwise."""
    weight = Weight("float8_e4m3fn", 64, 64)
    codes = np.arange(64 * 64).reshape(64, 64) % 8
    weight.data, weight.scale = (
        pack(codes.astype(np.uint8), weight.name),
        np.ones_like(weight.scale),
    )
    weight.values = values_of(codes.astype(np.uint8), weight.name)
    for rows in (1, 9):
        x = normal((rows, 64))
        check(jax.jit(weight.times)(x), x, weight)


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_any_magnitude(name, rows):
    """Rows are scaled by powers of two inside: into integers, or against the bias of fp8."""
    weight = Weight(name, 700, 70, group=32)
    x = np.random.default_rng(1).normal(size=(rows, 700)).astype(np.float32)
    check(weight.times(np.zeros_like(x)), 0 * x, weight)
    for power in (-110, -90, -63, -62, -20, 40, 96, 98, 110):
        check(weight.times(x * np.float32(2.0) ** power), x * np.float32(2.0) ** power, weight)
    x[:, 3] = 2.0**20  # a number far larger than the others
    check(weight.times(x), x, weight)


def test_the_smallest_shared_exponents():
    weight = Weight("float8_e4m3fn", 64, 64, 32, "float8_e8m0fnu")
    exponents = np.arange(2 * 64, dtype=np.uint8).reshape(weight.scale.shape)  # from 2^-127
    weight.scale = exponents.view(weight.scale.dtype)
    every = np.arange(64) // 32
    weight.values = weight.integers * weight.scale[0].astype(np.float64)[every]
    for rows in (1, 9):
        x = normal((rows, 64)) * np.float32(2.0**60)
        check(weight.times(x), x, weight)


def test_layers_of_a_stack():
    one, two = Weight("int4", 96, 70, 32, seed=1), Weight("int4", 96, 70, 32, seed=2)
    stack = Weight("int4", 96, 70, 32)
    stack.data = np.stack([one.data, two.data, one.data, two.data]).reshape(2, 2, *one.data.shape)
    stack.scale = np.stack([one.scale, two.scale] * 2).reshape(2, 2, *one.scale.shape)
    for rows in (2, 9):
        x = normal((rows, 96))
        for layer in range(4):
            np.testing.assert_array_equal(
                stack.times(x, layer=layer), (one, two)[layer % 2].times(x)
            )
    for layer in (-1, 4):
        with pytest.raises(Exception, match=f"layer {layer} is not one of the 4"):
            stack.times(x, layer=layer).block_until_ready()


@pytest.mark.parametrize("name", ["int8", "nf4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad, name):
    weight = Weight(name, 96, 70, 32)
    for rows in (3, 9):
        x = normal((rows, 96))
        x[1, 40] = bad
        for act, tile in (("dynamic", 0), ("dynamic", 32)):
            result = np.asarray(weight.times(x, act=act, act_tile=tile))
            assert np.isnan(result[1]).all()
            assert np.isfinite(np.delete(result, 1, 0)).all()
        result = np.asarray(weight.times(x))
        with np.errstate(invalid="ignore"):  # infinity times a code of zero, in some BLAS libraries
            want = x.astype(np.float64) @ weight.values
        if np.isnan(bad):
            assert np.isnan(result[1]).all()
        else:
            np.testing.assert_array_equal(result[1], want[1])
        assert np.isfinite(np.delete(result, 1, 0)).all()


def test_empty_products():
    assert Weight("int8", 32, 5).times(np.zeros((0, 32), np.float32)).shape == (0, 5)
    weight = Weight("int8", 32, 64)
    weight.k, weight.data = 0, weight.data[:, :0]
    for rows in (1, 9):
        np.testing.assert_array_equal(weight.times(np.zeros((rows, 0), np.float32)), 0)


def test_many_threads_and_loops():
    weight = Weight("int8", 512, 1024)
    x = normal((1, 512))
    tall = normal((48, 512))

    @jax.jit
    def loop(x):
        def body(state):
            i, x = state
            y = weight.times(x) + weight.times(x, act="dynamic")
            return i + 1, y[:, :512] / jnp.max(jnp.abs(y))

        return jax.lax.while_loop(lambda state: state[0] < 20, body, (0, x))[1]

    @jax.jit
    def scan(x):
        def body(x, _):
            return x, weight.times(x, act="dynamic")

        return jax.lax.scan(body, x, None, length=5)[1]

    functions = [functools.partial(loop, x), functools.partial(scan, tall)]
    want = [np.asarray(f()) for f in functions]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: np.asarray(functions[i % 2]()), range(64)))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, want[i % 2])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=normal((3, 95))), r"x must be \[rows, k=96\] but has the shape \[3,95\]"),
        (dict(x=normal((3, 96), np.float16)), "x must be float32, bfloat16 or int8"),
        (dict(data=np.zeros((2, 3, 4, 64, 4), np.uint8)), r"data must have the shape \[2,3,8,64,4"),
        (dict(data=np.zeros((2, 3, 8), np.uint8)), "data must be uint8"),
        (dict(scale=np.ones((2, 3, 64), np.float32)), r"scale must have the shape \[2,1,64\]"),
        (dict(scale=np.ones((2, 1, 64), np.int8)), "scale must be float32, float16"),
        (dict(zero=np.zeros((1, 1, 64), np.uint8)), r"zero must have the shape \[2,1,64\]"),
        (dict(zero=np.zeros((0,), np.int8)), "zero must be uint8"),
        (dict(tensor_scale=np.ones((1,), np.float32)), "tensor_scale must be a float32 scalar"),
        (dict(layer=np.float32(0)), "layer must be an int32 scalar"),
        (dict(layer=np.int32(1)), "layer 1 is not one of the 1"),
        (dict(act_scale=np.ones((3, 1), np.float32)), "act_scale belongs to int8 x"),
        (dict(x=np.ones((3, 96), np.int8)), "int8 x needs its act_scale"),
        (dict(group=8), "group must be 0"),
        (dict(act_tile=32), "act_tile must be 0"),
        (dict(k=-1), "must not be negative"),
        (dict(out_dtype="float16"), "the result must be float32, bfloat16 or int32"),
        (dict(out_dtype="int32"), "an int32 result holds sums of codes"),
        (dict(qtype="nf4", data=np.zeros((2, 3, 4, 64, 4), np.uint8),
              zero=np.zeros((2, 1, 64), np.uint8)), "nf4 has no zero points"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_read(change, message):
    weight = Weight("int8", 96, 70)
    arguments = dict(
        x=normal((3, 96)),
        data=weight.data,
        scale=weight.scale,
        zero=weight.zero,
        tensor_scale=np.float32(1),
        layer=np.int32(0),
        act_scale=np.zeros((0,), np.float32),
    )
    static = dict(qtype="int8", k=96, n=70, group=0, out_dtype="float32")
    arguments |= {key: value for key, value in change.items() if key in arguments}
    static |= {key: value for key, value in change.items() if key not in arguments}
    with pytest.raises(Exception, match=message):
        jax.jit(functools.partial(matmul, **static))(**arguments).block_until_ready()


def test_the_python_side_names_what_it_knows():
    weight = Weight("int8", 32, 3)
    with pytest.raises(ValueError, match="act='dynamik' is not known; did you mean 'dynamic'"):
        weight.times(normal((1, 32)), act="dynamik")
    weight.name = "int16"
    with pytest.raises(ValueError, match="cannot read 'int16'. They read int1, int2"):
        weight.times(normal((1, 32)))


@pytest.mark.parametrize("name", ("int8", "int4", "nf4", "float8_e4m3fn"))
def test_rows_near_the_end_of_the_range(name):
    """Sums of codes may be larger than any float where the scaled result is not."""
    from fewbit.qarray import dequantize, quantize
    from fewbit.qarray._panels import to_panels

    w = 1e-3 * np.random.default_rng(0).normal(size=(96, 70)).astype(np.float32)
    q = quantize(jnp.asarray(w), name, channelwise_axes=(1,))
    packed, whole = to_panels(q, "kn"), np.asarray(dequantize(q), np.float64)
    for rows in (1, 2, 3, 9):
        x = np.random.default_rng(rows).normal(size=(rows, 96)).astype(np.float32)
        x[0] *= np.float32(1e37)
        result = np.asarray(kernels.panel_product(jnp.asarray(x), packed), np.float64)
        size = np.abs(x).astype(np.float64) @ np.abs(whole)
        assert np.isfinite(result).all()
        assert np.max(np.abs(result - x.astype(np.float64) @ whole) / size) < BOUND


def in_a_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATHS, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SWEEP = """
from fewbit import kernels
import test_native_matmul as t
assert kernels.native_available(), kernels.info()
print(kernels.info().isa)
for name in t.FORMATS:
    for group in (16, 32) if name == 'nf4' else (0, 32):
        for shape, rows, scale_dtype, zero in t.cases(name, group):
            if rows in (1, 3, 5):
                t.check_format(name, group, shape, rows, scale_dtype, zero)
for name in t.INTEGERS:
    t.test_integer_sums_are_exact(name)
t.test_rows_are_quantized_as_by_quantize(32, 5)
t.test_the_longest_sums(1, -1)
t.test_subnormal_numbers_count()
t.test_the_smallest_shared_exponents()
for name in ('int8', 'nf4'):
    t.test_rows_near_the_end_of_the_range(name)
"""

LEVELS = ("avx512_vnni", "avx2", "portable")


@pytest.mark.parametrize("isa", LEVELS[LEVELS.index(kernels.info().isa) + 1 :])
def test_the_instruction_sets_below_this_cpu(isa):
    assert in_a_process(SWEEP, FEWBIT_ISA=isa).split() == [isa]


def test_an_instruction_set_that_is_not_there_is_reported():
    code = "from fewbit import kernels; print(kernels.info())"
    out = in_a_process(code, FEWBIT_ISA="avx3")
    assert "no, and products are an error: FEWBIT_ISA is 'avx3', which is no instruction set" in out
    if kernels.info().isa != "avx512_vnni" and not os.environ.get("FEWBIT_ISA"):
        out = in_a_process(code, FEWBIT_ISA="avx512_vnni")
        assert "asks for avx512_vnni, which this CPU does not have; use one of" in out
