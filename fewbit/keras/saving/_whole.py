"""Saving that leaves the old files whole whatever happens, and refuses what would not load again.

Keras opens the target itself and writes over it, so that a process killed in the middle leaves half
a file and the old one gone. Here Keras writes beside; the result is read back, and takes the place
of the old one in a single step.
"""

import contextlib
import contextvars
import errno
import functools
import json
import os
import random
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from fewbit._util import beside, followed, move_into_place
from fewbit.keras.layers._program import named_variables
from fewbit.keras.layers._variables import sublayers
from fewbit.keras.saving._format import UnknownClassError, checksum, described, places
from fewbit.keras.saving._store import proving

# --- Keras' legacy HDF5 files of whole models, which cannot hold quantized layers: refused --------

_MSG_LEGACY = (
    "{name} is quantized, and Keras' legacy HDF5 format cannot hold quantized layers: no model is "
    "in the file that Keras has just opened. Save it as model.save('model.keras'), or its weights "
    "alone as model.save_weights('model.weights.h5')."
)


def refuse_legacy(name: str) -> None:
    """Raise while Keras asks for configs in the form of its legacy files."""
    if "module" not in _probe().get_config()["layers"][0]:
        raise ValueError(_MSG_LEGACY.format(name=name))


@functools.cache
def _probe() -> keras.Sequential:
    """A model whose config has the form that Keras is asking for: legacy ones name no modules."""
    return keras.Sequential([keras.layers.Identity(name="fewbit_form")], name="fewbit_probe")


# --- A file proved to load, before it takes the place of an older one -----------------------------

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_MSG_UNLOADABLE = (
    "{model} was not saved, because what was written would not load again: {why} The file that was "
    "there, if any, is as it was. Keras makes a layer again from its get_config(), and what is "
    "inside it in its build() or when the model first calls it; a layer kept elsewhere is not "
    "found. model.save_weights('....weights.h5') saves what can be loaded into a model that is "
    "made and quantized in the same way."
)
_MSG_OTHER = "{layer} would be {there} in the loaded model."
_MSG_UNREAD = "nothing would be read into {layer}."
_MSG_UNPROVED = "{model} was saved, but not proved to load: {why}"
_FIX_NAME = (
    "Loading it will need this name: import its module, registered with "
    "@keras.saving.register_keras_serializable(), or give custom_objects."
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def prove_file(model: keras.Model, written: Path) -> None:
    """Raise unless a `.keras` file, or the folder of an unzipped one, loads as the model it is."""
    with _proof_of(model) as proof:
        if proof is None:
            return
        with tempfile.TemporaryDirectory(dir=written.parent) as place:
            folder = written
            if written.is_file():
                folder = Path(place)
                with zipfile.ZipFile(written) as archive:  # Keras reads an archive in small jumps
                    archive.extract(_CONFIG, folder)
                    archive.extract(_WEIGHTS, folder)
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            config["compile_config"] = None
            twin = keras.saving.deserialize_keras_object(config, safe_mode=False)
            try:
                twin.load_weights(folder / _WEIGHTS)
            except Exception:
                proof.compare(twin)  # which names the layer as it is called here
                raise
        proof.check(twin)


def prove_preset(model: Any, written: Path) -> None:
    """Raise unless a preset loads as the model it is."""
    with _proof_of(model) as proof:
        if proof is not None:
            cls = getattr(model, "_fewbit_original", type(model))
            proof.check(cls.from_preset(str(written)))


class _Proof:
    """The layers of one model, and the quantized ones that were read into its twin."""

    def __init__(self, model: Any):
        self._places = {"": model, **places(model)}
        self.read: list[Any] = []

    def check(self, twin: Any) -> None:
        """Raise unless every quantized layer is there, and was read."""
        for place, layer, other in self.compare(twin):
            if hasattr(layer, "_fewbit") and not any(other is each for each in self.read):
                raise ValueError(_MSG_UNREAD.format(layer=self._described(place)))

    def compare(self, twin: Any) -> list[tuple[str, Any, Any]]:
        """What tells of quantization, here and in the twin."""
        there, pairs = {"": twin, **places(twin)}, []
        for place, layer in self._places.items():
            if hasattr(layer, "_fewbit_original"):
                other = there.get(place)
                pairs.append((place, layer, other))
                if type(other) is not type(layer):
                    found = "missing" if other is None else f"a {type(other).__name__}"
                    text = _MSG_OTHER.format(layer=self._described(place), there=found)
                    raise ValueError(text)
        return pairs

    def _described(self, place: str) -> str:
        """A layer with those around it, as the user named them."""
        parts = place.split("/")
        around = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
        layers = [self._places[each] for each in [*around, ""] if each in self._places]
        return f"'{place}', " + " in ".join(map(described, layers))


@contextlib.contextmanager
def _proof_of(model: Any) -> Iterator[_Proof | None]:
    """The proof to be made here, if there is one to make; its errors are told as the model's."""
    digest = _digest(model)
    if digest is None or vars(model).get("_fewbit_proved") == digest:
        yield None
        return
    name = described(model)
    drawn = random.getstate()  # Keras draws the seeds of initial values that nobody will see
    proof = _Proof(model)
    try:
        with (
            warnings.catch_warnings(),
            keras.saving.custom_object_scope(_objects_in(model)),
            proving(proof.read),
        ):
            warnings.simplefilter("ignore")  # what loading has to say is said when it is loaded
            yield proof
        model._fewbit_proved = digest
    except Exception as error:
        why = _why(error)
        if isinstance(error, UnknownClassError) or "Could not locate" in str(error):
            warnings.warn(_MSG_UNPROVED.format(model=name, why=f"{why} {_FIX_NAME}"), stacklevel=4)
        elif _is_want_of_room(error):
            warnings.warn(_MSG_UNPROVED.format(model=name, why=why), stacklevel=4)
        else:
            raise ValueError(_MSG_UNLOADABLE.format(model=name, why=why)) from error
    finally:
        random.setstate(drawn)


def _digest(model: Any) -> str | None:
    """What tells one structure from another; None for a model without quantized layers."""
    layers = {"": model, **places(model)}
    if not any(hasattr(layer, "_fewbit") for layer in layers.values()):
        return None
    shown = [
        (place, type(layer).__name__, [(n, v.shape) for n, v in named_variables(layer).items()])
        for place, layer in layers.items()
    ]
    config = json.dumps(model.get_config(), sort_keys=True, default=str)
    return checksum(json.dumps([shown, config], default=str).encode())


def _objects_in(model: Any) -> dict[str, Any]:
    """The user's classes and functions in a model, which need not be registered for this."""
    found: dict[str, Any] = {}
    for layer in [model, *sublayers(model)]:
        original = getattr(layer, "_fewbit_original", type(layer))
        for each in [original, *vars(layer).values()]:
            each = each if isinstance(each, type) or hasattr(each, "__name__") else type(each)
            name, module = getattr(each, "__name__", None), getattr(each, "__module__", None)
            if name and module and module.partition(".")[0] not in ("builtins", "keras", "fewbit"):
                found.setdefault(name, each)
    return found


def _is_want_of_room(error: Exception) -> bool:
    """Whether there was no room to try it, which says nothing of the file."""
    full = isinstance(error, OSError) and error.errno in _NO_ROOM
    return full or isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _why(error: Exception) -> str:
    """The sentence in one of Keras' long messages."""
    text = re.sub(r"\x1b\[\d*m", "", str(error)).rpartition("Exception encountered: ")[2]
    text = re.sub(
        r"^A total of \d+ objects? could not be loaded. Example error message for ", "", text
    )
    text = re.split("List of objects that could not|Full object config:|\n\nconfig=", text)[0]
    return " ".join(text.split())[:1000].rstrip(".") + "."


# --- Saving: the old files stay whole, and what would not load again is refused -------------------

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
