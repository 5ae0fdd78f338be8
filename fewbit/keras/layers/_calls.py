"""How a layer is called, as far as its products go: abstract inputs of the shapes it was built for,
or those that the model calls it with.

`register_calls` tells it for a layer whose calls neither shows.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import keras

from fewbit.interpreter import is_array
from fewbit.keras.layers._attention import is_attention, own_attributes
from fewbit.keras.layers._variables import sublayers

# --- How a model calls its layers: seen while the whole model is traced on abstract inputs --------

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


# --- Examples of how a layer is called, of the shapes it was built for ----------------------------

T = TypeVar("T")
_MSG_NO_EXAMPLE = (
    "'{path}' ({cls}) cannot be called on examples of its inputs. Say how it is called: "
    "fewbit.keras.register_calls."
)
_CALLS: dict[type, Callable[[Any], Calls]] = {}
_OWN_CALLS: dict[type, Callable[[Any], Calls]] = {}
_BATCH, _LENGTH = SIZES[0][:2]


def register_calls(cls: type) -> Callable[[Callable[[Any], Calls]], Callable[[Any], Calls]]:
    """Say how layers of this class (and its subclasses) are called: `[(args, kwargs), ...]`.

    >>> import jax, keras
    >>> @register_calls(keras.layers.Dense)
    ... def calls(layer):
    ...     return [((jax.ShapeDtypeStruct((1, 4), 'float32'),), {})]
    >>> _ = _CALLS.pop(keras.layers.Dense)
    """

    def register(calls: Callable[[Any], Calls]) -> Callable[[Any], Calls]:
        _CALLS[cls] = calls
        return calls

    return register


def _own_calls(cls: type) -> Callable[[Callable[[Any], Calls]], Callable[[Any], Calls]]:
    def register(calls: Callable[[Any], Calls]) -> Callable[[Any], Calls]:
        _OWN_CALLS[cls] = calls
        return calls

    return register


def is_rotary(layer: keras.Layer) -> bool:
    """Whether a layer is KerasHub's rotary embedding, which holds no weights."""
    return any(cls.__name__ == "RotaryEmbedding" for cls in type(layer).__mro__)


class NoExample(ValueError):
    """No call of a layer is known that it can be traced with; the cause is its first failure."""


class Examples:
    """Abstract calls of a model's layers, for every way in which they use their weights."""

    def __init__(self, model: keras.Layer):
        self._model = model

    def of(self, layer: keras.Layer, rule: Any = None) -> Iterator[Calls]:
        """What may do as examples, by the layer's rule, the cheapest first.

        What was registered for the layer's class is all there is for it.
        """
        registered = _registered(layer, _CALLS)
        if registered is not None:
            yield _in_whole_tiles(registered, rule)
            return
        own = _registered(layer, _OWN_CALLS)
        calls = own if own is not None else _built_calls(layer)
        if calls:
            yield _in_whole_tiles(calls, rule)
        if layer in self._calls_in_model[0]:
            yield _in_whole_tiles(self._calls_in_model[0][layer], rule)

    def is_idle(self, layer: keras.Layer) -> bool:
        """Whether the model never calls a layer, though it may use its weights by other methods."""
        found, whole = self._calls_in_model
        return whole and layer not in found

    @functools.cached_property
    def _calls_in_model(self) -> tuple[dict[keras.Layer, Calls], bool]:
        return calls_in(self._model, sublayers(self._model))

    def first(
        self, layer: Any, rule: Any, work: Callable[[Calls], T], known: Calls | None = None
    ) -> T:
        """What `work` makes of the first examples that do; those that are `known` to do, if any."""
        failed: Exception | None = None
        found = self.of(layer, rule) if known is None else iter([known])
        while True:
            try:
                calls = next(found, None)
                if calls is None:
                    break
                return work(calls)
            except Exception as error:  # whatever the code of the layer, or of its calls, raises
                failed = failed or error
        path = layer.path or layer.name
        raise NoExample(_MSG_NO_EXAMPLE.format(path=path, cls=type(layer).__name__)) from failed


def is_registered(layer: keras.Layer) -> bool:
    """Whether `register_calls` tells how the layer is called."""
    return any(cls in _CALLS for cls in type(layer).__mro__)


def _registered(layer: keras.Layer, known: Mapping[type, Any]) -> Calls | None:
    made = next((known[cls] for cls in type(layer).__mro__ if cls in known), None)
    return None if made is None else made(layer)


def _in_whole_tiles(calls: Calls, rule: Any) -> Calls:
    tile = getattr(rule, "bwd_weight_grad_tile_size", None)
    if isinstance(tile, Mapping):
        tile = tile.get(0)
    if tile is None:
        return calls
    # Tiles of a weight's gradient are cut from the batch, whose size is known in training only.
    batch = round(1 / tile) if isinstance(tile, float) else tile

    def in_whole_tiles(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct) or x.shape[:1] != (_BATCH,):
            return x
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)

    made: Calls = jax.tree.map(in_whole_tiles, calls)
    return made


def _built_calls(layer: keras.Layer) -> Calls:
    """One call on the shapes that the layer was built for; none where they are not known."""
    if is_rotary(layer):  # made for heads of any size, and never built for one
        return [((jax.ShapeDtypeStruct((_BATCH, _LENGTH, 1, 64), layer.compute_dtype),), {})]
    try:
        given = [shape for shape in _shapes(layer) if shape is not None]
        args = tuple(abstract(shape, layer.compute_dtype) for shape in given)
    except Exception:  # a get_build_config, or arguments of build, that are not shapes
        return []
    return [(args, _mask_of_attention(layer))] if args else []


def _shapes(layer: keras.Layer) -> list[Any]:
    """The shapes that `build` was called with.

    A layer's own get_build_config may say anything; Keras' knows what Keras recorded.
    """
    for config in (layer.get_build_config(), keras.Layer.get_build_config(layer)):
        if config and config.get("shapes_dict"):
            return list(config["shapes_dict"].values())
        if config and "input_shape" in config:
            return [config["input_shape"]]
    return []


def _mask_of_attention(layer: keras.Layer) -> dict[str, Any]:
    """The mask without which KerasHub's attention layers cannot be called."""
    keras_own = isinstance(
        layer, keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention
    )
    if keras_own or not is_attention(layer):
        return {}
    if "attention_mask" not in inspect.signature(type(layer).call).parameters:
        return {}
    return {"attention_mask": jax.ShapeDtypeStruct((_BATCH, _LENGTH, _LENGTH), "bool")}


@_own_calls(keras.layers.Embedding)
def _look_up(layer: Any) -> Calls:
    calls: Calls = [((jax.ShapeDtypeStruct((_BATCH, _LENGTH), "int32"),), {})]
    if hasattr(layer, "tie_weights"):  # a reversible one, of Keras or of KerasHub
        hidden = jax.ShapeDtypeStruct((_BATCH, _LENGTH, layer.output_dim), layer.compute_dtype)
        calls.append(((hidden,), {"reverse": True}))
    return calls


@_own_calls(keras.layers.LSTMCell)
@_own_calls(keras.layers.GRUCell)
@_own_calls(keras.layers.SimpleRNNCell)
def _step(layer: Any) -> Calls:
    shapes = _shapes(layer)
    if not shapes:
        return []
    x = jax.ShapeDtypeStruct((_BATCH, shapes[0][-1]), layer.compute_dtype)
    sizes = layer.state_size if isinstance(layer.state_size, list | tuple) else [layer.state_size]
    states = [jax.ShapeDtypeStruct((_BATCH, size), layer.compute_dtype) for size in sizes]
    return [((x, states), {})]
