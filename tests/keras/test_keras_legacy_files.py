"""Keras' own doors to its legacy format: nothing is written that does not load."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import quantized, sample, two_layers

import fewbit.keras as fk

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
INT8 = fk.DynamicQuantConfig("int8")


def functional():
    inputs = keras.Input((32,))
    return keras.Model(inputs, layers.Dense(8)(inputs))


def around():
    """A float model that is made of a quantized one."""
    inputs = keras.Input((32,))
    return keras.Model(inputs, layers.Dense(8)(quantized(functional(), INT8)(inputs)))


MODELS = {
    "sequential": lambda: quantized(two_layers(), INT8),
    "functional": lambda: quantized(functional(), INT8),
    "around": around,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("end", ["h5", "hdf5"])
@pytest.mark.parametrize("save", [keras.saving.save_model, keras.models.save_model])
def test_legacy_files_are_refused(save, end, name, tmp_path):
    model = MODELS[name]()
    with pytest.raises(ValueError, match="legacy HDF5 format cannot hold") as error:
        save(model, str(tmp_path / f"model.{end}"))
    assert "model.save('model.keras')" in str(error.value)
    assert "model.save_weights('model.weights.h5')" in str(error.value)
    # What comes after is as ever.
    x = sample(4, 32)
    save(model, tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_float_models_are_left_alone(tmp_path):
    keras.saving.save_model(two_layers(), str(tmp_path / "model.h5"))
    assert keras.saving.load_model(tmp_path / "model.h5").count_params() > 0


def test_names_of_layers_are_not_used_up():
    quantized(two_layers(), INT8).get_config()
    keras.backend.clear_session()
    assert keras.Sequential().name == "sequential"
    quantized(two_layers(), INT8).get_config()
    assert keras.Sequential().name == "sequential_1"
