"""Losses that a layer adds to the model's: those of its weights, and those of its call.

Keras asks the variables that a layer tracks for their regularizers, and a variable that went hollow
is tracked no more. What `add_loss` is given while a layer is traced belongs to that trace.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from fewbit.keras._attention import own_attributes
from fewbit.keras._variables import sublayers


class Regularized:
    """A layer that reports the regularizers of its quantized weights, of what these decode to."""

    def _get_own_losses(self) -> list[Any]:
        # What every model asks the layers inside it for, theirs from `add_loss` being the others.
        return [*super()._get_own_losses(), *_of_weights(self)]  # type: ignore[misc]


def _of_weights(layer: Any) -> list[Any]:
    """As Keras: only where the weight could be trained, were it float."""
    if not layer.trainable:
        return []
    return [
        variable.regularizer(variable.value)
        for variable in layer._fewbit.hollow.values()
        if variable.trainable and getattr(variable, "regularizer", None) is not None
    ]


@contextlib.contextmanager
def losses_of_call(layer: keras.Layer) -> Iterator[list[Any]]:
    """While `layer` is traced: what it, and layers inside it, give to `add_loss`."""
    losses: list[Any] = []

    def add_loss(loss: Any) -> None:
        losses.extend(keras.tree.flatten(loss))

    with own_attributes([(each, {"add_loss": add_loss}) for each in [layer, *sublayers(layer)]]):
        yield losses
