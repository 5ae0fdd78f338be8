"""A gradient times the scales of codes that stay, quantized in one call: `quantize(x * factor)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit import kernels
from fewbit.kernels._quantize import quantize_natively
from fewbit.qarray import HowToQuantize, quantize_with

pytestmark = pytest.mark.skipif(
    not kernels.native_available(), reason=f"no native part: {kernels.info().missing}"
)

# Shape, axes with scales of their own, the factor's shape, and whether the call takes the factor.
CASES = {
    "rows": ((8, 128, 70), (0, 1), (1, 1, 70), True),
    "rows, own factors": ((8, 16, 70), (0, 1), (8, 16, 70), True),
    "columns": ((8, 16, 70), (2,), (8, 16, 1), True),
    "columns of a batch": ((4, 8, 64, 33), (0, 1, 3), (4, 8, 64, 1), True),
    "some of the batch": ((4, 8, 64, 33), (0, 1, 3), (1, 8, 64, 1), True),
    "rows, some of the batch": ((4, 8, 64, 33), (0, 1, 2), (4, 1, 1, 33), True),
    "along the columns": ((4, 8, 64, 33), (0, 1, 3), (1, 1, 64, 33), False),
    "one for all": ((4, 8, 64, 33), (0, 1, 3), (1, 1, 1, 1), False),
}


def draw(shape, factor_shape):
    draws = np.random.default_rng(0)
    x = jnp.asarray(draws.normal(size=shape), jnp.float32)
    return x, jnp.asarray(draws.uniform(0.01, 30, size=factor_shape), jnp.float32)


def assert_same(got, want):
    np.testing.assert_array_equal(got.qvalue, want.qvalue)
    np.testing.assert_array_equal(got.scale, want.scale)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_product_that_is_quantized(case):
    shape, own, factor_shape, taken = CASES[case]
    x, factor = draw(shape, factor_shape)
    how = HowToQuantize(qtype="int8", channelwise_axes=own)

    def quantize(x, factor):
        return quantize_natively(x, how, factor)

    want = quantize_with(x * factor, how)
    assert_same(quantize(x, factor), want)
    assert_same(jax.jit(quantize)(x, factor), want)
    text = jax.jit(quantize).lower(x, factor).as_text()
    assert ("fewbit_quantize_shifted_int8" in text) == taken
    assert "fewbit_quantize" in text


@pytest.mark.parametrize("case", ("rows", "columns", "some of the batch"))
@pytest.mark.parametrize("mapped", ((0, None), (None, 1), (1, 0), (2, 2)))
def test_vmap(case, mapped):
    shape, own, factor_shape, _ = CASES[case]
    x, factor = draw(shape, factor_shape)
    how = HowToQuantize(qtype="int8", channelwise_axes=own)
    operands = [
        a if axis is None else jnp.stack([a, 1.7 * a, -0.3 * a], axis)
        for a, axis in zip((x, factor), mapped, strict=True)
    ]
    got = jax.vmap(lambda x, factor: quantize_natively(x, how, factor), mapped)(*operands)
    for i in range(3):
        one = [
            a if axis is None else jnp.take(a, i, axis)
            for a, axis in zip(operands, mapped, strict=True)
        ]
        assert_same(
            jax.tree.map(lambda leaf, i=i: leaf[i], got), quantize_with(one[0] * one[1], how)
        )


def test_what_is_not_finite_shows():
    x, factor = draw((64, 100), (1, 100))
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    got = quantize_natively(x.at[3, 5].set(jnp.nan), how, factor)
    assert np.flatnonzero(np.isnan(np.asarray(got.scale))).tolist() == [3]
    got = quantize_natively(x, how, factor.at[0, 7].set(jnp.inf))
    assert np.isnan(np.asarray(got.scale)).all()


def test_a_wrong_number_of_factors_is_refused():
    results = (
        jax.ShapeDtypeStruct((64, 100), jnp.int8),
        jax.ShapeDtypeStruct((64, 1), jnp.float32),
    )
    call = jax.ffi.ffi_call("fewbit_quantize_shifted_int8", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a factor for each of 100 values"):
        call(jnp.ones((64, 100)), jnp.ones((99,)), first=np.int64(1), last=np.int64(2))
