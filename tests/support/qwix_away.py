"""`import qwix` is ours in tests that take these fixtures, and nobody's after them."""

import importlib
import sys

import pytest

from fewbit.as_qwix._modules import ROOT, Finder, install_as_qwix


@pytest.fixture(autouse=True)
def qwix():
    install_as_qwix()
    yield importlib.import_module(ROOT)
    take_away()


def take_away():
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name.split(".")[0] == ROOT]:
        del sys.modules[name]


@pytest.fixture
def without_qwix():
    """As a process begins in which nothing was installed."""
    take_away()
