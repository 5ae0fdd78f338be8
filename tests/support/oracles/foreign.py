"""How other tools lay quantized weights down in files: slow, obvious, in Python integers.

Each writer takes unsigned codes, zero points and scales in the mathematics' own shape (codes
`[in][out]`, one zero point and scale per group and output) and gives the tensors of the format.
`value` is what all of them mean.
"""

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def value(code, zero, scale):
    """The number that a code stands for."""
    return (int(code) - int(zero)) * float(scale)


def dequantized(codes, zeros, scales, groups):
    """float64[in, out]; `groups[i]` is the group of row i."""
    rows, columns = codes.shape
    return np.array(
        [
            [value(codes[i, j], zeros[groups[i], j], scales[groups[i], j]) for j in range(columns)]
            for i in range(rows)
        ],
        np.float64,
    )


def to_int32(word):
    """A 32-bit pattern as a signed integer."""
    assert 0 <= word < 2**32
    return word - 2**32 if word >= 2**31 else word


def words_of_fields(codes, bits):
    """Whole codes in each word, the first in the lowest bits; the last word is filled up with 0."""
    fields = 32 // bits
    words = []
    for begin in range(0, len(codes), fields):
        word = 0
        for place, code in enumerate(codes[begin : begin + fields]):
            word += int(code) << (bits * place)
        words.append(to_int32(word))
    return words


def words_of_stream(codes, bits):
    """One endless number in base 2, cut into words: what GPTQ does with 3 bits."""
    total = 0
    for place, code in enumerate(codes):
        total += int(code) << (bits * place)
    count = -(-len(codes) * bits // 32)
    return [to_int32(total >> (32 * i) & 0xFFFFFFFF) for i in range(count)]


def gptq(codes, zeros, scales, groups, bits, *, version=1):
    """qweight, qzeros, scales, g_idx as AutoGPTQ packs them."""
    stored = (zeros.astype(int) - (1 if version == 1 else 0)) % 2**bits
    down = [words_of_stream(list(column), bits) for column in codes.T]
    along = [words_of_stream(list(row), bits) for row in stored]
    return {
        "qweight": np.array(down, np.int32).T.copy(),
        "qzeros": np.array(along, np.int32),
        "scales": scales.astype(np.float16),
        "g_idx": np.array(groups, np.int32),
    }


def gptq_by_borrowing(codes, zeros, scales, groups, bits):
    """The same as GPTQModel writes v1: whole words of v2 minus a one in every field."""
    result = gptq(codes, zeros, scales, groups, bits, version=2)
    ones = sum(1 << (bits * place) for place in range(32 // bits))
    words = [[to_int32((int(w) - ones) % 2**32) for w in row] for row in result["qzeros"]]
    return {**result, "qzeros": np.array(words, np.int32)}


def awq(codes, zeros, scales):
    """qweight, qzeros, scales of AutoAWQ's GEMM."""

    def packed(matrix):
        rows = []
        for row in matrix:
            words = []
            for begin in range(0, len(row), 8):
                word = 0
                for place in range(8):
                    word |= int(row[begin + AWQ_ORDER[place]]) << (4 * place)
                words.append(to_int32(word))
            rows.append(words)
        return np.array(rows, np.int32)

    return {
        "qweight": packed(codes),
        "qzeros": packed(zeros),
        "scales": scales.astype(np.float16),
    }


def compressed_packed(codes, zeros, scales, bits, groups=None, *, symmetric):
    """weight_packed and friends of compressed-tensors' pack-quantized format."""
    rows, columns = codes.shape
    parts = {
        "weight_packed": np.array([words_of_fields(list(c), bits) for c in codes.T], np.int32),
        "weight_shape": np.array([columns, rows], np.int64),
        "weight_scale": scales.T.copy(),
    }
    if not symmetric:  # packed down the outputs
        words = [words_of_fields(list(group), bits) for group in zeros]
        parts["weight_zero_point"] = np.array(words, np.int32).T.copy()
    if groups is not None:
        parts["weight_g_idx"] = np.array(groups, np.int32)
    return parts


def blocks(codes, scales, block):
    """float64[out, in] of fp8 codes (as floats) and one scale per block, number by number."""
    high, wide = block
    out, rows = codes.shape
    return np.array(
        [
            [float(codes[o, i]) * float(scales[o // high, i // wide]) for i in range(rows)]
            for o in range(out)
        ],
        np.float64,
    )
