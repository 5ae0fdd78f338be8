"""When freed memory is given back; how much of it there is: test_keras_memory.py."""

import ctypes

import jax
import keras
import numpy as np
import pytest

import fewbit.keras
from fewbit.keras import StaticQuantConfig, _calibrate, _memory

X = np.linspace(-1, 1, 4 * 32).reshape(4, 32).astype("float32")
STATIC = StaticQuantConfig("int8")


@pytest.fixture
def calls(monkeypatch):
    """What was given back so far, one entry per call."""
    found = []
    monkeypatch.setattr(_memory, "_trim", lambda: found.append)
    return found


def test_at_most_so_often_as_a_model_has_parts(calls):
    sizes = [1] * 1000 + [2**24] * 4
    for k, _ in enumerate(_memory.giving_back(sizes, int, sum(sizes))):
        assert len(calls) == 1 + max(k - 1000, 0)
    assert len(calls) == 1 + 4 + 1
    calls.clear()
    assert len([*_memory.giving_back([2**24] * 640, int, 640 * 2**24)]) == 640
    assert len(calls) == 1 + 32 + 1


def test_what_compiling_left_is_given_back_once_when_the_program_runs(calls):
    leftovers = _memory.Leftovers()
    leftovers.give_back()
    assert not calls
    leftovers.expect()
    leftovers.give_back()
    leftovers.give_back()
    assert len(calls) == 1


@pytest.mark.parametrize("programs", [0, 1, 2])
def test_one_call_per_program_of_the_calibration(calls, programs):
    model = keras.Sequential([keras.Input((32,)), *(keras.layers.Dense(32) for _ in range(3))])
    seen = []

    def calibrate(model):
        seen.append(len(calls))
        for rows in range(1, programs + 1):
            for _ in range(2):
                jax.block_until_ready(jax.jit(model)(X[:rows]))
                jax.effects_barrier()
        model(X)
        seen.append(len(calls))

    fewbit.keras.quantize_model(model, STATIC, calibrate, progress=False)
    assert seen[1] - seen[0] == programs


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_other_c_libraries_are_left_alone(monkeypatch, error):
    def missing(name):
        raise error

    monkeypatch.setattr(ctypes, "CDLL", missing)
    _memory._trim.cache_clear()
    try:
        _memory.give_back()
    finally:
        _memory._trim.cache_clear()


def test_two_batches_through_equal_layers_compile_one_program(monkeypatch):
    joined = []

    def combine_all(named):
        combine = original(named)

        def counted(first, second):
            joined.extend([jax.tree.structure(first)] if first else [])
            return combine(first, second)

        return counted

    original = _calibrate.combine_all
    monkeypatch.setattr(_calibrate, "combine_all", combine_all)
    model = keras.Sequential([keras.Input((32,)), *(keras.layers.Dense(32) for _ in range(3))])
    fewbit.keras.quantize_model(model, STATIC, [X, 2 * X], progress=False)
    assert len(joined) == 3 and len(set(joined)) == 1
    np.testing.assert_allclose(model.layers[0].a_scale, 2 * np.abs(X).max() / 127, rtol=1e-2)
