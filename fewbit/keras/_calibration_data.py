"""Data for calibration, in every form in which Keras takes data: what the model is called on.

A batch is what `fit` would take: inputs alone, or inputs with labels and sample weights. How many
inputs the model has decides what a tuple of arrays is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from fewbit._errors import describe
from fewbit._progress import progress as with_progress
from fewbit.keras._calibration import CalibrationError

_SIZE = 32  # samples of one array that the model is called on at once, as `predict` does

_FORMS = (
    "Give an array of samples, a dict of arrays by input name, a list of batches, a "
    "tf.data.Dataset, a keras.utils.PyDataset, or a function that runs the model: "
    "lambda model: model.predict(samples)."
)
_MSG_FORM = "Calibration data cannot be {found}. " + _FORMS
_MSG_TEXT = (
    "Calibration data holds text ({found}), and the model is called on numbers. Give a function "
    "that runs it on text: lambda model: model.generate(prompts), or model.predict(texts)."
)
_MSG_EMPTY = (
    "There are no batches to calibrate with: {found} gave none. A generator gives its batches "
    "once: make a new one, or keep them in a list."
)
_MSG_NO_SAMPLES = "There are no samples to calibrate with: {found} has none."
_MSG_ENDLESS = (
    "{found} does not end, so calibration would not either. Give it an end: dataset.take(8), or "
    "itertools.islice(batches, 8)."
)
_MSG_UNBATCHED = (
    "Batch {number} of the calibration data has the shape {shape}, which is that of one sample: "
    "the model takes {wanted}. Put samples into batches: dataset.batch(32), or samples[None]."
)
_MSG_TWO_WAYS = (
    "{count} arrays of shapes {shapes} in a tuple may be batches, or inputs with labels. Write a "
    "list for batches, [a, b], or give the inputs alone."
)
_MSG_INPUTS = (
    "Batch {number} of the calibration data has {found} arrays, and {model} has {count} inputs: "
    "{names}. Give them as a dict by name, as a list, or, with labels, as (inputs, labels)."
)
_MSG_LENGTHS = "The arrays of calibration data have different numbers of samples: {lengths}."


def run_calibration(data: Any, model: keras.Layer, *, progress: bool = True) -> None:
    """Run the model on calibration data, or let the function that was given run it."""
    if callable(data) and not _is_array(data):
        data(model)
        return
    count = 0
    for batch in batches_of(data, model, progress=progress):
        count += 1
        inputs = _checked(_inputs(batch, model, count), model, count)
        if isinstance(model, keras.Model):
            model.predict_on_batch(inputs)
        else:
            model(inputs)
    if not count:
        raise CalibrationError(_MSG_EMPTY.format(found=describe(data)))


def batches_of(data: Any, model: keras.Layer, *, progress: bool = True) -> Iterator[Any]:
    """The batches in calibration data; whole arrays of samples are cut into some.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    >>> [batch.shape for batch in batches_of(np.zeros((40, 2)), model)]
    [(32, 2), (8, 2)]
    """
    if isinstance(data, str | bytes):
        raise TypeError(_MSG_TEXT.format(found=describe(data)))
    whole = _whole(data, model)
    if whole is not None:
        size = _batch_size(model)
        starts = range(0, _length(whole), size)
        for start in with_progress(starts, "Calibrating", show=progress):
            yield _each(lambda array, at=start: array[at : at + size], whole)
        return
    found: Iterable[Any]
    total: int | None
    if isinstance(data, keras.utils.PyDataset):
        numbers = range(_ending(data.num_batches, data))
        found, total = map(data.__getitem__, numbers), len(numbers)
    elif isinstance(data, Iterable):
        found, total = data, _total(data)
    else:
        raise TypeError(_MSG_FORM.format(found=describe(data)))
    yield from with_progress(iter(found), "Calibrating", total, show=progress)


def _whole(data: Any, model: keras.Layer) -> Any:
    """All samples as what the model takes, where the data is arrays of samples; else None."""
    if _is_array(data) or isinstance(data, Mapping):
        return _each(_held, data)
    if not isinstance(data, list | tuple) or not data:
        return None
    if all(isinstance(each, int | float | list) for each in data) and not _holds_arrays(data):
        return np.asarray(data)  # numbers, in lists of lists
    count = _count(model)
    if _has_labels(data, count):
        return _each(_held, data[0])
    if not all(map(_is_array, data)):
        return None
    if count is not None and count > 1 and len(data) == count:
        return [_held(each) for each in data]
    if isinstance(data, list) or len(data) not in (2, 3):
        return None
    if len({tuple(each.shape[1:]) for each in data}) == 1:
        shapes = ", ".join(str(tuple(each.shape)) for each in data)
        raise ValueError(_MSG_TWO_WAYS.format(count=len(data), shapes=shapes))
    return _held(data[0])


def _has_labels(data: Sequence[Any], count: int | None) -> bool:
    """Whether data is inputs in a dict or a list, with labels, as `fit` takes them."""
    if not isinstance(data, tuple) or len(data) not in (2, 3) or not all(map(_is_array, data[1:])):
        return False
    if isinstance(data[0], Mapping):
        return True
    several = isinstance(data[0], list | tuple) and count is not None and len(data[0]) == count > 1
    return several and all(map(_is_array, data[0]))


def _inputs(batch: Any, model: keras.Layer, number: int) -> Any:
    """What the model is called on, of a batch with or without labels."""
    count = _count(model)
    if not isinstance(batch, list | tuple) or not batch:
        return batch
    several = count is not None and count > 1
    if several and len(batch) == count and all(map(_is_array, batch)):
        return list(batch)
    labelled = isinstance(batch, tuple) or (count == 1 and len(batch) > 1)
    if not labelled or not 1 <= len(batch) <= 3:
        return batch
    if several and _is_array(batch[0]):
        names = ", ".join(repr(each.name) for each in model.inputs)
        found = dict(found=len(batch), count=count, names=names, model=f"'{model.name}'")
        raise ValueError(_MSG_INPUTS.format(number=number, **found))
    return batch[0]


def _checked(inputs: Any, model: keras.Layer, number: int) -> Any:
    inputs = _each(_held, inputs)
    wanted = getattr(model, "inputs", None)
    if wanted and len(wanted) == 1 and _is_array(inputs):
        shape, own = tuple(inputs.shape), tuple(wanted[0].shape)
        fits = [a == b or b is None for a, b in zip(shape, own[1:], strict=False)]
        if len(shape) == len(own) - 1 and all(fits):
            raise ValueError(_MSG_UNBATCHED.format(number=number, shape=shape, wanted=own))
    return inputs


def _held(array: Any) -> Any:
    """An array as NumPy's or JAX's own, whichever library made it."""
    made = array if hasattr(array, "addressable_shards") else np.asarray(array)
    if made.dtype.kind in "OSU":
        raise TypeError(_MSG_TEXT.format(found=describe(array)))
    return made


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def _holds_arrays(value: Any) -> bool:
    return any(_is_array(leaf) for leaf in keras.tree.flatten(value))


def _each(do: Any, value: Any) -> Any:
    """The value with every array in it changed; a list of numbers is an array in a dict."""
    if isinstance(value, Mapping):
        return {name: _each(do, each) for name, each in value.items()}
    if isinstance(value, list | tuple) and _holds_arrays(value):
        return [_each(do, each) for each in value]
    return do(value)


def _length(whole: Any) -> int:
    arrays = keras.tree.flatten(whole)
    lengths = [array.shape[0] if array.shape else 0 for array in arrays]
    if not lengths or not all(lengths):
        raise CalibrationError(_MSG_NO_SAMPLES.format(found=describe(whole)))
    if len(set(lengths)) > 1:
        raise ValueError(_MSG_LENGTHS.format(lengths=", ".join(map(str, lengths))))
    return int(lengths[0])


def _count(model: keras.Layer) -> int | None:
    """How many inputs the model has, where it knows: those of your own classes do not."""
    inputs: Sequence[Any] | None = getattr(model, "inputs", None)
    return len(inputs) if isinstance(inputs, list | tuple) and inputs else None


def _batch_size(model: keras.Layer) -> int:
    inputs = getattr(model, "inputs", None)
    return int(inputs[0].shape[0] or _SIZE) if inputs else _SIZE


def _total(data: Any) -> int | None:
    """How many batches there are, if that is known."""
    cardinality = getattr(data, "cardinality", None)
    if callable(cardinality):  # a tf.data.Dataset: -1 is endless, -2 unknown
        return _ending(None if int(cardinality()) == -1 else int(cardinality()), data, known=False)
    try:
        return len(data)
    except TypeError:  # a generator
        return None


def _ending(count: int | None, data: Any, known: bool = True) -> Any:
    if count is None:
        raise ValueError(_MSG_ENDLESS.format(found=describe(data)))
    return count if known or count >= 0 else None
