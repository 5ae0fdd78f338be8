"""The fields of a Keras quantization config: filters, defaults, and what must hold between them.

A config is wrong when it is written, not at the first forward pass. `settle` turns what the user
gave into what the config holds, or raises a sentence with the place, the nearest name and the cure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fewbit._util import PatternError, compile_pattern, describe, nearest
from fewbit.numerics import (
    ALIASES,
    FORMATS,
    Format,
    canonical_qtype,
    format_of,
    get_symmetric_bound,
    qtype_name,
)
from fewbit.rules import check_bool, check_calibration, check_choice, check_scale_dtype, check_tile

# --- Which layers a config is about: `white_list`, `exclude_list` and the places of `set_local` ---

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
    star, forms, fix = "", "a list of entries", f"Leave {field} out."
    if field == "white_list":
        star, forms = " ('*' alone means every layer)", "'*', None or a list of entries"
        fix = "Write white_list='*' for every layer, or white_list=None and set_local for some."
    if value is None or (field == "white_list" and isinstance(value, str) and value == "*"):
        return value
    if isinstance(value, str):
        raise ValueError(_MSG_STRING.format(where=where, field=field, value=value, star=star))
    if not isinstance(value, list | tuple | set | frozenset):
        shown = describe(value)
        raise TypeError(_MSG_KIND.format(where=where, field=field, forms=forms, value=shown))
    if not value:
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
        text = dict(where=where, field=field, value=entry, error=error, fix=fix)
        raise ValueError(_MSG_REGEX.format(**text)) from error


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
    matching = (e for e in entries if matches_class(e, layer_class) or matches_path(e, path))
    return next(matching, None)


def in_white_list(white_list: Any, path: str, layer_class: type | str) -> bool:
    """
    >>> in_white_list('*', 'net/a', 'Dense'), in_white_list(None, 'net/a', 'Dense')
    (True, False)
    """
    if white_list is None or isinstance(white_list, str):
        return white_list is not None
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
    known = classes if with_classes else []
    if near := nearest(word, known, " The nearest layer class is {}.", cutoff=0.6):
        return near
    if isinstance(entry, type):
        return f" The model's layers are of the classes {', '.join(map(repr, classes[:5]))}."
    # A short word is far from a long path, but near to the path's last name.
    by_name: dict[str, str] = {}
    for path, _ in layers:
        by_name.setdefault(path, path)
        by_name.setdefault(path.rpartition("/")[2], path)
    said, show = " The nearest layer paths are {}.", lambda name: repr(by_name[name])
    return nearest(word, by_name, said, 3, show=show, or_first=True)


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


# --- The fields, their defaults, and what must hold between them ----------------------------------


class Follows(enum.Enum):
    """The default of fields that follow the weights' type until they are given."""

    WEIGHTS = "follows weight_dtype"


# The reference's fields in its order of positional arguments, then ours.
KNOWN: dict[str, Any] = {
    "weight_dtype": "fp8_e4m3",
    "activation_dtype": Follows.WEIGHTS,
    "const_scale": False,
    "const_weight": False,
    "weight_scale_granularity": Follows.WEIGHTS,
    "dot_product_attention_enable": False,
    "white_list": "*",
    "exclude_list": None,
}
OWN: dict[str, Any] = {
    "group_size": None,
    "weight_calibration_method": "absmax",
    "act_calibration_method": None,
    "act_static_reduction": None,
    "emulate": False,
    "quantize_attention": None,
    "quantize_rotary": False,
    "quantize_embeddings": True,
    "scale_dtype": None,
    "strict": True,
}
DEFAULTS = {**KNOWN, **OWN}
FILTERS = ("white_list", "exclude_list")
PARAMS = [name for name in DEFAULTS if name not in FILTERS]
GRANULARITIES = ("per_tensor", "per_channel")

_FLAGS = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
_PLAIN_FLOATS = ("float16", "bfloat16", "float32", "float64", "fp16", "bf16", "fp32", "fp64")
# What other libraries, and earlier versions of the reference, call our fields.
_OTHER_NAMES = {
    "include": "white_list",
    "exclude": "exclude_list",
    "black_list": "exclude_list",
    "weight_qtype": "weight_dtype",
    "act_qtype": "activation_dtype",
    "act_dtype": "activation_dtype",
    "granularity": "weight_scale_granularity",
    "tile_size": "group_size",
    "block_size": "group_size",
}
_DIALECT = (
    *("int8", "int7", "int6", "int5", "int4", "int3", "int2", "nf4"),
    *("fp8", "fp8_e4m3", "fp8_e5m2", "mxfp4", "mxfp8", "nvfp4"),
)

_MSG_UNKNOWN = "{where} has no field {name!r}.{hint} Fields are {fields}."
_MSG_DTYPE = (
    "{where}: {field}={value!r} is not a quantized type.{hint} Types are {types}, and fewbit's own "
    "names ({own})."
)
_MSG_FLOAT = (
    "{where}: {field}={value!r} would quantize nothing. Layers that shall stay float are named in "
    "exclude_list=[...]{only}."
)
_MSG_WEIGHT_NONE = (
    "{where}: weight_dtype is None, but a config quantizes weights. Write weight_dtype='int8'; "
    "layers that shall stay float are named in exclude_list=[...]."
)
_MSG_DTYPE_LIST = (
    "{where}: {field} is {value}, and a config has one type for each field. Make one config for "
    "each type, and add them (config + config) to give different layers different types."
)
_MSG_MIXED = (
    "Mixed quantization with floating-point and integer dtypes is not supported. {where} has "
    "weight_dtype={weight!r} and activation_dtype={act!r}: leave activation_dtype out, so that it "
    "follows the weights, write activation_dtype={fix!r}, or activation_dtype=None for weight-only."
    " To change both fields of a config use replace(weight_dtype=..., activation_dtype=...)."
)
_MSG_GRANULARITY = (
    "{where}: weight_scale_granularity={value!r} is unknown.{hint} It is 'per_tensor' or "
    "'per_channel'; for a scale per group of weights write group_size=32."
)
_MSG_GROUPED = (
    "{where}: weight_scale_granularity='per_tensor' asks for one scale, but {cause} asks for one "
    "per group. Write weight_scale_granularity='per_channel', which groups divide further{or_drop}."
)
_MSG_GROUP = (
    "{where}: group_size must be a positive integer (weights that share a scale), or None for no "
    "groups, got {value!r}."
)
_MSG_STATIC_ONLY = (
    "{where}: act_static_reduction={value!r} is about stored activation scales, and {why}. Leave "
    "it out{fix}."
)
_MSG_UNUSED_METHOD = (
    "{where}: act_calibration_method={value!r} is for quantized activations, but activation_dtype "
    "is None (weight-only). Leave it out, or write activation_dtype='int8'."
)
_MSG_ATTENTION = (
    "{where}: quantize_attention=True is about products of activations, but activation_dtype is "
    "None (weight-only). Leave it out, or write activation_dtype='int8'."
)


def check_names(where: str, names: Iterable[str]) -> None:
    """Raise on a name that is no field, with the nearest that is one."""
    for name in names:
        if name not in DEFAULTS:
            raise TypeError(unknown_field(where, name))


def unknown_field(where: str, name: str) -> str:
    """
    >>> unknown_field('StaticQuantConfig', 'include')[:70]
    "StaticQuantConfig has no field 'include'. Did you mean 'white_list'? F"
    """
    known = _OTHER_NAMES.get(name)
    hint = f" Did you mean {known!r}?" if known else nearest(name, DEFAULTS)
    return _MSG_UNKNOWN.format(where=where, name=name, hint=hint, fields=", ".join(DEFAULTS))


def settle(where: str, static: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every field in the form that a config holds, checked alone and against the others.

    >>> settle('StaticQuantConfig', True, {**DEFAULTS, 'weight_dtype': 'INT8'})['activation_dtype']
    'int8'
    """
    check_names(where, given)
    held = dict(given)
    for flag in _FLAGS:
        check_bool(where, flag, held[flag])
    check_bool(where, "quantize_attention", held["quantize_attention"], True)
    for name in FILTERS:
        held[name] = check_entries(where, name, held[name])
    held["weight_dtype"] = _check_dtype(where, "weight_dtype", held["weight_dtype"])
    weight = format_of(held["weight_dtype"])
    if held["activation_dtype"] is Follows.WEIGHTS:
        held["activation_dtype"] = following_dtype(weight, static)
    held["activation_dtype"] = _check_dtype(where, "activation_dtype", held["activation_dtype"])
    _check_mixed(where, held["weight_dtype"], held["activation_dtype"])
    _settle_groups(where, held, weight)
    _settle_calibration(where, static, held)
    held["scale_dtype"] = check_scale_dtype(where, "scale_dtype", held["scale_dtype"], weight)
    return held


def following_dtype(weight: Format, static: bool) -> str | None:
    """The activations' type where none was given.

    Eight bits go with eight bits of the same kind. Fewer bits save memory by themselves, so only
    a static config, which cannot mean anything else, gives activations a type there.

    >>> following_dtype(format_of('int4'), static=False), following_dtype(format_of('int4'), True)
    (None, 'int8')
    """
    if not static and (weight.bits < 8 or weight.tile is not None):
        return None
    return "fp8_e4m3" if weight.kind == "float" and weight.tile is None else "int8"


def following_granularity(weight: Format, group_size: int | None) -> str:
    """The weights' granularity where none was given.

    One scale for a tensor is the reference's default, and leaves little of four bits.

    >>> [following_granularity(format_of(name), None) for name in ('int8', 'int4', 'mxfp8')]
    ['per_tensor', 'per_channel', 'per_channel']
    """
    grouped = group_size is not None or weight.tile is not None
    return "per_channel" if grouped or weight.bits < 8 else "per_tensor"


def effective_weight_method(method: str, weight_dtype: str, emulate: bool) -> str:
    """The weights' calibration method in force.

    Emulation keeps the numbers of the library it stands in for: the largest weight is its largest
    code there, 127, and not half a step above it.

    >>> effective_weight_method('absmax', 'int8', True)
    'absmax,1.0039370078740157'
    """
    row = format_of(weight_dtype)
    if not emulate or method != "absmax" or row.kind != "int" or row.asymmetric is None:
        return method
    return f"absmax,{get_symmetric_bound(row) / row.asymmetric[1]!r}"


def default_act_method(act_dtype: str | None, emulate: bool) -> str | None:
    """The activations' calibration method where none was given; None is the mode's own, 'absmax'.

    Emulation keeps the numbers of the library it stands in for: integer activations have a zero
    point there.

    >>> default_act_method('int8', True), default_act_method('fp8', True)
    ('minmax', None)
    """
    if not emulate or act_dtype is None:
        return None
    row = format_of(act_dtype)
    return "minmax" if row.kind == "int" and row.asymmetric is not None else None


def symmetric_act_method(act_dtype: Any) -> str | None:
    """The method of emulated activations that have no zero point where others have one.

    >>> symmetric_act_method('int8'), symmetric_act_method('fp8')
    ('absmax,1.0039370078740157', None)
    """
    if act_dtype is None or default_act_method(act_dtype, True) is None:
        return None
    return effective_weight_method("absmax", act_dtype, True)


def _check_dtype(where: str, field: str, value: Any) -> str | None:
    """The name of a quantized type as the user spells it, in lower case."""
    if value is None:
        if field == "weight_dtype":
            raise ValueError(_MSG_WEIGHT_NONE.format(where=where))
        return None
    if isinstance(value, list | tuple | set | frozenset):
        raise TypeError(_MSG_DTYPE_LIST.format(where=where, field=field, value=describe(value)))
    name = value.strip().lower() if isinstance(value, str) else value
    try:
        canonical_qtype(name)
    except (ValueError, TypeError) as error:
        raise ValueError(_dtype_message(where, field, value, name)) from error
    return name if isinstance(name, str) else qtype_name(name)


def _dtype_message(where: str, field: str, value: Any, name: Any) -> str:
    name = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    if name in ("none", "null", "", *_PLAIN_FLOATS):
        only = "" if field == "weight_dtype" else "; for weight-only write activation_dtype=None"
        return _MSG_FLOAT.format(where=where, field=field, value=value, only=only)
    own = [name for name in (*FORMATS, *ALIASES) if name not in _DIALECT]
    text = dict(where=where, field=field, value=value, hint=nearest(name, [*_DIALECT, *own]))
    return _MSG_DTYPE.format(**text, types=", ".join(_DIALECT), own=", ".join(FORMATS))


def _check_mixed(where: str, weight: str, act: str | None) -> None:
    """Integers go with integers; formats of fewer bits are decoded, and go with either."""
    if act is None:
        return
    one, other = format_of(weight), format_of(act)
    integers = ("int", "sign")
    float_acts = one.kind in integers and other.kind == "float"
    float_weights = one.kind == "float" and one.tile is None and other.kind in integers
    if float_acts or float_weights:
        fix = "int8" if float_acts else "fp8_e4m3"
        raise ValueError(_MSG_MIXED.format(where=where, weight=weight, act=act, fix=fix))


def _settle_groups(where: str, held: dict[str, Any], weight: Format) -> None:
    size = held["group_size"]
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(_MSG_GROUP.format(where=where, value=size))
        held["group_size"] = size = int(size)
        types = [name for name in (held["weight_dtype"], held["activation_dtype"]) if name]
        check_tile(where, "group_size", size, types)
    grouped = size is not None or weight.tile is not None
    value = held["weight_scale_granularity"]
    if value is Follows.WEIGHTS:
        value = following_granularity(weight, size)
    if value not in GRANULARITIES:
        hint = nearest(value, GRANULARITIES)
        raise ValueError(_MSG_GRANULARITY.format(where=where, value=value, hint=hint))
    if value == "per_tensor" and grouped:
        cause = f"group_size={size}" if size else f"the format {weight.name}"
        or_drop = ", or leave group_size out" if size and weight.tile is None else ""
        raise ValueError(_MSG_GROUPED.format(where=where, cause=cause, or_drop=or_drop))
    held["weight_scale_granularity"] = value


def _settle_calibration(where: str, static: bool, held: dict[str, Any]) -> None:
    weight, act = held["weight_dtype"], held["activation_dtype"]
    method, reduction = held["act_calibration_method"], held["act_static_reduction"]
    if held["weight_calibration_method"] is None:
        raise TypeError(f"{where}: weight_calibration_method is None. Write 'absmax'.")
    check_calibration(where, "weight_calibration_method", held["weight_calibration_method"], weight)
    if act is None and held["quantize_attention"]:
        raise ValueError(_MSG_ATTENTION.format(where=where))
    if act is None and method is not None:
        raise ValueError(_MSG_UNUSED_METHOD.format(where=where, value=method))
    effective = method if method is not None else default_act_method(act, held["emulate"])
    check_calibration(where, "act_calibration_method", effective, act)
    check_choice(where, "act_static_reduction", reduction, ("range", "mean"))
    if reduction is not None and (act is None or not static):
        why = "activation_dtype is None" if static else f"a {where} makes its scales at each call"
        fix = "" if static else ", or use a StaticQuantConfig"
        raise ValueError(_MSG_STATIC_ONLY.format(where=where, value=reduction, why=why, fix=fix))
