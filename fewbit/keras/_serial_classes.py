"""The class of a layer as a file names it, and the class again, found as Keras itself finds it."""

import importlib
from collections.abc import Mapping
from typing import Any

import keras

from fewbit.keras._serial_format import damaged

_PUBLIC = ("keras.layers", "keras.models")
_IMPORTABLE = ("keras", "keras_hub")  # the packages that Keras imports for a file, and no other

_MSG_UNKNOWN = (
    "{where} is a quantized {name}, a class that Keras does not know here. Import the module that "
    "defines it, registered with @keras.saving.register_keras_serializable(), or give it to the "
    "loading call: custom_objects={{'{name}': {name}}}."
)


class UnknownClassError(ValueError):
    """A file names a class that nobody defined or gave here."""


def reference(cls: type[keras.Layer]) -> dict[str, Any]:
    """How a file names a class.

    >>> reference(keras.layers.Dense)
    {'name': 'Dense', 'module': 'keras.layers', 'registered': None}
    """
    name = cls.__name__
    for module in _PUBLIC:
        if getattr(importlib.import_module(module), name, None) is cls:
            return {"name": name, "module": module, "registered": None}
    registered = keras.saving.get_registered_name(cls)
    return {"name": name, "module": cls.__module__, "registered": registered}


def resolve(named: Any, where: str) -> type[keras.Layer]:
    """The class that a file names: registered, given by the user, or of Keras and KerasHub.

    >>> resolve(reference(keras.layers.Dense), 'here')
    <class 'keras.src.layers.core.dense.Dense'>
    """
    if not isinstance(named, Mapping) or not all(
        isinstance(named.get(key), str) for key in ("name", "module")
    ):
        raise damaged(where, "the name of its class", "it is none")
    name, module, registered = named["name"], named["module"], named.get("registered")
    found = keras.saving.get_registered_object(registered) if registered else None
    if found is None and module.partition(".")[0] in _IMPORTABLE:
        try:
            found = vars(importlib.import_module(module)).get(name)
        except ImportError:
            found = None
    if not (isinstance(found, type) and issubclass(found, keras.Layer)):
        raise UnknownClassError(_MSG_UNKNOWN.format(where=where, name=name))
    return found
