"""A layer's variable whose values are stored quantized, its parts being variables of their own.

Keras tracks variables by layer and locks a layer once it is built; changing what a built layer
holds is what Keras' own `quantize` and `enable_lora` do, by the same few names.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from fewbit.numerics import dtype_bits
from fewbit.qarray import WithAux, dequantize
from fewbit.qarray import pack as pack_codes

PARTS = ("qvalue", "scale", "zero_point", "tensor_scale")
# Not fp8: Keras has variables of it, but neither Keras nor KerasHub knows how large they are, which
# `summary` and `save_to_preset` ask.
_KERAS_DTYPES = frozenset(
    ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    + ("float16", "bfloat16", "float32", "float64")
)
_MSG_ASSIGN = (
    "{path} is stored as {qtype} and cannot be assigned to. Set the float model's weights and "
    "quantize it again, or load a saved quantized model: keras.saving.load_model(...)."
)
_MSG_CONSTANT = (
    "{path} is a constant ({setting}=True), which compiled programs would go on using as it is: it "
    "takes no other value. Load the whole model: keras.saving.load_model(...)."
)
_MSG_CELL = (
    "{path} is stored as {qtype} for its cell's own steps. Read it as `.value`, which decodes it."
)


class QuantizedVariable(keras.Variable):
    """A float variable without float values: reading it decodes the stored parts.

    Inside a layer's own trace it has the traced value that `keras.StatelessScope` gives it.
    """

    _fewbit_stored: "Stored | None"

    def assign(self, value: Any) -> Any:
        raise TypeError(self._refusal(_MSG_ASSIGN))

    def _refusal(self, message: str) -> str:
        stored = self._fewbit_stored
        qtype = "a quantized value" if stored is None else stored.value().array.qtype
        return message.format(path=self.path, qtype=qtype)

    def _deferred_initialize(self) -> None:
        """Nothing: Keras would make floats for a variable that it saw without a value."""


class QuantizedCellVariable(QuantizedVariable):
    """The weight of a recurrent cell, which Keras' GRU and LSTM would rather use without the cell.

    They ask JAX for it first, and step through the cell where that is not implemented.
    """

    def __jax_array__(self) -> Any:
        raise NotImplementedError(self._refusal(_MSG_CELL))


@dataclass(eq=False)
class Stored:
    """The quantized value of one variable: its structure, and a Keras variable per array of it.

    With `const_weight` the parts are arrays, which compiled programs hold as constants.
    """

    name: str
    treedef: Any
    parts: list[Any]
    dtypes: list[Any]

    @property
    def constant(self) -> bool:
        """Whether its parts are arrays."""
        return not any(isinstance(part, keras.Variable) for part in self.parts)

    def value(self) -> WithAux:
        """The value now: traced inside a `keras.StatelessScope` that maps the parts."""
        held = zip(map(value_of, self.parts), self.dtypes, strict=True)
        return jax.tree.unflatten(self.treedef, [_viewed(value, dtype) for value, dtype in held])


def value_of(part: Any) -> Any:
    """What a variable, or the constant in its place, holds now."""
    return part.value if isinstance(part, keras.Variable) else part


def store(
    layer: keras.Layer, variable: keras.Variable, value: WithAux, *, constant: bool = False
) -> Stored:
    """Let `layer` hold `value` in place of the variable's floats, which are given up."""
    value = _at_whole_bytes(value)
    leaves, treedef = jax.tree.flatten(value)
    parts: list[Any] = list(leaves)
    if not constant:
        names = [f"{variable.name}_{part}" for part in PARTS]
        with unlocked(layer):
            parts = [add_variable(layer, names[k], leaf) for k, leaf in enumerate(leaves)]
    stored = Stored(variable.name, treedef, parts, [leaf.dtype for leaf in leaves])
    hollow(layer, variable, stored)
    return stored


def add_variable(
    layer: keras.Layer, name: str, value: jax.Array, *, overwritten: bool = False
) -> keras.Variable:
    """A non-trainable variable that holds `value`, the layer being unlocked.

    One that is `overwritten` is what Keras calls so: its gradient is its next value.
    """
    held = _held(value)
    with keras.name_scope(layer.name, caller=layer):
        variable = keras.Variable(
            lambda shape, dtype=None: held,
            shape=held.shape,
            dtype=str(held.dtype),
            trainable=overwritten,
            autocast=False,
            name=name,
            layout=_layout(held),
        )
    variable.overwrite_with_gradient = overwritten
    layer._track_variable(variable)
    return variable


def _layout(value: jax.Array) -> Any:
    """Where the value is now, under a `keras.distribution`, whose rules are for float kernels."""
    distribution = keras.distribution.distribution()
    if distribution is None or isinstance(value.sharding, jax.sharding.NamedSharding):
        return None if distribution is None else value.sharding
    return keras.distribution.TensorLayout([None] * value.ndim, distribution.device_mesh)


def hollow(layer: keras.Layer, variable: keras.Variable, stored: Stored | None) -> None:
    """Give up the floats of a variable: from now on it reads what is stored (None: not yet)."""
    layer._untrack_variable(variable)
    is_cell = hasattr(layer, "state_size")
    variable.__class__ = QuantizedCellVariable if is_cell else QuantizedVariable
    variable._fewbit_stored = stored
    variable._value = None
    if stored is None:
        variable._initializer = lambda shape, dtype=None: jnp.full(shape, jnp.nan, dtype)
    else:
        variable._initializer = lambda shape, dtype=None: dequantize(stored.value().array)


def fill(
    layer: keras.Layer,
    variable: keras.Variable,
    value: WithAux,
    old: Stored | None,
    *,
    constant: bool = False,
) -> Stored:
    """Let a hollow variable read `value`; parts that it had before take the new numbers."""
    leaves, treedef = jax.tree.flatten(_at_whole_bytes(value))
    held = [_held(leaf) for leaf in leaves]
    if old is not None and old.constant:
        check_constants(variable.path, "const_weight", old.parts, leaves)
        return old
    if old is not None:
        if [part.shape for part in old.parts] == [array.shape for array in held]:
            for part, array in zip(old.parts, held, strict=True):
                part.assign(array)
            old.treedef, old.dtypes = treedef, [leaf.dtype for leaf in leaves]
            return old
        for part in old.parts:
            layer._untrack_variable(part)
    return store(layer, variable, value, constant=constant)


def check_constants(path: str, setting: str, old: list[Any], new: list[Any]) -> None:
    """Raise if constants would be given other values."""
    same = len(old) == len(new) and all(
        np.array_equal(_held(a), _held(b)) for a, b in zip(old, new, strict=True)
    )
    if not same:
        raise ValueError(_MSG_CONSTANT.format(path=path, setting=setting))


def drop_variables(layer: keras.Layer, variables: list[keras.Variable]) -> None:
    """Let a layer forget variables of its own."""
    with unlocked(layer):
        for variable in variables:
            layer._untrack_variable(variable)


def set_variable(
    layer: keras.Layer, name: str, value: jax.Array, old: keras.Variable | None
) -> keras.Variable:
    """A variable with this value: the old one, or a new one of a built layer."""
    if isinstance(old, keras.Variable):
        old.assign(value)
        return old
    with unlocked(layer):
        return add_variable(layer, name, value)


@contextlib.contextmanager
def unlocked(layer: keras.Layer) -> Iterator[None]:
    """While a built layer may get new variables."""
    locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        yield
    finally:
        if locked:
            layer._tracker.lock()


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The variables that a layer itself holds, not those of its sublayers."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    return list({id(v): v for v in own}.values())


def is_recomputed(layer: keras.Layer) -> bool:
    """Whether a `keras.RematScope` has the layer's call run again in the backward pass."""
    mode = getattr(layer, "_remat_mode", None)
    if mode is None or mode.mode in (None, "activations"):
        return False
    return mode.mode != "list_of_layers" or layer.name in mode.layer_names


def take_path(new: Any, old: Any) -> None:
    """Let a layer or variable have the path of its twin: Keras gave it one by how it was built."""
    if old.path is not None:
        new._path = old.path


def direct_sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that this one tracks itself, in the order in which it got them."""
    return layer._flatten_layers(include_self=False, recursive=False)


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """Every layer below this one, at any depth, each once."""
    found = layer._flatten_layers(include_self=False, recursive=True)
    return list({id(each): each for each in found}.values())


def _at_whole_bytes(value: WithAux) -> WithAux:
    """Codes narrower than a byte packed: Keras has no variables of 4 bits."""
    q = value.array
    if q.layout == "plain" and dtype_bits(q.data.dtype) < 8:
        return value.replace(array=pack_codes(q))
    return value


def _held(value: Any) -> jax.Array:
    """The array in a type that Keras knows; 8-bit types that it does not know as their bytes."""
    array = jnp.asarray(value)
    if array.dtype.name in _KERAS_DTYPES:
        return array
    if array.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(array, jnp.uint8)
    raise TypeError(f"Keras has no type for {array.dtype.name}.")


def _viewed(array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return array
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)
