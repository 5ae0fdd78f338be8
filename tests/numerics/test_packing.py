"""Codes as strings of bits: against the bit-by-bit reference, at every width and storage type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import arrays as oracle

from fewbit.kernels._layouts import pack as pack_tree
from fewbit.kernels._layouts import unpack as unpack_tree
from fewbit.numerics import FORMATS
from fewbit.numerics._bits import (
    from_bit_patterns,
    pack_bits,
    packed_length,
    to_bit_patterns,
    unpack_bits,
)
from fewbit.qarray import pack, quantize, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=8, deadline=None)
@given(length=st.sampled_from([0, 1, 8, 37]), seed=st.integers(0, 9))
def test_round_trip_and_reference(bits, length, seed):
    patterns = np.random.default_rng(seed).integers(0, 2**bits, (2, length), np.uint8)
    packed = np.asarray(pack_bits(jnp.asarray(patterns), bits))
    assert packed.shape == (2, packed_length(length, bits)) and packed.dtype == np.uint8
    for row, wanted in zip(packed, patterns, strict=True):
        assert row.tolist() == oracle.pack(wanted, bits)
    np.testing.assert_array_equal(unpack_bits(jnp.asarray(packed), bits, length), patterns)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_storage_type(name):
    row = FORMATS[name]
    everything = np.arange(2 ** min(row.bits, 8), dtype=np.uint8)
    if row.bits == 16:
        codes = jnp.array([-32768, -1, 0, 5, 32767], jnp.int16)
    else:
        codes = from_bit_patterns(jnp.asarray(everything), row.bits, row.storage)
    assert codes.dtype == row.storage
    packed = jax.jit(lambda c: pack_bits(c, row.bits))(codes)
    patterns = jax.jit(lambda p: unpack_bits(p, row.bits, codes.shape[-1]))(packed)
    again = from_bit_patterns(patterns, row.bits, row.storage)
    np.testing.assert_array_equal(
        np.asarray(to_bit_patterns(again, row.bits)), np.asarray(to_bit_patterns(codes, row.bits))
    )
    if row.kind == "int" and row.bits <= 8 and name.startswith("int"):
        assert np.asarray(codes).astype(int).min() == -(2 ** (row.bits - 1))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"uint4", "uint8"}))
def test_qarrays_pack_to_their_true_width(name):
    tile = FORMATS[name].tile
    x = jax.random.normal(jax.random.key(0), (4, 37))
    kwargs = {"channelwise_axes": (0,), "tiled_axes": {1: tile} if tile else {}}
    q = quantize(x, name, **kwargs)
    packed = jax.jit(pack)(q)
    if FORMATS[name].bits < 8:
        assert packed.layout == "bits" and packed.data.dtype == jnp.uint8
        assert packed.data.shape == (4, packed_length(37, FORMATS[name].bits))
    else:
        assert packed.layout == "plain"
    assert packed.shape == q.shape and packed.dtype == q.dtype
    assert packed.tile_shape == q.tile_shape
    for again in (unpack(packed), unpack_tree({"a": packed})["a"]):
        assert jax.tree.structure(again) == jax.tree.structure(q)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    abstract = jax.eval_shape(lambda x: pack(quantize(x, name, **kwargs)), x)
    assert abstract.qvalue.shape == (4, 37) and abstract.qvalue.dtype == FORMATS[name].storage
    plain = jax.eval_shape(lambda x: quantize(x, name, **kwargs), x)
    assert jax.tree.structure(pack(plain)) == jax.tree.structure(abstract)


def test_trees():
    tree = {"w": quantize(jnp.ones((2, 16)), "int3"), "b": jnp.ones(3), "none": None}
    packed = pack_tree(tree)
    assert packed["w"].layout == "bits" and packed["b"] is tree["b"]
    assert packed["w"].nbytes == 2 * 6 + 4


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="10 codes of 3 bits fill 4 bytes"):
        unpack_bits(jnp.zeros(5, jnp.uint8), 3, 10)
    with pytest.raises(ValueError, match="Codes of 9 bits cannot be packed"):
        pack_bits(jnp.zeros(5, jnp.uint8), 9)
