"""Saving that leaves the old files whole whatever happens, and refuses what would not load again.

Keras opens the target itself and writes over it, so that a process killed in the middle leaves half
a file and the old one gone. Here Keras writes beside; the result is read back, and takes the place
of the old one in a single step.
"""

import contextlib
import contextvars
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from fewbit._atomic import beside, followed, move_into_place
from fewbit.keras._proving import prove_file, prove_preset

_MSG_SUFFIX = (
    "{path} does not end in '.keras', Keras' own format. For a folder that KerasHub reads, call "
    "fewbit.keras.save_to_preset(model, folder)."
)
_MSG_H5 = (
    "{path}: Keras' legacy HDF5 format cannot hold quantized layers, nothing was written. Save the "
    "model as model.save('{stem}.keras'), or its weights alone as "
    "model.save_weights('{stem}.weights.h5')."
)
_MSG_NO_PRESET = (
    "{name} has no save_to_preset: presets are for models of KerasHub. Call "
    "fewbit.keras.save_model(model, 'model.keras')."
)
_MSG_NO_FOLDER = "{path} is a file, and {what} is a folder. Give another path, or move it away."
_MSG_INSIDE = (
    "{path} is the folder that this process is in, which cannot be exchanged for a new one. Give "
    "the model a folder of its own: {fix!r}."
)
_MSG_FOREIGN = (
    "{path} holds more than {what} ({names}), and is exchanged for a new folder as a whole. Give "
    "the model a folder of its own: {fix!r}."
)
_REMOTE = re.compile(r"/(cns|cfs|gcs|hdfs|placer|tfhub)/|.*://")  # what Keras does not open itself
# What a preset says of its model. Other files of an old folder are kept: those of a tokenizer that
# was saved apart, or the user's own.
_OF_THE_MODEL = re.compile(r"(config|task|metadata)\.json|.*\.weights\.(h5|json)")
_writing = contextvars.ContextVar("fewbit_keras_writing", default=False)


def save_model(
    model: keras.Model,
    filepath: str | os.PathLike[str],
    overwrite: bool = True,
    zipped: bool | None = None,
    **kwargs: Any,
) -> None:
    """`model.save`, but the file is whole and loads, or the old one is still there.

    `save` of a quantized model is this.

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> save_model(model, 'model.h5')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: model.h5 does not end in '.keras', ...
    """
    path = str(filepath)
    if _REMOTE.match(path) or not isinstance(filepath, str | os.PathLike):
        with _keras_writes():
            return model.save(filepath, overwrite, zipped, **kwargs)
    if not path.endswith(".keras") and zipped is not False:
        raise ValueError(_MSG_SUFFIX.format(path=path))
    if not _may_write(path, overwrite):
        return None
    if zipped is False:
        with _new_folder(path, "an unzipped model") as written:
            model.save(written, zipped=False, **kwargs)
            prove_file(model, written)
        return None
    with beside(path) as place, _keras_writes():
        written = place / Path(path).name
        model.save(written, **kwargs)
        prove_file(model, written)
        move_into_place(written, path)
    return None


def save_weights(model: keras.Model, filepath: str | os.PathLike[str], overwrite: bool) -> None:
    """`model.save_weights` into one file, which is whole or still the old one."""
    if _may_write(str(filepath), overwrite):
        with beside(filepath) as place, _keras_writes():
            written = place / Path(filepath).name
            model.save_weights(written)
            move_into_place(written, filepath)


def save_to_preset(
    model: Any, preset_dir: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """`model.save_to_preset`, but the folder is whole and loads, or the old one is still there.

    `save_to_preset` of a quantized model is this. Files of an old folder that tell of no model are
    in the new one too.
    """
    if not hasattr(model, "save_to_preset"):
        raise TypeError(_MSG_NO_PRESET.format(name=type(model).__name__))
    with _new_folder(preset_dir, "a preset") as written:
        model.save_to_preset(str(written), *args, **kwargs)
        prove_preset(model, written)


def check_suffix(filepath: Any) -> None:
    """Raise, before anything is written, for a format that cannot hold quantized layers."""
    path = str(filepath)
    if path.endswith((".h5", ".hdf5")):
        raise ValueError(_MSG_H5.format(path=path, stem=Path(path).stem))


def is_local(filepath: Any) -> bool:
    """Whether a path is one of this machine's, and none that Keras copies elsewhere.

    >>> is_local('a/b.weights.h5'), is_local('gs://bucket/b.weights.h5')
    (True, False)
    """
    return isinstance(filepath, str | os.PathLike) and not _REMOTE.match(str(filepath))


def is_writing() -> bool:
    """Whether Keras is writing for one of the functions here, beside the target."""
    return _writing.get()


@contextlib.contextmanager
def _keras_writes() -> Iterator[None]:
    token = _writing.set(True)
    try:
        yield
    finally:
        _writing.reset(token)


@contextlib.contextmanager
def _new_folder(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """A folder to write into, which then takes the place of the one at `path`."""
    target = followed(path)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(_MSG_NO_FOLDER.format(path=target, what=what))
    if target in [Path.cwd(), *Path.cwd().parents]:
        raise ValueError(_MSG_INSIDE.format(path=target, fix=os.path.join(path, "model")))
    if target.is_dir():
        foreign = sorted(entry.name for entry in os.scandir(target) if _is_foreign(entry))
        if foreign:
            text = dict(path=target, what=what, names=", ".join(foreign[:3]))
            raise ValueError(_MSG_FOREIGN.format(**text, fix=os.path.join(path, "model")))
    target.parent.mkdir(parents=True, exist_ok=True)
    with beside(target) as place, _keras_writes():
        written = place / "new"
        yield written
        if target.is_dir():
            _keep_others(target, written)
            shutil.copymode(target, written)
        move_into_place(written, target)


def _is_foreign(entry: os.DirEntry[str]) -> bool:
    """Whether there may be processes in it, or at it, that would lose it."""
    if entry.is_dir(follow_symlinks=False):
        return entry.name != "assets" and not entry.name.startswith(".git")
    return not entry.is_file(follow_symlinks=False) and not entry.is_symlink()


def _keep_others(old: Path, new: Path) -> None:
    """Let the new folder have those files of the old one that it does not write itself."""
    for entry in os.scandir(old):
        place = new / entry.name
        if entry.is_dir(follow_symlinks=False):
            place.mkdir(exist_ok=True)
            _keep_others(Path(entry.path), place)
        elif not os.path.lexists(place) and not _OF_THE_MODEL.fullmatch(entry.name):
            try:
                os.link(entry.path, place, follow_symlinks=False)
            except OSError:  # a disk without hard links
                shutil.copy2(entry.path, place, follow_symlinks=False)


def _may_write(path: str, overwrite: bool) -> bool:
    """As Keras asks."""
    if overwrite or not os.path.exists(path):
        return True
    answer = ""
    while answer not in ("y", "n"):
        answer = input(f"[WARNING] {path} already exists - overwrite? [y/n]").strip().lower()
    return answer == "y"
