"""`import neural_compressor` is ours in tests that take this fixture, and nobody's after them."""

import sys

import pytest

import fewbit.keras
from fewbit.as_neural_compressor import NAME


@pytest.fixture
def installed():
    before = list(sys.meta_path)
    fewbit.keras.install_as_neural_compressor()
    yield
    sys.meta_path[:] = before
    for module in [m for m in sys.modules if m.partition(".")[0] == NAME]:
        del sys.modules[module]
