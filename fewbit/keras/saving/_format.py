"""What every saved piece of a quantized Keras model carries: format, versions, a checksum.

A `record` is a dict of plain JSON values. `sealed` adds the three; `opened` checks them, so that a
newer, changed or half-written record is an error that names the layer, before anything is built.
"""

import contextlib
import contextvars
import copy
import functools
import hashlib
import importlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import keras

from fewbit._util import versions_of
from fewbit._version import __version__
from fewbit.keras.config._configs import JaxBaseConfig
from fewbit.keras.layers._program import LayerState
from fewbit.keras.layers._variables import direct_sublayers
from fewbit.numerics import qtype_name
from fewbit.rules import QuantizationRule, rule_from_dict, rule_to_dict

T = TypeVar("T")
FORMAT = 1

_MSG_NEWER = (
    "{where} was saved by a newer fewbit (format {found}); fewbit {version} reads up to format "
    "{format}. Upgrade: pip install --upgrade fewbit."
)
_MSG_DAMAGED = (
    "{where}: {what} was changed or cut after it was saved ({detail}). Save the model again, or "
    "copy the file again from where it came from."
)
_MSG_VERSIONS = (
    "This model was saved with {saved} and is loaded with {here}. It was read in full, but results "
    "may differ where a layer's own code changed; install the saved versions for equal ones."
)


def checksum(data: Any) -> str:
    """The hash of an array's or a text's bytes.

    >>> checksum(b'abc')
    'cf4ab791c62b8d2b2109c90275287816'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """The versions that write a file."""
    return dict(versions_of(("keras", "keras_hub")))


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with format, versions and checksum.

    >>> sorted(sealed({'kind': 'dynamic'}))
    ['checksum', 'format', 'kind', 'versions']
    """
    whole = {**record, "format": FORMAT, "versions": dict(versions())}
    return {**whole, "checksum": _digest(whole)}


def opened(record: Any, where: str, what: str = "its fewbit record") -> dict[str, Any]:
    """The fields of a sealed record, after every check.

    >>> opened(sealed({'kind': 'dynamic'}), 'dense')['kind']
    'dynamic'
    """
    if not isinstance(record, Mapping) or "format" not in record:
        raise damaged(where, what, "it is no record")
    number = record["format"]
    if type(number) is int and number > FORMAT:
        text = dict(found=number, version=__version__, format=FORMAT)
        raise ValueError(_MSG_NEWER.format(where=where, **text))
    fields = {key: value for key, value in record.items() if key != "checksum"}
    if number != FORMAT or record.get("checksum") != _digest(fields):
        raise damaged(where, what, "checksum")
    warn_of_versions(fields["versions"])
    return fields


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """While a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def damaged(where: str, what: str, detail: str) -> ValueError:
    """The error for a file that is not what was written."""
    return ValueError(_MSG_DAMAGED.format(where=where, what=what, detail=detail))


def warn_of_versions(saved: Mapping[str, str]) -> None:
    """One warning, whose text is the same for every layer of a file, if versions differ."""
    here = versions()
    differ = [name for name in saved if here.get(name, "none") != saved[name]]
    if differ:
        then = ", ".join(f"{name} {saved[name]}" for name in differ)
        now = ", ".join(f"{name} {here.get(name, 'none')}" for name in differ)
        warnings.warn(_MSG_VERSIONS.format(saved=then, here=now), stacklevel=2)


def _digest(fields: Mapping[str, Any]) -> str:
    # Through JSON once, so that tuples and lists, as Keras may exchange them, count as equal.
    return checksum(json.dumps(fields, sort_keys=True, default=list).encode())


# --- The class of a layer as a file names it, and the class again ---------------------------------

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
    fields = named if isinstance(named, Mapping) else {}
    name, module, registered = map(fields.get, ("name", "module", "registered"))
    if not isinstance(name, str) or not isinstance(module, str):
        raise damaged(where, "the name of its class", "it is none")
    found = keras.saving.get_registered_object(registered) if registered else None
    if found is None and module.partition(".")[0] in _IMPORTABLE:
        with contextlib.suppress(ImportError):
            found = vars(importlib.import_module(module)).get(name)
    if not (isinstance(found, type) and issubclass(found, keras.Layer)):
        raise UnknownClassError(_MSG_UNKNOWN.format(where=where, name=name))
    return found


# --- Where a layer sits inside another, by attributes and positions: the same after every load ----

# Lists in which Keras itself keeps what the model's own attributes name better.
_BOOKKEEPING = ("_layers", "_operations", "_operations_by_depth", "_functional", "_nodes_by_depth")


def places(layer: keras.Layer) -> dict[str, keras.Layer]:
    """Every layer below this one by its place, each once.

    >>> import keras
    >>> attention = keras.layers.MultiHeadAttention(2, 4)
    >>> attention.build((1, 3, 8), (1, 3, 8))
    >>> list(places(attention))[:2]
    ['_query_dense', '_key_dense']
    """
    found: dict[str, keras.Layer] = {}
    seen = {id(layer)}

    def walk(parent: keras.Layer, prefix: str) -> None:
        for name, child in _children(parent):
            if id(child) not in seen:
                seen.add(id(child))
                found[prefix + name] = child
                walk(child, f"{prefix}{name}/")

    walk(layer, "")
    return found


def described(layer: keras.Layer) -> str:
    """How messages name a layer.

    >>> described(keras.layers.Dense(2, name='up'))
    "Dense 'up'"
    """
    return f"{getattr(layer, '_fewbit_original', type(layer)).__name__} '{layer.name}'"


def _children(layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    attributes = [(name, value) for name, value in vars(layer).items() if name not in _BOOKKEEPING]
    for name, value in sorted(attributes, key=lambda pair: pair[0].startswith("_")):
        yield from _layers_in(name, value)
    for number, child in enumerate(direct_sublayers(layer)):
        yield f"layers/{number}", child


def _layers_in(name: str, value: Any) -> Iterator[tuple[str, keras.Layer]]:
    if isinstance(value, keras.Layer):
        yield name, value
    elif isinstance(value, list | tuple | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _layers_in(f"{name}/{key}", each)


# --- What a saved config says of quantized layers: one decision per layer, by its place -----------

KEY = "fewbit"
_MSG_CONFIG = (
    "{name} is loaded as it was saved, but the config that it was quantized by cannot be read "
    "here, so it has no _quant_config: {error}"
)


def record_of(layer: Any) -> dict[str, Any]:
    """The record of a quantized layer, or of one that holds some."""
    inside = places(layer).items()
    below = {place: _fields(each) for place, each in inside if hasattr(each, "_fewbit_original")}
    return sealed({**_fields(layer), "below": below, **_written(layer)})


def keep_config(model: Any, quant_config: Any) -> Any:
    """The model, which tells as `_quant_config` what it was quantized by."""
    own = isinstance(quant_config, JaxBaseConfig)  # which may be changed afterwards
    model._quant_config = copy.deepcopy(quant_config) if own else quant_config
    return model


def give_config(model: Any, record: Mapping[str, Any]) -> None:
    """Let a model that is made from a record tell what it was quantized by."""
    written = record.get("quant_config")
    if written is None:
        return
    try:
        if isinstance(written, list):
            model._quant_config = [rule_from_dict(rule) for rule in written]
        else:
            model._quant_config = JaxBaseConfig.from_dict(written)
    except (TypeError, ValueError) as error:
        warnings.warn(_MSG_CONFIG.format(name=model.name, error=error), stacklevel=2)


def _written(layer: Any) -> dict[str, Any]:
    config = getattr(layer, "_quant_config", None)
    if isinstance(config, JaxBaseConfig):
        return {"quant_config": config.to_dict()}
    if isinstance(config, list | tuple) and all(type(rule) is QuantizationRule for rule in config):
        return {"quant_config": [rule_to_dict(rule) for rule in config]}
    return {}  # of a provider the layers have all that counts


def _fields(layer: Any) -> dict[str, Any]:
    state: LayerState | None = getattr(layer, "_fewbit", None)
    fields: dict[str, Any] = {"class": reference(layer._fewbit_original), "own": None}
    if state is not None:
        arrays = {name: stored.value().array for name, stored in state.stored.items()}
        stored = {n: {"shape": [*q.shape], "qtype": qtype_name(q.qtype)} for n, q in arrays.items()}
        fields["own"] = {
            "path": state.path,
            "kind": state.kind,
            "rule": rule_to_dict(state.rule),
            "settings": dict(state.settings),
            "stored": dict(state.awaited) | stored,
            "scales": sorted({*state.awaited_scales, *state.scales}),
            "remembered": state.remembered.shapes(),
        }
    return fields


def saved_dtype(config: Mapping[str, Any]) -> Any:
    """The dtype to build with: the one that the model was saved with, unless another is asked for.

    KerasHub's loaders put the process' default in its place, or nothing.
    """
    given, saved = config.get("dtype"), config.get(f"{KEY}_dtype")
    if saved is None:
        return given
    name = given if isinstance(given, str) else getattr(given, "name", None)
    return saved if given is None or name == keras.config.dtype_policy().name else given
