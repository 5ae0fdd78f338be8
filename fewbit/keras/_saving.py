"""Saving that leaves the old files whole whatever happens.

Keras opens the target itself and writes over it, so that a process killed in `model.save` leaves
half a file and the old one gone. Here Keras writes beside, and the result is moved into place.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras

from fewbit._atomic import move_into_place

_MSG_SUFFIX = (
    "{path} does not end in '.keras', Keras' own format. For a folder that KerasHub reads, call "
    "fewbit.keras.save_to_preset(model, folder)."
)
_MSG_NO_PRESET = (
    "{name} has no save_to_preset: presets are for models of KerasHub. Call "
    "fewbit.keras.save_model(model, 'model.keras')."
)


def save_model(model: keras.Model, filepath: str | os.PathLike[str]) -> None:
    """`keras.saving.save_model`, but the file is whole or the old one is still there.

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> save_model(model, 'model.h5')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: model.h5 does not end in '.keras', ...
    """
    target = Path(filepath)
    if target.suffix != ".keras":
        raise ValueError(_MSG_SUFFIX.format(path=target))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        written = Path(beside) / target.name
        keras.saving.save_model(model, written)
        move_into_place(written, target)


def save_to_preset(model: Any, preset_dir: str | os.PathLike[str], **kwargs: Any) -> None:
    """`model.save_to_preset`, but the folder gets its new content at once.

    An old folder of that name is moved aside for the moment in which the new one takes its place.
    """
    if not hasattr(model, "save_to_preset"):
        raise TypeError(_MSG_NO_PRESET.format(name=type(model).__name__))
    target = Path(preset_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        written = beside / "new"
        model.save_to_preset(str(written), **kwargs)
        if target.exists():
            os.rename(target, beside / "old")
        move_into_place(written, target)
    finally:
        if target.exists():
            shutil.rmtree(beside, ignore_errors=True)
