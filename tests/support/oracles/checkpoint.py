"""Another program that reads checkpoints, written from docs/files.md with the standard library.

Everything is read one bit at a time into lists of Python numbers; NumPy's and ml_dtypes' tables of
small floats give a code its value.
"""

import hashlib
import json
import math
import pathlib
import struct

import ml_dtypes
import numpy as np
from oracles.arrays import NF4

SMALL = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e", "I8": "<b", "U8": "<B", "I16": "<h", "I32": "<i"}
FORMATS |= {"U16": "<H", "U32": "<I"}


def manifest(folder):
    text = (pathlib.Path(folder) / "fewbit.json").read_bytes()
    document = json.loads(text)
    assert document["format"] == "fewbit-checkpoint" and document["version"] == 1
    blank = text.replace(document["checksum"].encode(), b"0" * 32, 1)
    assert hashlib.blake2b(blank, digest_size=16).hexdigest() == document["checksum"]
    return document


def raw(folder, document, name):
    """(safetensors type, bytes) of a tensor, its checksum compared."""
    entry = document["tensors"][name]
    data = (pathlib.Path(folder) / document["shards"][entry["shard"]]["file"]).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])[name]
    begin, end = header["data_offsets"]
    found = data[8 + length + begin : 8 + length + end]
    assert hashlib.blake2b(found, digest_size=16).hexdigest() == entry["checksum"]
    assert len(found) == entry["bytes"]
    return header["dtype"], found


def bit_patterns(data, shape, bits):
    """One row after another, each beginning on a byte."""
    length = shape[-1] if shape else 1
    row_bytes = -(-length * bits // 8)
    out = []
    for row in range(math.prod(shape[:-1])):
        number = int.from_bytes(data[row * row_bytes : (row + 1) * row_bytes], "little")
        out += [number >> (i * bits) & (2**bits - 1) for i in range(length)]
    return out


def numbers(folder, document, name):
    """The values of a tensor's elements, flat."""
    entry = document["tensors"][name]
    stored, data = raw(folder, document, name)
    bits, dtype = entry["bits"], entry["dtype"]
    if entry["encoding"] == "plain":
        if stored == "BF16":
            halves = struct.unpack(f"<{len(data) // 2}H", data)
            return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
        if stored in SMALL:
            return [small(SMALL[stored], byte) for byte in data]
        size = struct.calcsize(FORMATS[stored])
        return [
            struct.unpack(FORMATS[stored], data[i : i + size])[0] for i in range(0, len(data), size)
        ]
    patterns = bit_patterns(data, entry["shape"], bits)
    if entry["encoding"] == "sign":
        return [-1 if pattern else 1 for pattern in patterns]
    assert entry["encoding"] == "bits"
    if dtype.startswith("float"):
        return [small(dtype, pattern) for pattern in patterns]
    if dtype.startswith("uint"):
        return patterns
    return [p - 2**bits if p >= 2 ** (bits - 1) else p for p in patterns]


def small(dtype, pattern):
    return float(np.array([pattern], np.uint8).view(getattr(ml_dtypes, dtype))[0])


def leaves(node, path=""):
    """(path, leaf node) of a tree."""
    if node is None:
        return
    ((kind, value),) = node.items()
    if kind in ("dict", "int_dict", "frozen_dict", "quantized_params"):
        for key, child in value.items():
            yield from leaves(child, f"{path}/{key}" if path else key)
    elif kind in ("list", "tuple"):
        for i, child in enumerate(value):
            yield from leaves(child, f"{path}/{i}" if path else str(i))
    else:
        yield path, node


def decoded(folder, document, node):
    """The numbers that a leaf stands for, flat: (code - zero point) * scale * tensor scale."""
    ((kind, value),) = node.items()
    if kind == "with_aux":
        return decoded(folder, document, value["array"])
    if kind == "box":
        return decoded(folder, document, value["value"])
    if kind == "array":
        return numbers(folder, document, value)
    if kind == "key":
        return numbers(folder, document, value["data"])
    assert kind == "qarray", kind
    names = {part: tensor_of(value[part]) for part in value if isinstance(value[part], dict)}
    shape = document["tensors"][names["qvalue"]]["shape"]
    codes = numbers(folder, document, names["qvalue"])
    if value["qtype"] == "nf4":
        codes = [NF4[code] for code in codes]
    own = {part: numbers(folder, document, name) for part, name in names.items()}
    shapes = {part: document["tensors"][name]["shape"] for part, name in names.items()}
    tiles = {axis % len(shape): tile for axis, tile in value["tiles"]}
    out = []
    for flat, code in enumerate(codes):
        index = np.unravel_index(flat, shape)

        def at(part, index=index):
            place = 0
            for axis, count in enumerate(shapes[part]):
                tile = tiles.get(axis, shape[axis] // count) if count > 1 else shape[axis]
                place = place * count + int(index[axis]) // tile
            return own[part][place]

        zero = at("zero_point") if "zero_point" in own else 0
        second = own["tensor_scale"][0] if "tensor_scale" in own else 1.0
        out.append((code - zero) * at("scale") * second)
    return out


def tensor_of(node):
    while "box" in node:
        node = node["box"]["value"]
    return node["array"]
