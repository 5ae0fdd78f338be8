"""Files that Neural Compressor writes load in fewbit, and compute what they computed there."""

import pathlib

import numpy as np
import pytest
from peers import saved_models
from peers.environment import answers_of, folder_of
from tolerances import CODE_OF_NEXT_LAYER, PEER_KERAS

import fewbit.keras

pytestmark = [
    pytest.mark.long,
    # Keras' own, of a NumPy that is newer than it knows, and about what it saved of `compile`.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*compile\\(\\)` was not called:UserWarning"),
]
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "neural_compressor"
# Here one sum differs in its last place at a tie: each layer alone, on the same
# inputs, is within PEER_KERAS.
BOUNDS = {"net_dynamic_int8": CODE_OF_NEXT_LAYER}
PRESETS = [name for name in saved_models.FILES if saved_models.FILES[name][3]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return answers_of("inc_files", tmp_path_factory, prepare=lambda folder: None)


@pytest.fixture(scope="module")
def folder(answers, tmp_path_factory):
    return folder_of("inc_files", tmp_path_factory)


def check(model, name, answers):
    """That a model computes what the one that was saved did."""
    wanted = answers.arrays[name].astype(np.float64)
    value = np.asarray(model(saved_models.INPUTS[saved_models.FILES[name][0]]()), np.float64)
    error = np.abs(value - wanted).max() / np.abs(wanted).max()
    assert error <= BOUNDS.get(name, PEER_KERAS)


@pytest.mark.parametrize("name", saved_models.FILES)
def test_a_file_computes_what_it_computed(answers, folder, name):
    model = fewbit.keras.load_model(folder / f"{name}.keras")
    assert any(hasattr(layer, "_fewbit") for layer in model._flatten_layers())
    check(model, name, answers)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_computes_what_it_computed(answers, folder, name):
    import keras_hub

    kinds = {"gemma": keras_hub.models.CausalLM, "vit": keras_hub.models.ImageClassifier}
    kind = kinds[saved_models.FILES[name][0]]
    check(kind.from_preset(str(folder / name)), name, answers)


@pytest.mark.parametrize("name", saved_models.GOLDEN)
def test_files_that_are_kept_are_those_that_are_written_now(answers, name):
    kept, made = np.load(GOLDEN / f"{name}.npy"), answers.arrays[name]
    np.testing.assert_allclose(kept, made, rtol=1e-5, atol=1e-6)
