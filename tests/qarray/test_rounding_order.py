"""A product is scaled, rounded, and only then added to something, whatever surrounds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit
from fewbit.qarray import rounded


def test_a_product_is_not_joined_with_the_sum_that_follows():
    x, scale, bias = (jax.random.normal(jax.random.key(i), (256, 256)) for i in range(3))
    small = jnp.float32(0.0123)
    joined = jax.jit(lambda x: rounded(x * small * scale) + bias)(x)
    want = np.asarray(x) * np.float32(small) * np.asarray(scale) + np.asarray(bias)
    np.testing.assert_array_equal(joined, want)


def test_what_is_not_finite_stays():
    values = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0, jnp.finfo(jnp.float32).max])
    np.testing.assert_array_equal(jax.jit(rounded)(values), values)
    assert np.signbit(rounded(values))[4]
    assert jax.grad(lambda x: rounded(x).sum())(jnp.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_a_model_and_its_steps_one_by_one(qtype):
    """Scales that are results of the same program, or its inputs: the same bits with a bias."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (32, 8)), jax.random.normal(keys[1], (8, 4))
    bias = jax.random.normal(keys[2], (4,))

    def product(qx, qw):
        with fewbit.kernels.backend("xla"):
            return fewbit.dot_general(qx, qw, (((1,), (0,)), ((), ()))) + bias[None]

    def quantize(x, axis):
        return fewbit.quantize(x, qtype, channelwise_axes=(axis,))

    whole = jax.jit(lambda x, w: product(quantize(x, 0), quantize(w, 1)))(x, w)
    parts = jax.jit(product)(jax.jit(quantize, static_argnums=1)(x, 0), quantize(w, 1))
    np.testing.assert_array_equal(whole, parts)
