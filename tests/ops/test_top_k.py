"""The k largest in two levels are the k largest, in the same order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.ops._take import LONG, _top_in_two_levels, row_length, top_k


def by_sorting(x, k):
    """Values from the largest, NaN before all of them, equal ones by place; plain Python."""
    places = []
    for row in np.asarray(x, np.float64):
        key = [(0 if np.isnan(v) else 1, -v if v == v else 0.0, i) for i, v in enumerate(row)]
        places.append([i for *_, i in sorted(key)[:k]])
    return np.asarray(places)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    k=st.integers(1, 12),
    seed=st.integers(0, 999),
    kind=st.sampled_from(["normal", "ties", "nan", "-inf", "few"]),
)
def test_the_places_are_those_of_a_sort(rows, k, seed, kind):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, LONG)).astype(np.float32)
    if kind == "ties":
        x = rng.integers(0, 3, x.shape).astype(np.float32)
    elif kind == "nan":
        x[:, rng.integers(0, LONG, 3)] = np.nan
    elif kind == "-inf":
        x[:] = -np.inf
    elif kind == "few":
        x[:] = 0.0
        x[:, rng.integers(0, LONG, 3)] = 1.0
    values, places = _top_in_two_levels(jnp.asarray(x), k, row_length(LONG))
    np.testing.assert_array_equal(places, by_sorting(x, k))
    np.testing.assert_array_equal(values, np.take_along_axis(x, np.asarray(places), 1))


@pytest.mark.parametrize(("length", "k"), [(100, 5), (16411, 5), (LONG, 1000), (262144, 5)])
def test_any_length_and_k(length, k):
    x = jax.random.normal(jax.random.key(0), (2, length))
    for ours, theirs in zip(
        jax.jit(top_k, static_argnums=1)(x, k), jax.lax.top_k(x, k), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
