"""`import qwix` is ours in tests that take these fixtures, and nobody's after them."""

import importlib
import sys

import pytest

from fewbit._util._stand_in import Finder
from fewbit.as_qwix._install import ROOT, install_as_qwix


@pytest.fixture(autouse=True)
def qwix():
    install_as_qwix()
    yield importlib.import_module(ROOT)
    take_away()


def is_ours(finder):
    return isinstance(finder, Finder) and finder.name == ROOT


def take_away():
    sys.meta_path[:] = [finder for finder in sys.meta_path if not is_ours(finder)]
    for name in [name for name in sys.modules if name.split(".")[0] == ROOT]:
        del sys.modules[name]


@pytest.fixture
def without_qwix():
    """As a process begins in which nothing was installed."""
    take_away()
