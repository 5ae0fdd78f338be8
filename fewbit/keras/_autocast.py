"""The casts of mixed precision policies, as parts of a layer's trace.

Under such a policy Keras casts a variable where it is read, by a scope that a layer's `__call__`
opens. What is quantized is the variable as it is held, in training as in serving, and the cast is
a step of the layer's program after it. Scopes have no public name; layers, which open them, do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

_NARROW = ("bfloat16", "float16")


class _Inside(keras.Layer):
    """Runs a function in the scope that a layer of its policy runs in."""

    def call(self, run: Callable[[], Any]) -> None:
        run()


def _inside(dtype: str, *, autocast: bool = True) -> keras.Layer:
    with keras.RematScope(mode=None):  # or what `run` traces would not outlive the call
        return _Inside(name="fewbit_inside", dtype=dtype, autocast=autocast)


_UNCAST = _inside("float32", autocast=False)


def held_values(variables: Sequence[keras.Variable]) -> list[Any]:
    """What variables hold now, before any cast.

    >>> class Layer(keras.layers.Dense):
    ...     def call(self, x):
    ...         print(self.kernel.value.dtype, held_values([self.kernel])[0].dtype)
    >>> Layer(2, dtype='mixed_bfloat16')(keras.ops.ones((1, 4)))
    bfloat16 float32
    """
    values: list[Any] = []

    def read() -> None:
        values.extend(variable.value for variable in variables)

    if any(variable.dtype in _NARROW for variable in variables):
        _UNCAST(run=read)
    else:  # nothing is lost, and calling a layer costs an eager call more than all this
        read()
    return values


def as_called(layer: keras.Layer, run: Callable[[], Any]) -> Any:
    """The result of `run` with the casts that variables have inside the layer's own call.

    >>> dense = keras.layers.Dense(2, dtype='mixed_bfloat16')
    >>> dense.build((None, 4))
    >>> dense.kernel.dtype, as_called(dense, lambda: dense.kernel.dtype)
    ('float32', 'bfloat16')
    """
    if not layer.autocast or layer.compute_dtype == layer.variable_dtype:
        return run()
    found: list[Any] = []
    _inside(f"mixed_{layer.compute_dtype}")(run=lambda: found.append(run()))
    return found[0]
