"""Slow, obvious float64 products of dequantized operands, and the tolerances they are held to."""

import functools
import itertools
import string

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.numerics import format_of, get_nf4_buckets
from fewbit.qarray import QArray, get_scale_shape, get_tile_shape
from fewbit.qarray._tiles import uneven_tiles

# Errors are divided by the sum of |terms| of each entry, so cancellation does not count.
FLOAT32_SUM = 2e-6  # a float32 product of float32 operands, or exact codes scaled in float32
BFLOAT16_RESULT = 6e-3  # one rounding of each operand or of the result to bfloat16


def values(x):
    """What an array or QArray stands for, in float64."""
    if not isinstance(x, QArray):
        return np.asarray(x).astype(np.float64)
    codes = np.asarray(x.qvalue).astype(np.float64)
    if format_of(x.qtype).kind == "table":
        codes = np.asarray(get_nf4_buckets(), np.float64)[codes.astype(np.int64)]
    if x.zero_point is not None:
        codes = codes - _spread(x.zero_point, x)
    codes = codes * _spread(x.scale, x)
    if x.tensor_scale is not None:
        codes = codes * float(np.asarray(x.tensor_scale).reshape(()))
    return codes


def _spread(part, q):
    part = np.asarray(part).astype(np.float64)
    for axis, (count, size) in enumerate(zip(part.shape, q.shape, strict=True)):
        if count != size:
            tile = size if count == 1 else q.tile_shape[axis]
            part = np.repeat(part, tile, axis=axis).take(range(size), axis=axis)
    return part


def normal(seed, shape, dtype="float32"):
    """Standard normal values; drawn by NumPy, so that no shape costs a compilation."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


def drawn(shape, dtype, draws=0, sample="normal"):
    """`jax.random` values of the shape from key(42), or from the key its n-th split put aside.

    One long draw serves every shape, because entry i of a draw depends on the key and on i alone;
    a compilation per shape would cost seconds.
    """
    size = np.prod(shape, dtype=np.int64)
    length = next(n for n in (2**20, 2**22, 2**26, 2**27) if size <= n)
    return _stream(length, jnp.dtype(dtype).name, draws, sample)[:size].reshape(shape)


@functools.lru_cache(maxsize=4)
def _stream(length, dtype, draws, sample):
    assert jax.config.jax_threefry_partitionable
    key = used = jax.random.key(42)
    for _ in range(draws):
        key, used = jax.random.split(key)
    return np.asarray(getattr(jax.random, sample)(used, (length,), dtype))


def random_codes(shape, how, seed=0, dtype="float32"):
    """A QArray laid out as `how` says, of random codes and of random scales.

    Unlike the scales of normal values these differ by up to a factor of four, so a scale that is
    taken from the wrong place shows.
    """
    rng, row = np.random.default_rng(seed), format_of(how.qtype)
    if row.kind == "sign":
        codes = rng.choice([-1, 1], shape)
    elif row.kind == "float":
        top = min(row.bound, 448.0)
        codes = np.clip(rng.standard_normal(shape) * top / 3, -top, top)
    else:
        low, high = row.asymmetric or (0, 15)
        codes = rng.integers(low, high + 1, shape)
    tiles, sizes = get_tile_shape(shape, how), get_scale_shape(shape, how)
    scale, zero_point, tensor_scale = rng.uniform(0.5, 2.0, sizes), None, None
    if row.scale_dtype == "float8_e8m0fnu":
        scale = 2.0 ** rng.integers(-2, 3, sizes)
    if row.name == "nvfp4":
        tensor_scale = np.full((1,) * len(shape), 0.25, np.float32)
    if how.calibration_method == "minmax":
        zero_point = rng.integers(low, high + 1, sizes).astype(row.storage)
    scale_dtype = row.scale_dtype or how.scale_dtype or dtype
    return QArray(
        codes.astype(row.storage),
        scale.astype(jnp.dtype(scale_dtype)),
        zero_point,
        how.qtype,
        tensor_scale=tensor_scale,
        dtype=dtype,
        tiles=uneven_tiles(shape, sizes, tiles),
    )


def dot_general(lhs, rhs, dimension_numbers):
    (lc, rc), (lb, rb) = dimension_numbers
    letters = iter(string.ascii_letters)
    left = [next(letters) for _ in lhs.shape]
    right = [next(letters) for _ in rhs.shape]
    for a, b in [*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)]:
        right[b] = left[a]
    batch = [left[a] for a in lb]
    summed = [left[a] for a in lc]
    out = batch + [c for c in left + right if c not in batch and c not in summed]
    return einsum("".join(left) + "," + "".join(right) + "->" + "".join(out), lhs, rhs)


def einsum(subscripts, *operands):
    """The float64 result, and the sum of |terms| behind each entry."""
    floats = [values(x) for x in operands]
    return (
        np.einsum(subscripts, *floats),
        np.einsum(subscripts, *map(np.abs, floats)),
    )


def conv(lhs, rhs, strides, padding, lhs_dilation, rhs_dilation, groups=1):
    """NCHW x OIHW -> NCHW with explicit (low, high) padding."""
    x, w = values(lhs), values(rhs)
    return _conv(x, w, strides, padding, lhs_dilation, rhs_dilation, groups), _conv(
        abs(x), abs(w), strides, padding, lhs_dilation, rhs_dilation, groups
    )


def _conv(x, w, strides, padding, lhs_dilation, rhs_dilation, groups):
    n, c, *space = x.shape
    stretched = [(s - 1) * d + 1 for s, d in zip(space, lhs_dilation, strict=True)]
    full = [s + lo + hi for s, (lo, hi) in zip(stretched, padding, strict=True)]
    canvas = np.zeros((n, c, *full))
    (top, _), (left, _) = padding
    rows = slice(top, top + stretched[0], lhs_dilation[0])
    columns = slice(left, left + stretched[1], lhs_dilation[1])
    canvas[:, :, rows, columns] = x
    o, per_group, kh, kw = w.shape
    reach = [(k - 1) * d + 1 for k, d in zip((kh, kw), rhs_dilation, strict=True)]
    size = [(f - r) // s + 1 for f, r, s in zip(full, reach, strides, strict=True)]
    out = np.zeros((n, o, *size))
    for feature, i, j in itertools.product(range(o), range(size[0]), range(size[1])):
        first = feature // (o // groups) * per_group
        y, z = i * strides[0], j * strides[1]
        patch = canvas[
            :,
            first : first + per_group,
            y : y + reach[0] : rhs_dilation[0],
            z : z + reach[1] : rhs_dilation[1],
        ]
        out[:, feature, i, j] = (patch * w[feature]).sum(axis=(1, 2, 3))
    return out


def ragged_dot(lhs, rhs, group_sizes):
    x, w = values(lhs), values(rhs)
    out, reach = np.zeros((2, x.shape[0], w.shape[2]))
    start = 0
    for group, size in enumerate(np.asarray(group_sizes)):
        rows = slice(start, start + size)
        out[rows], reach[rows] = x[rows] @ w[group], abs(x[rows]) @ abs(w[group])
        start += size
    return out, reach


def worst(actual, expected):
    """Largest error of `actual` relative to the sum of |terms|."""
    exact, reach = expected
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    if actual.size == 0:
        return 0.0
    return float(np.max(np.abs(actual - exact) / np.maximum(reach, 1e-30)))


def relative_mae(actual, expected):
    """mean|a-b| / mean|b|, the measure the upper bounds are written in."""
    assert actual.shape == expected.shape
    actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
    error = np.abs(actual - expected).mean(dtype=np.float64)
    return float(error / np.abs(expected).mean(dtype=np.float64))
