"""Saves of Keras models killed (SIGKILL) at random moments: old or new, whole, and nothing left."""

import collections
import os
import random
import shutil

import keras_killed
import pytest
from test_keras_saving import keras_may_promote  # noqa: F401

# NumPy 2 asks Keras' variables for something that they do not do yet.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:keras_hub"),
]


def kill_saves(victims, kind, folder, kills, seed):
    dice, seen, what = random.Random(seed), collections.Counter(), kind()
    path, aside = folder / "it.keras", folder / "aside.keras"
    what.save(path, 0)
    known = {0}
    for kill in range(kills):
        first = 2 * kill + 1
        victims.kill(kind.job, path, first, dice.uniform(0.0, 0.6))
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
        found = what.read(path)
        assert found in known | {first, first + 1}, kill
        known = {found}
        seen["killed"] += 1
        seen["new"] += found >= first
        seen["half way"] += any(name.endswith(".fewbit.tmp") for name in os.listdir(folder))
        if kill % 10 == 0:
            assert what.loaded(path) == found
            seen["loaded"] += 1
        if kill % 3 == 0:
            what.save(path, 0)
            assert os.listdir(folder) == ["it.keras"], kill
            known = {what.read(path)}
            assert known == {0}
            seen["saved again"] += 1
    return seen


# Of KerasHub, which takes long to import.
PRESET = pytest.param(keras_killed.Preset, marks=pytest.mark.long)


@pytest.mark.parametrize("kind", [keras_killed.File, keras_killed.Folder, PRESET])
def test_five_kills(victims, kind, tmp_path):
    assert kill_saves(victims, kind, tmp_path, 5, seed=1)["killed"] == 5


@pytest.mark.long
@pytest.mark.parametrize("kind", [keras_killed.File, keras_killed.Preset])
def test_a_hundred_kills(victims, kind, tmp_path):
    """The bar: old or new whole, a hundred times of a hundred."""
    seen = kill_saves(victims, kind, tmp_path, 100, seed=2)
    print(", ".join(f"{count} {what}" for what, count in seen.items()))
    assert seen["killed"] == 100
    assert seen["half way"] > 10 and seen["new"] > 10  # some did hit a save half way
