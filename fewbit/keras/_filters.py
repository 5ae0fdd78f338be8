"""Which layers a config is about: `white_list`, `exclude_list` and the places of `set_local`.

An entry is a layer class, the exact name of one, or a regular expression that is searched in the
layer's path. Classes and their names also stand for subclasses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fewbit._errors import describe
from fewbit._patterns import PatternError, compile_pattern

Entry = str | type
LayerInfo = tuple[str, "type | str"]  # the layer's path, and its class or the name of that

# Layers whose weights or products can be quantized, by name: no framework is imported for a config.
QUANTIZABLE = {
    *("Dense", "EinsumDense"),
    *("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv1D", "DepthwiseConv2D"),
    *("SeparableConv1D", "SeparableConv2D"),
    *("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"),
    *("Embedding", "ReversibleEmbedding"),
    *("MultiHeadAttention", "GroupedQueryAttention"),
    *("CachedGemma3Attention", "Gemma3VisionAttention", "CachedGemmaAttention"),
    *("LlamaAttention", "CachedMistralAttention", "QwenAttention", "RotaryEmbedding"),
}

_MSG_STRING = (
    "{where}: {field}={value!r} is one string where a list of entries is expected{star}. Write "
    "{field}=[{value!r}]."
)
_MSG_EMPTY = "{where}: {field} is an empty list, which names no layer. {fix}"
_MSG_KIND = (
    "{where}: {field} must be {forms}, got {value}. An entry is a layer class, the name of one, or "
    "a regular expression over layer paths."
)
_MSG_ENTRY = (
    "{where}: {field} has {value}, which is no entry. An entry is a layer class such as "
    "keras.layers.Dense, the name of one such as 'Dense', or a regular expression over layer paths."
)
_MSG_REGEX = (
    "Invalid regex pattern {value!r} in white_list/exclude_list filter. {where}: {field} has an "
    "entry that is not a regular expression: {error}. It is searched in the layer's path, where "
    "'.*' stands for anything. Write {fix!r}?"
)


class ClassName(str):
    """The name of a layer's class that remembers the names of its base classes.

    >>> ClassName.of(bool), ClassName.of(bool).names
    ('bool', ('bool', 'int', 'object'))
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, layer_class: type) -> ClassName:
        """The name of a class."""
        name = cls(layer_class.__name__)
        name.names = class_names(layer_class)
        return name


def class_names(layer_class: type | str) -> tuple[str, ...]:
    """The names by which a layer's class can be called: its own, then those of its bases.

    >>> class_names(bool), class_names('Dense')
    (('bool', 'int', 'object'), ('Dense',))
    """
    if isinstance(layer_class, type):
        return tuple(base.__name__ for base in layer_class.__mro__)
    return getattr(layer_class, "names", (str(layer_class),))


def check_entries(where: str, field: str, value: Any) -> Any:
    """A copy of a filter in which every entry can be used; '*' and None as they are."""
    if value is None or (field == "white_list" and isinstance(value, str) and value == "*"):
        return value
    if isinstance(value, str):
        star = " ('*' alone means every layer)" if field == "white_list" else ""
        raise ValueError(_MSG_STRING.format(where=where, field=field, value=value, star=star))
    if not isinstance(value, list | tuple | set | frozenset):
        forms = "'*', None or a list of entries" if field == "white_list" else "a list of entries"
        raise TypeError(
            _MSG_KIND.format(where=where, field=field, forms=forms, value=describe(value))
        )
    if not value:
        fix = (
            "Write white_list='*' for every layer, or white_list=None and set_local for some."
            if field == "white_list"
            else f"Leave {field} out."
        )
        raise ValueError(_MSG_EMPTY.format(where=where, field=field, fix=fix))
    # A set has no order of its own; a config must print and save the same way every time.
    unordered = isinstance(value, set | frozenset)
    entries = sorted(value, key=entry_name) if unordered else list(value)
    for entry in entries:
        check_entry(where, field, entry)
    return entries


def check_entry(where: str, field: str, entry: Any) -> None:
    """Raise when an entry is neither a class nor a text that is a regular expression."""
    if isinstance(entry, type):
        return
    if not isinstance(entry, str) or not entry:
        raise TypeError(_MSG_ENTRY.format(where=where, field=field, value=describe(entry)))
    try:
        compile_pattern(entry)
    except PatternError as error:
        raise ValueError(f"{where}: {field}: {error}.") from None
    except re.error as error:
        fix = re.sub(r"(?<![\w\])}.])\*", ".*", entry)
        try:
            re.compile(fix)
        except re.error:
            fix = re.escape(entry)
        raise ValueError(
            _MSG_REGEX.format(where=where, field=field, value=entry, error=error, fix=fix)
        ) from error


def entry_name(entry: Any) -> str:
    """An entry as files hold it.

    >>> entry_name(bool), entry_name('layer/.*')
    ('bool', 'layer/.*')
    """
    return entry.__name__ if isinstance(entry, type) else str(entry)


def is_class_entry(entry: Entry) -> bool:
    """Whether an entry is surely about a kind of layer, which a model need not have.

    >>> is_class_entry('Conv2D'), is_class_entry('dense_1')
    (True, False)
    """
    return isinstance(entry, type) or entry in QUANTIZABLE


def matches_class(entry: Entry, layer_class: type | str) -> bool:
    """
    >>> matches_class('int', bool), matches_class(int, 'bool')
    (True, False)
    """
    return entry_name(entry) in class_names(layer_class)


def matches_path(entry: Entry, path: str) -> bool:
    """
    >>> matches_path('dense_[12]', 'net/dense_1'), matches_path(bool, 'net/bool')
    (True, False)
    """
    return isinstance(entry, str) and compile_pattern(entry).matches(path, "anywhere")


def first_entry(entries: Iterable[Entry], path: str, layer_class: type | str) -> Entry | None:
    """The first entry that a layer matches, or None.

    >>> first_entry(['Conv2D', 'dense'], 'net/dense_1', 'Dense')
    'dense'
    """
    for entry in entries:
        if matches_class(entry, layer_class) or matches_path(entry, path):
            return entry
    return None


def in_white_list(white_list: Any, path: str, layer_class: type | str) -> bool:
    """
    >>> in_white_list('*', 'net/a', 'Dense'), in_white_list(None, 'net/a', 'Dense')
    (True, False)
    """
    if white_list is None:
        return False
    if isinstance(white_list, str):
        return True
    return first_entry(white_list, path, layer_class) is not None


def nearest_places(entry: Entry, layers: Sequence[LayerInfo], with_classes: bool = True) -> str:
    """The tail of an error: which paths and classes of the model an entry could have meant.

    >>> nearest_places('dens_1', [('net/dense_1', 'Dense'), ('net/conv', 'Conv2D')])
    " The nearest layer paths are 'net/dense_1'."
    """
    if not layers:
        return " The model has no layer that can be quantized."
    word = entry_name(entry).replace(".*", "").replace("\\", "").strip("^$/")
    classes = list(dict.fromkeys(class_names(cls)[0] for _, cls in layers))
    near = difflib.get_close_matches(word, classes if with_classes else [], 1, 0.6)
    if near:
        return f" The nearest layer class is {near[0]!r}."
    if isinstance(entry, type):
        return f" The model's layers are of the classes {', '.join(map(repr, classes[:5]))}."
    # A short word is far from a long path, but near to the path's last name.
    by_name: dict[str, str] = {}
    for path, _ in layers:
        by_name.setdefault(path, path)
        by_name.setdefault(path.rpartition("/")[2], path)
    found = difflib.get_close_matches(word, by_name, 3, 0.5) or list(by_name)[:3]
    paths = list(dict.fromkeys(by_name[name] for name in found))
    return f" The nearest layer paths are {', '.join(map(repr, paths))}."


def model_layers(model: Any) -> Iterator[tuple[str, ClassName]]:
    """(path, class name) of each layer of a Keras model that can be quantized, once."""
    walk = getattr(model, "_flatten_layers", None)
    if walk is None or isinstance(model, type):
        raise TypeError(
            f"A Keras model is needed, got {describe(model)}. Make one with keras.Sequential, "
            "keras.Model or keras_hub, and build it first."
        )
    seen = set()
    for layer in walk(recursive=True):
        path, name = layer.path or layer.name, ClassName.of(type(layer))
        # A quantized layer is of a subclass, and is not quantized again.
        if getattr(layer, "_is_quantized", False) or (path, name) in seen:
            continue
        if not QUANTIZABLE.isdisjoint(name.names):
            seen.add((path, name))
            yield path, name
