"""A long argmax in two levels is the argmax, and quantized models use it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W8A8, normal, quantized
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.ops._take import LONG, _two_levels, argmax, row_length


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3),
    seed=st.integers(0, 999),
    kind=st.sampled_from(["normal", "ties", "nan", "-inf", "both inf", "all nan"]),
)
def test_it_is_the_first_maximum_or_the_first_nan(rows, seed, kind):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 16384)).astype(np.float32)
    if kind == "ties":
        x = rng.integers(0, 3, x.shape).astype(np.float32)
    elif kind == "nan":
        x[:, rng.integers(0, x.shape[1], 5)] = np.nan
    elif kind == "-inf":
        x[:] = -np.inf
    elif kind == "both inf":
        x[:, rng.integers(0, x.shape[1], 4)] = np.inf
        x[:, rng.integers(0, x.shape[1], 400)] = -np.inf
    elif kind == "all nan":
        x[:] = np.nan
    np.testing.assert_array_equal(_two_levels(jnp.asarray(x), 1, jnp.int32), np.argmax(x, 1))


@pytest.mark.parametrize("shape", [(LONG,), (2, 20000, 3), (2, LONG - 1), (2, 16411)])
def test_any_axis_and_length(shape):
    axis = int(np.argmax(shape))
    x = normal(0, *shape)
    out = jax.jit(lambda x: argmax(x, axis, jnp.int32))(x)
    np.testing.assert_array_equal(out, jnp.argmax(x, axis))
    assert row_length(LONG - 1) is None and row_length(16411) is None  # short; a prime


def test_a_quantized_model_searches_in_two_levels():
    def f(params, x):
        return jnp.argmax(x @ params["w"], axis=-1)

    qf, qparams, _ = quantized(f, W8A8, {"w": normal(0, 64, 32768)}, normal(1, 2, 64))
    x = normal(1, 2, 64)
    text = jax.jit(qf).lower(qparams, x).as_text()
    assert "2x256x128" in text
    logits, _, _ = quantized(lambda p, x: x @ p["w"], W8A8, {"w": normal(0, 64, 32768)}, x)
    np.testing.assert_array_equal(qf(qparams, x), jnp.argmax(logits(qparams, x), -1))
