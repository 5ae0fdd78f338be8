"""Rows quantized inside the kernel with scales that were stored: the codes that XLA would make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

from fewbit import kernels, ops
from fewbit.kernels._matmul import Product, reference
from fewbit.ops._on_panels import arithmetic, find_panel_dot
from fewbit.qarray import HowToQuantize, quantize
from fewbit.qarray._panels import to_panels

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)
NUMBERS = (((1,), (0,)), ((), ()))


def packed(k, n, qtype="int8", tile=None):
    tiled = {} if tile is None else {0: tile}
    q = quantize(normal(1, k, n), qtype, channelwise_axes=(1,), tiled_axes=tiled)
    return to_panels(q, "kn")


def static(x, scale, tiled=None):
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes=tiled or {})
    return ops.Deferred(x, how, jnp.asarray(scale, x.dtype))


def both_ways(x, weight):
    """The kernel that quantizes, and the kernel that is given the codes, compiled."""
    assert arithmetic(find_panel_dot(x, weight, NUMBERS), x) == "static"
    given = jax.jit(ops.Deferred.quantized)(x)
    product = jax.jit(lambda x, w: ops.dot_general(x, w, NUMBERS))
    return np.asarray(product(x, weight)), np.asarray(product(given, weight))


@pytest.mark.parametrize("rows", (1, 3, 7, 40))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_codes_are_those_of_xla(rows, dtype):
    x = normal(0, rows, 130).astype(dtype) * 3
    weight = packed(130, 70)
    shared, own = np.full((1, 1), 0.02), 0.01 + np.arange(rows)[:, None] / 300
    for scale in (shared, own):  # the second clips, in its first rows
        found, expected = both_ways(static(x, scale), weight)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", (1, 5, 40))
@pytest.mark.parametrize("k", (128, 144))
def test_groups_with_scales_of_their_own(rows, k):
    x, weight = normal(0, rows, k), packed(k, 70, "int4", tile=32)
    groups = -(-k // 32)
    for lead in {1, rows}:
        scale = 0.01 + np.arange(lead * groups).reshape(lead, groups) / 900
        found, expected = both_ways(static(x, scale, {1: 32}), weight)
        np.testing.assert_array_equal(found, expected)
    found, expected = both_ways(static(x, [[0.02]]), weight)  # one for all groups
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", (1, 2, 40))
def test_nan_takes_its_row_and_infinity_clips(rows):
    x = np.array(normal(0, rows, 96))
    x[0, 5] = np.nan
    x[rows - 1, 7] = np.inf if rows > 1 else np.nan
    found, expected = both_ways(static(jnp.asarray(x), [[0.02]]), packed(96, 70))
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found[0]).all() and (rows == 1 or np.isfinite(found[1:]).all())


def test_other_scales_are_used_before_the_kernel():
    x, weight = normal(0, 4, 96), packed(96, 70)
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    scale = jnp.full((1, 1), 0.02)
    half = ops.Deferred(x, how, scale.astype(jnp.bfloat16))
    shifted = ops.Deferred(x, how, scale, jnp.full((1, 1), 3, jnp.int8))
    whole = ops.Deferred(x, HowToQuantize(qtype="int8"), scale)  # a NaN would take all rows
    for one, what in ((half, "codes"), (shifted, "none"), (whole, "codes")):
        assert arithmetic(find_panel_dot(one, weight, NUMBERS), one) == what
        out, given = (ops.dot_general(v, weight, NUMBERS) for v in (one, one.quantized()))
        np.testing.assert_allclose(out, given, rtol=2e-6, atol=1e-5)


def test_convolutions_use_the_stored_scale():
    x, w = normal(0, 2, 9, 9, 8), normal(1, 3, 3, 8, 64)
    numbers = ("NHWC", "HWIO", "NHWC")
    weight = to_panels(quantize(w, "int8", channelwise_axes=(3,)), "kkcn")
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    stored = ops.Deferred(x, how, jnp.full((1, 1, 1, 1), 0.01))  # clips
    settings = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=numbers)
    assert ops.describe_conv(stored, weight, **settings) == "native int8"
    out, given = (
        ops.conv_general_dilated(v, weight, **settings) for v in (stored, stored.quantized())
    )
    np.testing.assert_array_equal(out, given)
    measured = ops.conv_general_dilated(ops.Deferred(x, how), weight, **settings)
    assert jnp.abs(measured - out).max() > 1  # which would have hidden a scale that is not used


def test_vmap_and_the_reference():
    x, weight = normal(0, 3, 4, 96), packed(96, 70)
    scale = jnp.array([0.01, 0.02, 0.03]).reshape(3, 1, 1)

    def product(x, scale):
        return ops.dot_general(static(x, scale), weight, NUMBERS)

    each = jnp.stack([product(a, s) for a, s in zip(x, scale, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(product))(x, scale), each)
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(product, (0, None)))(x, scale[0]), [product(a, scale[0]) for a in x]
    )
    with kernels.backend("xla"):
        through_xla = jax.jit(lambda x, s: product(x, s))(x[0], scale[0])
    np.testing.assert_allclose(through_xla, each[0], rtol=2e-6, atol=1e-5)


def test_the_call_checks_its_scale():
    x, weight = normal(0, 2, 96), packed(96, 70)

    def call(scale):
        return kernels.panel_product(x, weight, act="static", act_scale=scale).block_until_ready()

    with pytest.raises(Exception, match="act_scale must be .2 or 1,1. but has the shape"):
        call(jnp.ones((3, 1)))
    with pytest.raises(Exception, match="act=2 act_scale must have x's type"):
        call(jnp.ones((1, 1), jnp.bfloat16))
    with pytest.raises(Exception, match="act=2 always does"):
        call(None)


def test_reference_of_a_spec():
    spec = Product("int8", 96, 70, 0, "static", 0, "float32")
    x, weight = normal(0, 2, 96), packed(96, 70)
    data, scale, zero, _ = weight.packed_parts
    parts = data[None], scale[None], jnp.zeros((0,), jnp.uint8), jnp.ones(()), jnp.int32(0)
    none = jnp.zeros((0,))
    out = reference(x, jnp.full((1, 1), 0.02), none, *parts, spec=spec)
    found, _ = both_ways(static(x, [[0.02]]), weight)
    np.testing.assert_allclose(out, found, rtol=2e-6, atol=1e-5)
