"""A file proved to load, before it takes the place of an older one.

What the file names is built again in this process and the file is read into it, so that whatever
Keras would find missing when it loads the model is found when it is saved. Quantized values are
read and checked, and not kept. A model that did not change since is not proved again.
"""

import contextlib
import errno
import json
import random
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from fewbit.keras._serial_classes import UnknownClassError
from fewbit.keras._serial_format import checksum
from fewbit.keras._serial_store import proving
from fewbit.keras._serial_tree import described, places
from fewbit.keras._state import named_variables
from fewbit.keras._variables import sublayers

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
