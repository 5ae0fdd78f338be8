"""Float64 references for arrays in few bits: one element at a time, as the definitions read."""

import math
from itertools import product

import ml_dtypes
import numpy as np

NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
INT_RANGE = {f"int{b}": (-(2 ** (b - 1)), 2 ** (b - 1) - 1) for b in (2, 3, 4, 5, 6, 7, 8, 16)}
INT_RANGE |= {"uint4": (0, 15), "uint8": (0, 255)}
BLOCK = {"mxfp8": "float8_e4m3fn", "mxfp8_16": "float8_e4m3fn"}
BLOCK |= {"mxfp4": "float4_e2m1fn", "nvfp4": "float4_e2m1fn"}


def grid(qtype):
    """All numbers that a code can stand for, ascending; codes are counted in units of the scale."""
    if qtype == "int1":
        return [-1.0, 1.0]
    if qtype == "nf4":
        return NF4
    if qtype in INT_RANGE:
        low, high = INT_RANGE[qtype]
        return [float(n) for n in range(low, high + 1)]
    dtype = np.dtype(getattr(ml_dtypes, BLOCK.get(qtype, qtype)))
    count = 16 if dtype.name.startswith("float4") else 256
    numbers = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)
    return sorted(set(numbers[np.isfinite(numbers)].tolist()))


def bound(qtype):
    """What the edge of a symmetric range maps to."""
    if qtype == "int16":
        return 32768.0
    if qtype in INT_RANGE:
        return INT_RANGE[qtype][1] + 0.5
    return grid(qtype)[-1]


def nearest(x, numbers, qtype):
    """The closest number of the grid; ties go to the even code (nf4: to the first)."""
    gaps = [abs(x - n) for n in numbers]
    best = min(gaps)
    ties = [i for i, gap in enumerate(gaps) if gap == best]
    if len(ties) == 1 or qtype == "nf4":
        return numbers[ties[0]]
    if qtype in INT_RANGE:
        return next(numbers[i] for i in ties if numbers[i] % 2 == 0)
    middle = numbers.index(0.0)
    return next(numbers[i] for i in ties if (i - middle) % 2 == 0)


def blocks(shape, tile_shape):
    """The slices of every tile, in the order of the scale's elements."""
    axes = [
        [slice(at, min(at + tile, dim)) for at in range(0, dim, tile)]
        for dim, tile in zip(shape, tile_shape, strict=True)
    ]
    return list(product(*axes))


def symmetric(x, qtype, tile_shape):
    """(scale, decoded) with one scale per tile from the largest magnitude."""
    x = np.asarray(x, np.float64)
    counts = [math.ceil(d / t) for d, t in zip(x.shape, tile_shape, strict=True)]
    scale, decoded, numbers = [], np.zeros_like(x), grid(qtype)
    for block in blocks(x.shape, tile_shape):
        part = x[block]
        if qtype == "int1":
            s = float(np.mean(np.abs(part)))
            decoded[block] = np.where(part < 0, -s, s)
        else:
            s = float(np.max(np.abs(part))) / bound(qtype) or 1.0
            flat = [nearest(v / s, numbers, qtype) * s for v in part.reshape(-1)]
            decoded[block] = np.array(flat).reshape(part.shape)
        scale.append(s)
    return np.array(scale).reshape(counts), decoded


def asymmetric(x, qtype, tile_shape):
    """(scale, zero point, decoded) with the range from the smallest to the largest, zero inside."""
    x = np.asarray(x, np.float64)
    counts = [math.ceil(d / t) for d, t in zip(x.shape, tile_shape, strict=True)]
    low_code, high_code = INT_RANGE[qtype]
    scale, zero, decoded = [], [], np.zeros_like(x)
    for block in blocks(x.shape, tile_shape):
        part = x[block]
        low, high = min(part.min(), 0.0), max(part.max(), 0.0)
        s = (high - low) / (high_code - low_code) or 1.0
        z = min(max(round(low_code - low / s), low_code), high_code)
        codes = np.clip(np.round(part / s + z), low_code, high_code)
        decoded[block] = (codes - z) * s
        scale.append(s)
        zero.append(z)
    return np.array(scale).reshape(counts), np.array(zero).reshape(counts), decoded


def power_of_two(absmax, qtype):
    """The scale of an mx tile: moved up by the format's factor, rounded down to a power of two."""
    factor = 12 / 7 if qtype == "mxfp4" else 60 / 31
    return 2.0 ** math.floor(math.log2(absmax / bound(qtype) * factor))


def pack(patterns, bits):
    """A row of bit patterns as bytes, written bit by bit."""
    string = [(int(p) >> i) & 1 for p in patterns for i in range(bits)]
    string += [0] * (-len(string) % 8)
    return [sum(string[k + i] << i for i in range(8)) for k in range(0, len(string), 8)]
