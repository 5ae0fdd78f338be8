"""After a quantize_model that failed, at whatever moment, the model is as it was."""

import gc

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import class_names, error_of, sample

import fewbit
import fewbit.keras
from fewbit.keras import DynamicQuantConfig, StaticQuantConfig, _quantize
from fewbit.keras.layers._variables import sublayers

X, Y = sample(8, 6, 32), sample(8, 6, 4, seed=1)
STATIC = StaticQuantConfig("int8")
INT8 = DynamicQuantConfig("int8")
# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def net():
    """A graph, compiled, trained and used, with a model inside and a recurrent layer."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 32))
    inner = keras.Sequential([keras.Input((6, 32)), layers.Dense(32, name="in")], name="inner")
    h = layers.GRU(16, return_sequences=True, name="gru")(inner(x))
    h = layers.Dense(64, activation="relu", kernel_regularizer="l2", name="up")(h)
    model = keras.Model(x, layers.Dense(4, name="down")(h), name="net")
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)
    return model


@pytest.fixture(scope="module")
def made():
    return net()


def held_by(value):
    """What a shallow look at an attribute sees."""
    if isinstance(value, list | tuple):
        return [id(each) for each in value]
    return {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)


def everything(model):
    """All that a user or Keras could see of a model, arrays by their values."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *getattr(optimizer, "variables", []), *model.metrics_variables]
    told = {v.path for v in model.metrics_variables}  # evaluate changes them, and means to
    return {
        "classes": [type(each) for each in [model, *sublayers(model)]],
        "policies": [each.dtype_policy.name for each in sublayers(model)],
        "attributes": [
            {name: held_by(value) for name, value in vars(each).items()}
            for each in [model, *sublayers(model)]
        ],
        "variables": [(id(v), type(v), v.path, v.trainable) for v in variables],
        "trainable": [id(v) for v in model.trainable_variables],
        "compiled": [model.train_function, model.predict_function, id(optimizer)],
    }, [np.asarray(v.value) for v in variables if v.path not in told]


def interrupt(model):
    model.predict(X, verbose=0)
    raise KeyboardInterrupt


class Data(keras.utils.PyDataset):
    """Batches of which some cannot be read."""

    def __init__(self, first_bad):
        super().__init__()
        self.first_bad = first_bad

    def __len__(self):
        return 4

    def __getitem__(self, number):
        if number >= self.first_bad:
            raise OSError("no such file")
        return (X[2 * number : 2 * number + 2],)


def fails_in_the_middle(model):
    model.predict(Data(2), verbose=0)


def fails_at_once(model):
    model.predict(Data(0), verbose=0)


def spoils(model):
    model.predict(np.full_like(X, np.nan), verbose=0)


def zeros(model):
    model.predict(0 * X, verbose=0)


def trains(model):
    return model.evaluate(X, Y, verbose=0), 1 / 0


CALIBRATIONS = {
    "nothing is given": (None, ValueError),
    "it is interrupted": (interrupt, KeyboardInterrupt),
    "its data fail in the middle": (fails_in_the_middle, OSError),
    "its data fail at once": (fails_at_once, OSError),
    "it meets NaN": (spoils, fewbit.keras.CalibrationError),
    "it meets zeros": (zeros, fewbit.keras.CalibrationError),
    "it runs nothing": (lambda model: None, fewbit.keras.CalibrationError),
    "it evaluates": (trains, ZeroDivisionError),
}


def check_as_it_was(model, before):
    (facts, values), (wanted, arrays) = everything(model), before
    for name in wanted:
        assert facts[name] == wanted[name], name
    for value, array in zip(values, arrays, strict=True):
        np.testing.assert_array_equal(value, array)


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_calibration_that_fails(made, name):
    calibrate, kind = CALIBRATIONS[name]
    before = everything(made)
    with pytest.raises(kind) as caught:
        fewbit.keras.quantize_model(made, STATIC, calibrate, progress=False)
    assert not getattr(caught.value, "__notes__", [])
    check_as_it_was(made, before)
    made.predict(X, verbose=0)
    check_as_it_was(made, before)


@pytest.mark.parametrize(
    "config",
    [
        DynamicQuantConfig("int8", white_list=["nowhere"]),
        [fewbit.QuantizationRule(module_path="nowhere", weight_qtype="int8")],
        "int8",
        None,
    ],
    ids=["white_list", "rules", "text", "none"],
)
def test_a_config_that_does_not_fit(made, config):
    before = everything(made)
    with pytest.raises((ValueError, TypeError)):
        fewbit.keras.quantize_model(made, config, progress=False)
    check_as_it_was(made, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_conversion_that_fails(made, monkeypatch, number, error):
    before, done = everything(made), []

    def convert(*args):
        done.append(args)
        if len(done) == number:
            raise error
        return original(*args)

    original = _quantize.convert
    monkeypatch.setattr(_quantize, "convert", convert)
    with pytest.raises(error):
        fewbit.keras.quantize_model(made, STATIC, lambda m: m.predict(X, verbose=0), progress=False)
    assert len(done) == number
    check_as_it_was(made, before)


@pytest.mark.parametrize("name", ["make_saveable", "guard_training", "renew_optimizers"])
def test_what_fails_after_the_last_layer(made, monkeypatch, name):
    before = everything(made)

    def fail(*args, **kwargs):
        raise RuntimeError("at the very end")

    monkeypatch.setattr(_quantize, name, fail)
    with pytest.raises(RuntimeError, match="at the very end"):
        fewbit.keras.quantize_model(made, INT8, progress=False)
    check_as_it_was(made, before)


def test_a_kernel_that_is_not_finite(made):
    kernel = made.get_layer("up").kernel
    good = np.asarray(kernel.value)
    kernel.assign(np.where(good == good.max(), np.nan, good))
    before = everything(made)
    with pytest.raises(ValueError, match="up/kernel"):
        fewbit.keras.quantize_model(made, INT8, progress=False)
    check_as_it_was(made, before)
    kernel.assign(good)


def test_training_that_cannot_begin(made):
    before = everything(made)
    rules = [fewbit.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    with pytest.raises(ValueError, match="unroll=True"):
        fewbit.quantize_model(made, fewbit.QtProvider(rules))
    check_as_it_was(made, before)


def test_a_second_try_succeeds():
    model = net()
    wanted = model.predict(X, verbose=0)
    for calibrate in (interrupt, fails_at_once):
        with pytest.raises(BaseException):  # noqa: B017
            fewbit.keras.quantize_model(model, STATIC, calibrate, progress=False)
    fewbit.keras.quantize_model(model, STATIC, lambda m: m.predict(X, verbose=0), progress=False)
    assert "QStaticDense" in class_names(model)
    assert error_of(model.predict(X, verbose=0), wanted) < 0.1


def test_to_ptq_that_fails_leaves_what_was_trained():
    model = keras.Sequential([keras.Input((32,)), layers.Dense(32), layers.Dense(4)], name="net")
    rules = [fewbit.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    fewbit.quantize_model(model, fewbit.QtProvider(rules))
    model.compile("sgd", "mse")
    model.fit(X[:, 0], Y[:, 0], verbose=0)
    trained, before = model.predict(X[:, 0], verbose=0), everything(model)
    with pytest.raises(KeyboardInterrupt):
        fewbit.to_ptq(model, lambda model: interrupt_at(model, X[:, 0]), progress=False)
    check_as_it_was(model, before)
    np.testing.assert_array_equal(model.predict(X[:, 0], verbose=0), trained)
    served = fewbit.to_ptq(model, progress=False).predict(X[:, 0], verbose=0)
    np.testing.assert_array_equal(served, trained)


def interrupt_at(model, x):
    model.predict(x, verbose=0)
    raise KeyboardInterrupt


def test_floats_that_were_not_kept_come_back_rounded_and_that_is_told(monkeypatch):
    model = keras.Sequential(
        [keras.Input((32,)), *(layers.Dense(32, name=f"dense{k}") for k in range(3))], name="net"
    )
    kernels = [np.asarray(layer.kernel.value) for layer in model.layers]
    wanted = np.asarray(model(X[:, 0]))
    names = class_names(model)
    monkeypatch.setattr(_quantize, "_KEPT", 2 * kernels[0].nbytes)  # of one layer and its bias

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
        patched.setattr(_quantize, "make_saveable", fail)
        fewbit.keras.quantize_model(model, INT8, progress=False)
    (note,) = caught.value.__notes__
    assert "'net' is float again, but 2 variables had been quantized and given up" in note
    assert "net/dense1/kernel, net/dense2/kernel" in note
    assert class_names(model) == names and len(model.trainable_variables) == 6
    np.testing.assert_array_equal(model.layers[0].kernel.value, kernels[0])
    for layer, kernel in zip(model.layers[1:], kernels[1:], strict=True):
        np.testing.assert_allclose(layer.kernel.value, kernel, atol=np.abs(kernel).max() / 200)
    assert "For the exact ones make the model again, or load its weights." in note
    fewbit.keras.quantize_model(model, INT8, progress=False)
    assert error_of(model(X[:, 0]), wanted) < 0.05


def test_values_that_keras_gave_away_are_told(monkeypatch):
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4, name="up")], name="net")

    def calibrate(model):
        model.layers[0].kernel.value.delete()  # as a program that fails does with its arguments
        raise OSError("lost")

    with pytest.raises(OSError) as caught:
        fewbit.keras.quantize_model(model, STATIC, calibrate, progress=False)
    (note,) = caught.value.__notes__
    assert "1 variable of 'net'" in note and "up/kernel" in note


def test_nothing_is_kept_when_it_succeeds():
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4, name="up")], name="net")
    gc.collect()  # what other tests left in cycles
    before = {id(array) for array in jax.live_arrays()}
    kernel = id(model.layers[0].kernel.value)
    fewbit.keras.quantize_model(model, INT8, progress=False)
    gc.collect()
    after = {id(array) for array in jax.live_arrays()}
    assert kernel not in after and len(after) <= len(before) + 2
