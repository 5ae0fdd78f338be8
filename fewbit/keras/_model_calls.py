"""How a model calls its layers: seen while the whole model is traced on abstract inputs.

For a layer that cannot be called on the shapes it was built for: one that takes a second argument,
or was built on another rank, or without any shape.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras

from fewbit.calls import is_array
from fewbit.keras._attention import own_attributes

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
# What stands for unknown sizes of the first axis, of the second, and of all others.
SIZES = ((1, 16, 16), (1, 1, 16), (1, 1, 1))


def calls_in(
    model: keras.Layer, layers: Sequence[keras.Layer]
) -> tuple[dict[keras.Layer, Calls], bool]:
    """The calls of each layer, those of one form once; and whether that is all of the model.

    What cannot be traced to its end tells of the layers before.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> [(args, options)] = calls_in(model, model.layers)[0][model.layers[0]]
    >>> args
    (ShapeDtypeStruct(shape=(1, 8), dtype=float32),)
    """
    found: dict[keras.Layer, Calls] = {}
    for sizes in SIZES:
        seen: dict[keras.Layer, Calls] = {}
        with contextlib.suppress(Exception):  # the layers that need it say that they lack a call
            inputs = _inputs(model, sizes)
            if inputs is not None:
                jax.eval_shape(functools.partial(_run, model, layers, seen), inputs)
                return found | seen, True
        found = seen | found
    return found, False


def abstract(shape: Any, dtype: str, sizes: Sequence[int] = SIZES[0]) -> Any:
    """An input of a shape whose unknown sizes are small ones; a tree of them for a tree.

    >>> abstract({'ids': (None, 4), 'mask': (None, None)}, 'int32')['mask'].shape
    (1, 16)
    """
    if isinstance(shape, dict):
        return {key: abstract(value, dtype, sizes) for key, value in shape.items()}
    if any(isinstance(size, list | tuple | dict) for size in shape):
        return [abstract(each, dtype, sizes) for each in shape]
    known = [size if size is not None else sizes[min(axis, 2)] for axis, size in enumerate(shape)]
    return jax.ShapeDtypeStruct(tuple(known), dtype)


def _inputs(model: Any, sizes: Sequence[int]) -> Any:
    """What the model takes, as it says itself; None if it does not."""
    if getattr(model, "inputs", None):  # a graph, or a Sequential that is built
        # A Sequential that was never called has no `input`.
        return jax.tree.map(
            lambda x: abstract(tuple(x.shape), x.dtype, sizes),
            model.inputs[0] if isinstance(model, keras.Sequential) else model.input,
            is_leaf=lambda x: isinstance(x, keras.KerasTensor),
        )
    config = model.get_build_config() or {}
    shape = config.get("input_shape")
    return None if shape is None else abstract(shape, model.compute_dtype, sizes)


def _run(model: Any, layers: Sequence[keras.Layer], found: Any, inputs: Any) -> None:
    with keras.StatelessScope(), _recording(layers, found):
        model(inputs)


@contextlib.contextmanager
def _recording(layers: Sequence[Any], found: dict[keras.Layer, Calls]) -> Iterator[None]:
    def recorded(layer: Any) -> Any:
        call = layer.call

        @functools.wraps(call)
        def record(*args: Any, **kwargs: Any) -> Any:
            seen = jax.tree.map(_as_abstract, (args, kwargs))
            calls = found.setdefault(layer, [])
            if seen not in calls:
                calls.append(seen)
            return call(*args, **kwargs)

        return record

    with own_attributes([(layer, {"call": recorded(layer)}) for layer in layers]):
        yield


def _as_abstract(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable):
        leaf = leaf.value
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf
