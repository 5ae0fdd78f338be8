"""Calibration data of a Keras model in every form that `fit` and `predict` take, and wrong ones."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import sample

import fewbit
import fewbit.keras as fk

# Keras' own, of a NumPy that is newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STATIC = fk.StaticQuantConfig("int8")
X = sample(70, 16)
LABELS = np.arange(70)


def one_input():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((16,)), layers.Dense(8, name="up")])


def two_inputs():
    keras.utils.set_random_seed(0)
    a, b = keras.Input((16,), name="a"), keras.Input((16,), name="b")
    return keras.Model([a, b], layers.Dense(8, name="up")(a) + layers.Dense(8, name="side")(b))


class Own(keras.Model):
    """A model that does not know its inputs."""

    def __init__(self):
        super().__init__()
        self.up = layers.Dense(8, name="up")

    def call(self, x):
        return self.up(x)


def own():
    model = Own()
    model(X[:1])
    return model


class Batches(keras.utils.PyDataset):
    def __init__(self, *arrays, size=16, endless=False):
        super().__init__()
        self.arrays, self.size, self.endless = arrays, size, endless

    @property
    def num_batches(self):
        return None if self.endless else -(-len(self.arrays[0]) // self.size)

    def __getitem__(self, index):
        return tuple(array[index * self.size : (index + 1) * self.size] for array in self.arrays)


def a_scales(data, make=one_input):
    model = fk.quantize_model(make(), STATIC, data, progress=False)
    found = [model.up] if make is own else [x for x in model.layers if hasattr(x, "a_scale")]
    return [np.asarray(layer.a_scale.value).item() for layer in found]


def scale(x):
    return np.abs(x).max() / 127.5


def halves(*arrays):
    return [tuple(a[:35] for a in arrays), tuple(a[35:] for a in arrays)]


FORMS = {
    "array": lambda: X,
    "JAX array": lambda: keras.ops.convert_to_tensor(X),
    "lists of numbers": lambda: X.tolist(),
    "batches": lambda: [X[:35], X[35:]],
    "one batch": lambda: [X],
    "tuple of one": lambda: (X,),
    "generator": lambda: (x for x in (X[:35], X[35:])),
    "inputs and labels": lambda: (X, LABELS),
    "with sample weights": lambda: (X, LABELS, np.ones(70)),
    "batches with labels": lambda: halves(X, LABELS),
    "batches with labels of the same shape": lambda: halves(X, 100 * X),
    "batches with labels in lists": lambda: [list(each) for each in halves(X, 100 * X)],
    "batches with sample weights": lambda: halves(X, LABELS, LABELS),
    "PyDataset": lambda: Batches(X),
    "PyDataset with labels": lambda: Batches(X, LABELS),
    "function": lambda: lambda model: model.predict(X, verbose=0),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_input(form):
    assert a_scales(FORMS[form]()) == pytest.approx([scale(X)])


@pytest.mark.parametrize("form", ["array", "batches", "batches with labels", "PyDataset"])
def test_a_model_that_does_not_know_its_inputs(form):
    assert a_scales(FORMS[form](), own) == pytest.approx([scale(X)])


def test_a_layer_alone():
    layer = layers.Dense(8)
    layer.build((None, 16))
    fk.quantize_model(layer, STATIC, X, progress=False)
    assert np.asarray(layer.a_scale.value).item() == pytest.approx(scale(X))


B = 3 * sample(70, 16, seed=1)
TWO = {
    "list of arrays": lambda: [X, B],
    "tuple of arrays": lambda: (X, B),
    "dict": lambda: {"a": X, "b": B},
    "dict and labels": lambda: ({"a": X, "b": B}, LABELS),
    "list of arrays, labels and weights": lambda: ([X, B], LABELS, np.ones(70)),
    "tuple of arrays and labels": lambda: ((X, B), LABELS),
    "batches of tuples": lambda: halves(X, B),
    "batches of lists": lambda: [list(each) for each in halves(X, B)],
    "batches of dicts": lambda: [{"a": a, "b": b} for a, b in halves(X, B)],
    "batches with labels": lambda: [((a, b), y) for a, b, y in halves(X, B, LABELS)],
    "dicts with labels": lambda: [({"a": a, "b": b}, y) for a, b, y in halves(X, B, LABELS)],
    "PyDataset": lambda: Batches(X, B),
}


@pytest.mark.parametrize("form", TWO)
def test_two_inputs(form):
    assert a_scales(TWO[form](), two_inputs) == pytest.approx([scale(X), scale(B)])


def test_tensorflow_datasets():
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices
    wanted = pytest.approx([scale(X)])
    assert a_scales(dataset(X).batch(16)) == wanted
    assert a_scales(dataset((X, LABELS)).batch(16)) == wanted
    assert a_scales(dataset((X, LABELS)).batch(16).filter(lambda x, y: True)) == wanted
    assert a_scales(tf.constant(X)) == wanted
    both = pytest.approx([scale(X), scale(B)])
    assert a_scales(dataset({"a": X, "b": B}).batch(16), two_inputs) == both
    assert a_scales(dataset(((X, B), LABELS)).batch(16), two_inputs) == both
    assert a_scales(dataset((X, B)).batch(16), two_inputs) == both
    refused(dataset(X).batch(16).repeat(), "does not end", "dataset.take(8)")
    refused(dataset(X), "has the shape (16,), which is that of one sample", "dataset.batch(32)")
    refused(dataset(["a text"]).batch(1), "Calibration data holds text", kind=TypeError)


def refused(data, *sentences, make=one_input, kind=ValueError):
    model = make()
    with pytest.raises(kind) as error:
        fk.quantize_model(model, STATIC, data, progress=False)
    for sentence in sentences:
        assert sentence in str(error.value), str(error.value)
    assert type(model.get_layer("up")) is layers.Dense


def test_data_that_is_none():
    used = iter([X])
    list(used)
    for empty in ([], (), used, (x for x in ())):
        refused(empty, "There are no batches to calibrate with", "make a new one, or keep them in")
    refused(X[:0], "There are no samples to calibrate with")
    refused(np.float32(3), "There are no samples to calibrate with")
    refused({}, "There are no samples to calibrate with")


def test_data_that_is_wrong():
    refused("train.csv", "holds text", "lambda model: model.generate(prompts)", kind=TypeError)
    refused(np.array(["a"]), "Calibration data holds text", kind=TypeError)
    refused({"a": X, "b": B[:3]}, "different numbers of samples: 70, 3", make=two_inputs)
    refused(3, "Calibration data cannot be the int 3", "keras.utils.PyDataset", kind=TypeError)
    refused(Batches(X, endless=True), "does not end", "itertools.islice(batches, 8)")
    refused(list(X), "Batch 1 of the calibration data has the shape (16,)", "samples[None]")
    refused((X, 100 * X), "2 arrays of shapes (70, 16), (70, 16)", "Write a list for batches")
    text = "Batch 1 of the calibration data has 3 arrays, and 'functional"
    refused([(X, B, LABELS)], text, "has 2 inputs: 'a', 'b'", "(inputs, labels)", make=two_inputs)


def test_a_part_of_an_endless_generator():
    endless = itertools.cycle([X])
    assert a_scales(itertools.islice(endless, 2)) == pytest.approx([scale(X)])


def test_converting_a_trained_model_takes_the_same_data():
    rule = fewbit.QtRule(weight_qtype="int8", act_qtype="int8")
    model = fk.quantize_model(one_input(), fewbit.QtProvider([rule]), progress=False)
    served = fewbit.to_ptq(model, X, rules=[rule.replace(act_static_scale=True)])
    assert np.asarray(served.layers[0].a_scale.value).item() == pytest.approx(scale(X))
