"""The layers of a quantized model as lines: class, dotted path, scales. Printed, returned, logged.

With `LOGLEVEL=DEBUG` in the environment the lines are log records too, with time, file and line.
"""

import logging
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from fewbit._errors import describe
from fewbit.keras._classes import is_quantized
from fewbit.keras._scale_views import weight_scales
from fewbit.keras._variables import direct_sublayers, value_of

LOGGER = logging.getLogger("fewbit")
_FORMAT = "%(asctime)s [%(levelname)s][%(filename)s:%(lineno)s] %(message)s"
_MSG_NOT_KERAS = (
    "print_model takes a Keras model or layer, or a list of them, got {found}. For Flax models and "
    "plain functions: print(fewbit.plan(model, rules, *inputs))."
)
_MSG_WIDTHS = "str_length is two least widths, of class and path: (0, 0), not {found}."

Row = tuple[str, str, str]


def print_model(
    container: Any,
    max_lines: int = 999999,
    internal: bool = True,
    str_length: tuple[int, int] = (0, 0),
    path: str = "",
) -> str:
    """Print, log and return a line per layer: class, dotted path, a_scale, a_zero_point, w_scale.

    `container` is a model, a layer or a list of layers. `internal=False` leaves out the layers
    inside layers; `str_length` are the least widths of class and path; `path` is what paths begin
    with. A value that is a constant and no variable is marked `(attr)`.

    >>> import fewbit.keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name='up')])
    >>> config = fewbit.keras.StaticQuantConfig('fp8', const_scale=True)
    >>> samples = [np.ones((2, 8), 'float32')]
    >>> model = fewbit.keras.quantize_model(model, config, samples, progress=False)
    >>> text = print_model(model)
    InputLayer .input_layer...
    QStaticDense .up a_scale=[0.00223214] (attr) w_scale=[[...]]
    """
    if len(str_length) != 2:
        raise ValueError(_MSG_WIDTHS.format(found=str_length))
    rows = [row for each in _children(container) for row in _rows(each, path, internal)]
    wide, long = str_length
    lines = [f"{cls:{wide}} {place:{long}} {values}".rstrip() for cls, place, values in rows]
    if len(lines) > max_lines:
        lines = [*lines[:max_lines], f"... {len(lines) - max_lines} more layers"]
    text = "\n".join(lines)
    print(text)
    _listen()
    for line in lines:
        LOGGER.debug("%s", line)
    return text


def _children(container: Any) -> list[keras.Layer]:
    """What to print: the layers of a model, or the layers themselves."""
    if isinstance(container, keras.Layer):
        inside = direct_sublayers(container)
        return [container] if is_quantized(container) or not inside else inside
    if isinstance(container, list | tuple) and all(isinstance(x, keras.Layer) for x in container):
        return list(container)
    raise TypeError(_MSG_NOT_KERAS.format(found=describe(container)))


def _rows(layer: keras.Layer, path: str, internal: bool) -> Iterator[Row]:
    place = f"{path}.{layer.name}"
    if is_quantized(layer):
        yield type(layer).__name__, place, " ".join(_values(layer))
    else:  # what only holds quantized layers goes by the name that its author gave it
        yield getattr(layer, "_fewbit_original", type(layer)).__name__, place, ""
    if internal:
        for child in direct_sublayers(layer):
            yield from _rows(child, place, internal)


def _values(layer: Any) -> Iterator[str]:
    state = layer._fewbit
    for field, end in (("a_scale", "_scale"), ("a_zero_point", "_zero_point")):
        found = {name: held for name, held in state.scales.items() if name.endswith(end)}
        for name, held in found.items():
            key = f"[{name.removesuffix(end)}]" if len(found) > 1 else ""
            constant = not isinstance(held, keras.Variable)
            value = np.ravel(value_of(held))
            yield f"{field}{key}={_text(value)}" + " (attr)" * constant
    for name, scale in weight_scales(state).items():
        key = f"[{name}]" if len(state.stored) > 1 else ""
        constant = not isinstance(state.stored[name].parts[0], keras.Variable)
        yield f"w_scale{key}={_text(scale)}" + " (attr)" * constant


def _text(value: Any) -> str:
    """Numbers on one line; the middle of many is left out."""
    array = np.asarray(value)
    array = array.astype(np.float32) if array.dtype.kind in "fV" else array
    text = np.array2string(array, threshold=8, edgeitems=2, max_line_width=10**9)
    return " ".join(text.split())


def _listen() -> None:
    """Show log records if the environment asks for them and the program has set up nothing."""
    level = os.environ.get("LOGLEVEL", "").upper()
    if level in logging.getLevelNamesMapping() and not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(level)
