"""Keras relies on JAX's ordinary promotion (a bias is added to rows); the tests' strict one is off.

Here and not in tests/: the doctests of fewbit/keras are of the same kind.
"""

import jax
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Every test with Keras in its name runs as its users run."""
    if "keras" not in item.nodeid.lower():
        return (yield)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return (yield)
