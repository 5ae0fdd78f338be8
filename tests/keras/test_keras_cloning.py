"""Second models: the same values, and nothing shared."""

import jax
import keras
import keras_saving_cases as cases
import numpy as np
import pytest

import fewbit.keras as fk
from fewbit.keras.layers._variables import sublayers

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


@pytest.mark.parametrize("made", ["quantized", "loaded", "clone"])
@pytest.mark.parametrize("static", [False, True])
def test_weights_that_are_constants_are_so_in_clones_and_files(made, static, tmp_path):
    model, x = (
        keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)]),
        np.ones((2, 64), "f4"),
    )
    if static:
        config = fk.StaticQuantConfig("int8", const_weight=True, const_scale=True)
        fk.quantize_model(model, config, lambda m: m(x), progress=False)
    else:
        config = fk.DynamicQuantConfig("int4", const_weight=True)
        fk.quantize_model(model, config, progress=False)
    wanted = np.asarray(model(x))
    if made == "loaded":
        model.save(tmp_path / "m.keras")
        model = keras.saving.load_model(tmp_path / "m.keras")
    model = fk.clone_model(model) if made == "clone" else model
    twin = fk.clone_model(model)
    for each in (model, twin):
        assert [variable.name for variable in each.variables] == ["bias"]
        np.testing.assert_array_equal(each(x), wanted)
    model.save_weights(tmp_path / "m.weights.h5")
    twin.load_weights(tmp_path / "m.weights.h5")  # the same values
    np.testing.assert_array_equal(twin(x), wanted)


@pytest.mark.parametrize("setting", ["const_weight", "const_scale"])
def test_constants_take_no_other_values(setting, tmp_path):
    """A program that is compiled already would go on with the old ones."""

    def made(number):
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        model.layers[0].kernel.assign(number * np.eye(64))
        config = fk.StaticQuantConfig("int8", **{setting: True})
        fk.quantize_model(model, config, lambda m: m(number * x), progress=False)
        return model

    x = np.ones((2, 64), "float32")
    one, two = made(1), made(2)
    one.save_weights(tmp_path / "m.weights.h5")
    words = rf"is a constant \({setting}=True\), .*keras\.saving\.load_model"
    with pytest.raises(ValueError, match=words):
        two.load_weights(tmp_path / "m.weights.h5")


def test_a_clone_by_keras_says_that_it_has_no_values():
    model = cases.CASES["sequential"]()
    twin = keras.models.clone_model(model)
    words = r"were not loaded.*fewbit\.keras\.clone_model\(model\) copies them too"
    with pytest.raises(ValueError, match=words):
        twin(np.ones((2, 64), "float32"))
    with pytest.raises(Exception, match=words):  # of JAX, around ours
        twin.predict(np.ones((2, 64), "float32"), verbose=0)


def test_a_clone_by_keras_of_layers_that_are_made_when_called_says_so_too(tmp_path):
    model = cases.transformer()
    x = cases.inputs_of(model, "transformer")
    twin = keras.models.clone_model(model)
    with pytest.raises(ValueError, match="were not loaded"):
        twin(x)
    model.save_weights(tmp_path / "m.weights.h5")
    twin.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(twin(x), model(x))


@keras.saving.register_keras_serializable("cloning")
class Late(keras.Model):
    """Attention makes its layers when it is called first, and nothing builds this before."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 8)

    def call(self, x):
        return self.attention(x, x)


def test_a_call_before_anything_is_loaded_tells_of_random_weights(tmp_path):
    model, x = Late(), np.random.default_rng(0).normal(size=(2, 6, 32)).astype("float32")
    model(x)
    fk.quantize_model(model, fk.DynamicQuantConfig("int8"), progress=False)
    again = type(model).from_config(model.get_config())
    with pytest.warns(UserWarning, match=r"not loaded \(attention.*from new random weights. Load"):
        again(x)
    with pytest.raises(ValueError, match="were not loaded"):
        again(x)
    model.save_weights(tmp_path / "m.weights.h5")
    again.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(again(x), model(x))


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


@keras.saving.register_keras_serializable("cloning")
class Named(keras.Model):
    """Inputs by name, and no build()."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.ups = [keras.layers.Dense(8), keras.layers.Dense(8)]

    def call(self, inputs):
        return self.ups[0](inputs["a"]) + self.ups[1](inputs["b"])


def test_a_model_of_inputs_by_name():
    model, x = Named(), {"a": np.ones((2, 4), "float32"), "b": np.ones((2, 6), "float32")}
    wanted = np.asarray(model(x))
    twin = fk.quantize_model(model, fk.DynamicQuantConfig("int8"), inplace=False, progress=False)
    np.testing.assert_allclose(twin(x), wanted, atol=0.03)
    np.testing.assert_array_equal(fk.clone_model(twin)(x), twin(x))
    np.testing.assert_array_equal(model(x), wanted)


def test_a_config_that_makes_less_is_told_by_numbers():
    class Grown(Named):
        def __init__(self, more=None, **kwargs):
            super().__init__(**kwargs)
            self.more = more

        def call(self, inputs):
            return super().call(inputs) if self.more is None else self.more(super().call(inputs))

        def get_config(self):
            return {}

    model = Grown(keras.layers.Dense(3))
    model({"a": np.ones((2, 4), "float32"), "b": np.ones((2, 6), "float32")})
    with pytest.raises(ValueError, match="needs: what it makes has 2 layers and the model 3. Give"):
        fk.quantize_model(model, fk.DynamicQuantConfig("int8"), inplace=False, progress=False)


def gated(gate):
    """As in MobileNetV3: a graph with layers and operations of the same names."""
    x = keras.Input((8,))
    h = keras.layers.Add()([keras.layers.Dense(8)(x), keras.layers.Dense(8)(x)])
    return keras.Model(x, gate([h, keras.ops.relu6(h + 3.0) * (1 / 6)]))


class Multiply(keras.layers.Layer):
    def call(self, pair):
        return pair[0] * pair[1]


@pytest.mark.parametrize("gate", [keras.layers.Multiply, Multiply])
def test_layers_and_operations_of_one_name(gate):
    model, x = gated(gate()), np.linspace(-1, 1, 16).reshape(2, 8).astype("float32")
    wanted = np.asarray(model(x))
    config = fk.DynamicQuantConfig("int8")
    twin = fk.quantize_model(model, config, inplace=False, progress=False)
    assert [type(each).__name__ for each in model.layers[1:3]] == ["Dense", "Dense"]
    assert [type(each).__name__ for each in twin.layers[1:3]] == ["QDynamicDense"] * 2
    np.testing.assert_allclose(twin(x), wanted, atol=0.03 * np.abs(wanted).max())
    np.testing.assert_array_equal(model(x), wanted)


def test_operations_survive_a_clone_of_the_quantized_model():
    model = gated(keras.layers.Multiply())
    fk.quantize_model(model, fk.DynamicQuantConfig("int8"), progress=False)
    x = np.linspace(-1, 1, 16).reshape(2, 8).astype("float32")
    np.testing.assert_array_equal(fk.clone_model(model)(x), model(x))


@pytest.mark.long
def test_a_mobilenet_beside_its_quantized_twin():
    options = dict(weights=None, classes=5, classifier_activation=None)
    model = keras.applications.MobileNetV3Small((32, 32, 3), **options)
    x = np.random.default_rng(0).uniform(0, 255, (2, 32, 32, 3)).astype("float32")
    wanted = np.asarray(model(x))
    config = fk.DynamicQuantConfig("int8")
    twin = fk.quantize_model(model, config, inplace=False, progress=False)
    assert sum(type(each).__name__.startswith("QDynamic") for each in twin.layers) > 50
    np.testing.assert_array_equal(model(x), wanted)
    error = np.abs(np.asarray(twin(x)) - wanted).max() / np.ptp(wanted)
    assert 0 < error < 0.2
