"""Attention over a cache in one native call: against float64, and under transformations."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit import kernels
from fewbit.kernels._attention import _reference

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)
TOLERANCE = 2e-6  # of the largest value


def case(batch=2, new=1, heads=4, key_heads=1, dim=32, length=40, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    fresh, cache = (batch, new, key_heads, dim), (batch, length, key_heads, dim)
    arrays = (
        normal(batch, new, heads, dim),
        *map(lambda s: normal(*s), (fresh, fresh, cache, cache)),
    )
    mask = jnp.asarray(rng.random((batch, new, length)) < 0.6)
    return (*arrays, length // 2, mask, jnp.asarray(rng.random((batch, new)) < 0.7))


def exact(query, key, value, keys, values, start, mask, enters, factor, soft_cap=0.0):
    """The same in float64, position by position."""
    wide = [np.array(x, np.float64) for x in (query, key, value, keys, values)]
    query, key, value, keys, values = wide
    mask, enters = np.asarray(mask), np.asarray(enters)
    batch, new, heads, _ = query.shape
    group, out = heads // keys.shape[2], np.zeros_like(query)
    for b, t in np.ndindex(batch, new):
        if enters[b, t]:
            keys[b, start + t], values[b, start + t] = key[b, t], value[b, t]
    for b, t, h in np.ndindex(batch, new, heads):
        seen = np.flatnonzero(mask[b, t])
        if not seen.size:
            continue
        scores = keys[b, seen, h // group] @ query[b, t, h] * factor
        scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values[b, seen, h // group]
    return out, keys, values


def agree(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max())


SHAPES = {
    "gemma3 270m": dict(batch=1, heads=4, key_heads=1, dim=256, length=160),
    "one head": dict(heads=1, dim=16),
    "odd sizes": dict(heads=15, key_heads=3, dim=37, length=131),
    "several tokens": dict(new=5, heads=6, key_heads=2, dim=64),
    "many positions": dict(batch=1, heads=2, key_heads=2, dim=64, length=1500),
    "tiny": dict(batch=1, heads=1, dim=1, length=1),
}


@pytest.mark.parametrize("soft_cap", (0.0, 2.0))
@pytest.mark.parametrize("name", SHAPES)
def test_against_float64(name, soft_cap):
    operands = case(**SHAPES[name])
    numbers = dict(factor=0.3, soft_cap=soft_cap)
    found = jax.jit(lambda *x: kernels.cached_attention(*x, **numbers))(*operands)
    agree(found, exact(*operands, **numbers))
    arrays = *operands[:5], jnp.int32(operands[5]), operands[7], operands[6]
    agree(_reference(*arrays, **numbers), exact(*operands, **numbers))


@pytest.mark.parametrize("isa", ("avx2", "portable"))
def test_other_instruction_sets(isa):
    script = (
        "import test_cached_attention as t\n"
        "from fewbit import kernels\n"
        f"assert kernels.info().isa == {isa!r}, kernels.info()\n"
        "for name in t.SHAPES: t.test_against_float64(name, 2.0)\n"
    )
    here = os.path.dirname(__file__)
    support = os.path.join(here, "..", "support")
    path = os.pathsep.join([here, support, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "FEWBIT_ISA": isa, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_what_nobody_may_see_gives_zeros():
    *arrays, mask, enters = case()
    mask = mask.at[0].set(False)
    out, *_ = kernels.cached_attention(*arrays, mask, enters, factor=1.0)
    assert (out[0] == 0).all() and (out[1] != 0).any()


def test_masked_numbers_are_not_read_and_nan_comes_through():
    query, key, value, keys, values, start, _, enters = case(batch=1, length=200)
    mask = (jnp.arange(200) < 150)[None, None]
    hidden = keys.at[0, 180].set(jnp.nan), values.at[0, 180].set(jnp.inf)
    out, *_ = kernels.cached_attention(query, key, value, *hidden, start, mask, enters, factor=1.0)
    clean, *_ = kernels.cached_attention(
        query, key, value, keys, values, start, mask, enters, factor=1.0
    )
    np.testing.assert_array_equal(out, clean)
    for seen in (keys.at[0, 3, 0, 0].set(jnp.nan), keys.at[0, :, 0, 0].set(jnp.nan)):
        out, *_ = kernels.cached_attention(
            query, key, value, seen, values, start, mask, enters, factor=1.0
        )
        assert np.isnan(out).all()


def test_a_loop_keeps_its_cache_where_it_is():
    query, key, value, keys, values, _, mask, _ = case(batch=1, dim=64, length=128)

    def body(i, state):
        keys, values, total = state
        out, keys, values = kernels.cached_attention(
            query + total, key, value, keys, values, i, mask, factor=0.1
        )
        return keys, values, total + out.mean()

    def run(keys, values):
        return jax.lax.fori_loop(0, 100, body, (keys, values, jnp.float32(0)))

    compiled = jax.jit(run).lower(keys, values).compile()
    inside = compiled.as_text().split("fewbit_cached_attention")[0].rpartition("\n\n")[2]
    assert "f32[1,128,1,64]{3,2,1,0} copy" not in inside
    before = np.array(keys)
    out_keys, *_ = compiled(keys, values)
    np.testing.assert_array_equal(keys, before)  # the caller's own arrays stay
    np.testing.assert_array_equal(out_keys[0, :100], np.broadcast_to(key[0], (100, 1, 64)))


def test_places_beyond_the_cache_are_clamped_as_slices_are():
    *arrays, start, mask, enters = case(length=16)
    del start
    for place in (-3, 99):
        found = kernels.cached_attention(*arrays, place, mask, enters, factor=1.0)
        agree(found, exact(*arrays, 0 if place < 0 else 15, mask, enters, factor=1.0))


def test_transformations():
    *arrays, start, mask, enters = case(batch=2)

    def out(query):
        return kernels.cached_attention(query, *arrays[1:], start, mask, enters, factor=0.5)[0]

    def reference(query):
        operands = query, *arrays[1:], jnp.int32(start), enters, mask
        return _reference(*operands, factor=0.5, soft_cap=0.0)[0]

    query = arrays[0]
    gradient = jax.grad(lambda q: (out(q) ** 2).sum())(query)
    np.testing.assert_allclose(
        gradient, jax.grad(lambda q: (reference(q) ** 2).sum())(query), rtol=1e-4, atol=1e-5
    )
    several = jnp.stack([query, 2 * query])
    agree([jax.vmap(out)(several)], [jnp.stack([out(query), out(2 * query)])])


def test_devices_exports_and_other_types_run_through_xla():
    operands = case()
    numbers = dict(factor=0.5)
    expected = kernels.cached_attention(*operands, **numbers)

    def run(*x):
        return kernels.cached_attention(*x, **numbers)

    exported = jax.export.export(jax.jit(run))(*operands)
    agree(exported.call(*operands), expected)
    with kernels.backend("xla"):
        assert "fewbit_cached_attention" not in jax.jit(run).lower(*operands).as_text()
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
    placed = [jax.device_put(x, split) for x in operands[:5]]
    agree(jax.jit(run)(*placed, *operands[5:]), expected)
    narrow = [x.astype(jnp.bfloat16) for x in operands[:5]]
    out = run(*narrow, *operands[5:])[0]
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected[0], atol=0.05)


def test_the_call_checks_its_operands():
    query, key, value, keys, values, start, mask, enters = case()

    def call(*operands):
        jax.block_until_ready(kernels.cached_attention(*operands, factor=1.0))

    with pytest.raises(Exception, match="mask must have the shape .2,1,40. but has .2,1,39."):
        call(query, key, value, keys, values, start, mask[..., :39], enters)
    with pytest.raises(Exception, match="3 heads cannot share 2"):
        wide = jnp.concatenate([keys, keys], 2)
        call(query[:, :, :3], key, value, wide, wide, start, mask, enters)
    with pytest.raises(Exception, match="values must have the shape"):
        call(query, key, value, keys, values[:, :39], start, mask, enters)
