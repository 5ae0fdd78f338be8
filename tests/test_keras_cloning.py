"""Second models: the same values, and nothing shared."""

import jax
import keras
import keras_saving_cases as cases
import numpy as np
import pytest

import fewbit.keras as fk
from fewbit.keras._variables import sublayers

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", ["sequential", "functional", "subclassed"])
def test_a_clone_of_a_quantized_model_has_its_values(name):
    model = cases.CASES[name]()
    x = cases.inputs_of(model, name)
    twin = fk.clone_model(model)
    assert twin is not model and type(twin) is type(model)
    assert [type(each) for each in sublayers(twin)] == [type(each) for each in sublayers(model)]
    expected = jax.tree.map(np.asarray, model(x))
    jax.tree.map(np.testing.assert_array_equal, twin(x), expected)
    assert not {id(v) for v in twin.variables} & {id(v) for v in model.variables}
    for variable in twin.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    jax.tree.map(np.testing.assert_array_equal, model(x), expected)


def test_a_clone_by_keras_says_that_it_has_no_values():
    model = cases.CASES["sequential"]()
    twin = keras.models.clone_model(model)
    words = r"were not loaded.*fewbit\.keras\.clone_model\(model\) copies them too"
    with pytest.raises(ValueError, match=words):
        twin(np.ones((2, 64), "float32"))
    with pytest.raises(Exception, match=words):  # of JAX, around ours
        twin.predict(np.ones((2, 64), "float32"), verbose=0)


def test_a_model_that_cannot_be_made_again_is_named():
    class Closed(keras.Model):
        def __init__(self, width):
            super().__init__()
            self.dense = keras.layers.Dense(width)

        def call(self, x):
            return self.dense(x)

    model = Closed(8)
    model(np.ones((2, 8), "float32"))
    fk.quantize_model(model, fk.DynamicQuantConfig("int8"), progress=False)
    with pytest.raises(ValueError, match="which fewbit.keras.clone_model needs: .*Give the class"):
        fk.clone_model(model)
