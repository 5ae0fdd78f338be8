"""What fewbit and its peers are both asked: inputs, arrays, products. Imports neither of them.

Inputs come from NumPy's generator with the case's own seed, so that both environments make the same
numbers without sharing a JAX version.
"""

import dataclasses
import itertools
import json
import zlib

import jax.numpy as jnp
import numpy as np


def numbers(shape, seed, dtype="float32", factor=1.0, offset=0.0):
    """The same normal numbers everywhere, as a jax array."""
    drawn = np.random.default_rng(seed).standard_normal(shape) * factor + offset
    return jnp.asarray(drawn.astype(np.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Array:
    """An input and how it is quantized (`qtype=None`: not at all)."""

    shape: tuple
    seed: int
    qtype: str | None = "int8"
    channelwise: tuple = ()
    tiled: tuple = ()  # (axis, tile) pairs
    method: str = "absmax"
    dtype: str = "float32"
    factor: float = 1.0
    offset: float = 0.0

    def make(self):
        return numbers(self.shape, self.seed, self.dtype, self.factor, self.offset)

    def quantized(self, library):
        """The input through `library.quantize`, or as it is."""
        if self.qtype is None:
            return self.make()
        return library.quantize(
            self.make(),
            self.qtype,
            channelwise_axes=self.channelwise,
            tiled_axes=dict(self.tiled),
            calibration_method=self.method,
        )

    @property
    def name(self):
        tiles = [f"tile{axis}:{tile:g}" for axis, tile in self.tiled]
        channels = ["ch" + "".join(map(str, self.channelwise))] if self.channelwise else []
        return "-".join([self.qtype, self.method, self.dtype, *channels, *tiles])


@dataclasses.dataclass(frozen=True)
class Product:
    """An op on one or two arrays; `exact` results are integers and must agree to the last bit."""

    name: str
    op: str
    operands: tuple
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    exact: bool = False

    def run(self, library):
        operands = [operand.quantized(library) for operand in self.operands]
        if self.op == "einsum":
            return library.einsum(*self.args, *operands, **self.kwargs)
        args = [jnp.asarray(a) if self.op.startswith("ragged") else a for a in self.args]
        return getattr(library, self.op)(*operands, *args, **self.kwargs)


# The shared scale, one per channel, tiles of both kinds of spelling, tiles with channels.
GRANULARITIES = (
    ((), ()),
    ((0,), ()),
    ((0, 2), ()),
    ((), ((1, 1 / 4),)),
    ((0, 2), ((1, 32),)),
)
INTEGERS = ("int8", "int4")
NARROW = ("int2", "int3", "int5", "int6", "int7")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn")
SHAPE = (4, 64, 6)


def _arrays():
    seeds = itertools.count(100)
    make = lambda *args, **kwargs: Array(SHAPE, next(seeds), *args, **kwargs)  # noqa: E731
    for dtype, (channels, tiles) in itertools.product(("float32", "bfloat16"), GRANULARITIES):
        for qtype in (*INTEGERS, *NARROW, *FLOATS, "nf4"):
            yield make(qtype, channels, tiles, dtype=dtype)
        for qtype in INTEGERS:
            yield make(qtype, channels, tiles, "minmax", dtype, offset=1.0)
        yield make("int8", channels, tiles, "rms,7", dtype)
    for dtype, qtype in itertools.product(("float32", "bfloat16", "float16"), INTEGERS):
        yield make(qtype, (0,), ((1, 16),), "absmax,0.8", dtype)
        yield make(qtype, (0,), ((1, 16),), "minmax,0.9", dtype, offset=0.5)
        yield make(qtype, (0,), (), "fixed,3", dtype)
        yield make(qtype, (0,), (), "fixed,-1,3", dtype)
    for qtype in ("int3", "nf4", "float8_e5m2"):
        yield make(qtype, (2,), (), "rms,3")
    # All positive, all negative, nothing at all, and far from one.
    yield make("int8", (0,), (), "minmax", offset=10.0)
    yield make("int4", (0,), (), "minmax", offset=-10.0)
    yield make("int8", (0,), (), factor=0.0)
    yield make("int8", (0,), (), "minmax", factor=0.0)
    yield make("int8", (0,), (), factor=1e-15)
    yield make("int8", (0,), (), dtype="bfloat16", factor=1e15)


ARRAYS = tuple(_arrays())

# The released peer rounds these powers of two up; codes are compared under scales given to both.
BLOCK_FORMATS = ("mxfp8", "mxfp4")
BLOCK_SHAPE = (4, 8, 64)


def block_input(dtype):
    return numbers(BLOCK_SHAPE, 77, dtype)


_MATMUL = (((1,), (0,)), ((), ()))
_UNIT = dict(method="fixed,127.5", factor=40.0)  # the scale is 1: int32 sums show unchanged


def _lhs(seed=1, shape=(8, 256), **kwargs):
    return Array(shape, seed, **({"channelwise": (0,)} | kwargs))


def _rhs(seed=2, shape=(256, 16), **kwargs):
    return Array(shape, seed, **({"channelwise": (1,)} | kwargs))


def _dot(name, lhs, rhs, numbers=_MATMUL, **fields):
    return Product(name, "dot_general", (lhs, rhs), (numbers,), **fields)


def _einsum(name, spec, lhs, rhs, **fields):
    return Product(name, "einsum", (lhs, rhs), (spec,), **fields)


def _conv(name, lhs, rhs, exact=False, **kwargs):
    kwargs = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")} | kwargs
    return Product(name, "conv_general_dilated", (lhs, rhs), ((1, 1), "SAME"), kwargs, exact)


def _ragged(name, lhs, rhs, **fields):
    return Product(name, "ragged_dot", (lhs, rhs), ([3, 0, 5],), **fields)


_TILE = dict(tiled=((1, 128),)), dict(tiled=((0, 128),))
_SMALL_TILE = dict(tiled=((1, 32),)), dict(tiled=((0, 32),))
_IMAGE = Array((2, 9, 8, 6), 5, channelwise=(0,))
_KERNEL = Array((3, 3, 6, 10), 6, channelwise=(3,))
_EXPERTS = Array((3, 64, 16), 8, channelwise=(2,))
_TOKENS = Array((8, 64), 9, channelwise=(0,))


def _with(array, **changes):
    return dataclasses.replace(array, **changes)


def _bfloat16(image, kernel, channels):
    image = Array(image, 42, dtype="bfloat16", channelwise=(0,))
    return image, Array(kernel, 42, dtype="bfloat16", channelwise=(channels,))


PRODUCTS = (
    _dot("w8a8", _lhs(), _rhs()),
    _dot("w8a8 exact", _lhs(**_UNIT), _rhs(**_UNIT), exact=True),
    _dot("w8a8 bfloat16", _lhs(dtype="bfloat16"), _rhs(dtype="bfloat16")),
    _dot("w8a8 tile 128", _lhs(**_TILE[0]), _rhs(**_TILE[1])),
    _dot("w8a8 tile 32", _lhs(**_SMALL_TILE[0]), _rhs(**_SMALL_TILE[1])),
    _dot("w8a8 tiled on one side", _lhs(), _rhs(**_TILE[1])),
    _dot("w8a16", _lhs(qtype=None), _rhs()),
    _dot("w4a8", _lhs(), _rhs(qtype="int4", **_TILE[1])),
    _dot("w3a16", _lhs(qtype=None), _rhs(qtype="int3")),
    _dot("nf4", _lhs(qtype=None), _rhs(qtype="nf4", **_SMALL_TILE[1])),
    _dot("nf4 with int8", _lhs(), _rhs(qtype="nf4", **_SMALL_TILE[1])),
    _dot("e4m3", _lhs(qtype="float8_e4m3fn"), _rhs(qtype="float8_e4m3fn")),
    _dot("e4m3 weight", _lhs(qtype=None), _rhs(qtype="float8_e4m3fn")),
    _dot("lhs asymmetric", _lhs(method="minmax", offset=1.0), _rhs()),
    _dot("rhs asymmetric", _lhs(), _rhs(method="minmax", offset=1.0)),
    _dot("asymmetric, tiled", _lhs(method="minmax", offset=1.0, **_TILE[0]), _rhs(**_TILE[1])),
    _dot(
        "batch and two contracted axes",
        Array((4, 5, 16, 32), 3, channelwise=(0, 1)),
        Array((32, 4, 16, 7), 4, channelwise=(1, 3)),
        (((3, 2), (0, 2)), ((0,), (1,))),
    ),
    _dot("float32 asked for", _lhs(dtype="bfloat16"), _rhs(dtype="bfloat16"),
         kwargs={"preferred_element_type": "float32"}),
    Product("dot", "dot", (_lhs(), _rhs())),
    _einsum("matmul", "ab,bc->ac", _lhs(), _rhs()),
    _einsum("exact", "ab,bc->ac", _lhs(**_UNIT), _rhs(**_UNIT), exact=True),
    _einsum("ellipsis", "...b,bc->...c", Array((3, 4, 32), 3, channelwise=(0, 1)),
            Array((32, 5), 4, channelwise=(1,))),
    _einsum("two contracted axes", "abc,cbd->ad", Array((3, 4, 32), 3, channelwise=(0,)),
            Array((32, 4, 5), 4, channelwise=(2,))),
    _einsum("attention scores", "bthd,bshd->bhts", Array((2, 3, 4, 8), 3, channelwise=(0, 1, 2)),
            Array((2, 5, 4, 8), 4, channelwise=(0, 1, 2))),
    _conv("w8a8", _IMAGE, _KERNEL),
    _conv("exact", _with(_IMAGE, channelwise=(), **_UNIT), _with(_KERNEL, channelwise=(), **_UNIT),
          exact=True),
    _conv("asymmetric", _with(_IMAGE, method="minmax", offset=1.0), _KERNEL),
    _conv("dilated", _IMAGE, _KERNEL, rhs_dilation=(2, 2)),
    _conv("grouped", _IMAGE, _with(_KERNEL, shape=(3, 3, 3, 10)), feature_group_count=2),
    _conv("NCHW", _with(_IMAGE, shape=(2, 6, 9, 8)), _with(_KERNEL, shape=(10, 6, 3, 3),
          channelwise=(0,)), dimension_numbers=("NCHW", "OIHW", "NCHW")),
    # Problems whose error against float is bounded for TPUs (tests/ops/test_ops_conv.py): on a CPU
    # the peer is as far from float as we are.
    _conv("NCHW bfloat16", *_bfloat16((10, 5, 40, 30), (2, 5, 3, 3), 0),
          dimension_numbers=("NCHW", "OIHW", "NCHW")),
    _conv("NHWC bfloat16", *_bfloat16((10, 40, 30, 5), (3, 3, 5, 2), 3)),
    _conv("grouped bfloat16", *_bfloat16((10, 15, 40, 30), (3, 5, 3, 3), 0),
          dimension_numbers=("NCHW", "OIHW", "NCHW"), feature_group_count=3),
    _ragged("w8a8", _TOKENS, _EXPERTS),
    _ragged("exact", _with(_TOKENS, **_UNIT), _with(_EXPERTS, **_UNIT), exact=True),
    _ragged("one scale per expert", _TOKENS, _with(_EXPERTS, channelwise=(0, 2))),
    _ragged("tile 32", _with(_TOKENS, tiled=((1, 32),)), _with(_EXPERTS, tiled=((1, 32),))),
    _ragged("w8a16", _with(_TOKENS, qtype=None), _EXPERTS),
    _ragged("asymmetric", _with(_TOKENS, method="minmax", offset=1.0), _EXPERTS),
    _ragged("e4m3", _with(_TOKENS, qtype="float8_e4m3fn"), _with(_EXPERTS, qtype="float8_e4m3fn")),
)  # fmt: skip


class Results:
    """Arrays of any dtype and words, by name, in one .npz file."""

    def __init__(self):
        self.arrays, self.dtypes, self.words = {}, {}, {}

    def put(self, name, array):
        self.dtypes[name] = jnp.dtype(array.dtype).name
        wide = np.asarray(array)
        # Every value of a narrow type is a float32 too, signed zeros included.
        self.arrays[name] = wide if wide.dtype.kind in "iub" else wide.astype(np.float32)

    def put_qarray(self, name, q):
        for part in ("qvalue", "scale", "zero_point"):
            if getattr(q, part) is not None:
                self.put(f"{name}/{part}", getattr(q, part))

    def say(self, name, words):
        self.words[name] = words

    def save(self, path):
        notes = json.dumps({"dtypes": self.dtypes, "words": self.words})
        np.savez(path, __notes__=np.array(notes), **self.arrays)

    @classmethod
    def load(cls, path):
        self = cls()
        with np.load(path) as file:
            notes = json.loads(str(file["__notes__"]))
            self.arrays = {name: file[name] for name in file.files if name != "__notes__"}
        self.dtypes, self.words = notes["dtypes"], notes["words"]
        return self

    def __contains__(self, name):
        return name in self.arrays

    def names(self, prefix):
        return {name.removeprefix(prefix) for name in self.arrays if name.startswith(prefix)}


def checksum(array):
    """Tells whether both environments made the same input."""
    return zlib.crc32(np.asarray(array).astype(np.float32).tobytes())
