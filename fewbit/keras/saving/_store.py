"""A quantized layer's variables in Keras' weights file, and back: the same codes on any machine.

Beside its float variables ('0', '1', ... as Keras numbers them) a layer's group holds the parts of
each quantized one ('kernel.qvalue'), its static scales, and 'fewbit': a JSON text that says what
they are, with a checksum of each.
"""

import contextvars
import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np

from fewbit.keras.layers._program import LayerState
from fewbit.keras.layers._variables import (
    PARTS,
    check_constants,
    fill,
    own_variables,
    set_variable,
    value_of,
)
from fewbit.keras.saving._format import checksum, damaged, holding, opened, sealed
from fewbit.kernels import for_kernels
from fewbit.numerics import format_of, pack_pieces, packed_length, qtype_name
from fewbit.numerics import unpack as unpack_pieces
from fewbit.planning import how_from_dict, how_to_dict
from fewbit.qarray import QArray, WithAux, unpack, validate_qarray
from fewbit.rules import rule_from_dict, rule_to_dict

# --- Arrays as a Keras weights file holds them: types that HDF5 knows, codes at their true width --

_PLAIN = (
    *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
_EXTENSIONS = (
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn"),
    *("float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# Every dtype that a file may name, so that none comes into being from a file's own words.
_DTYPES = {name: np.dtype(name) for name in _PLAIN}
_DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENSIONS}


def to_file(array: Any, qtype: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
    """The array for the file and what to remember of it; `qtype` if it holds codes of a format.

    >>> stored, about = to_file(np.array([[1, -2, 3, 0]], np.int8), 'int3')
    >>> stored.shape, about['bits']
    ((1, 2), 3)
    """
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        array = jax.device_get(array)  # gathered from all devices
    array = np.asarray(array)
    name, bits, row = array.dtype.name, None, None if qtype is None else format_of(qtype)
    if row is not None and row.bits < 8:
        bits = row.bits
        codes = array.view(np.uint8)
        if row.kind == "sign":
            codes = codes >> 3 & 1  # of four bits, the highest is set in -1 alone
        last = array.shape[-1] if array.ndim else 1
        stored = np.empty((*array.shape[:-1], packed_length(last, bits)), np.uint8)
        begin = 0
        for piece in pack_pieces(codes, bits):
            stored.reshape(-1)[begin : begin + piece.size] = piece
            begin += piece.size
    else:
        stored = array if name in _PLAIN else _bytes_of(array)
    about = {
        "dtype": name,
        "shape": list(array.shape),
        "bits": bits,
        "checksum": checksum(_bytes_of(stored).data),
    }
    return stored, about


def from_file(stored: Any, about: Any, where: str, what: str, qtype: Any = None) -> np.ndarray:
    """The array that `to_file` was given."""
    stored, dtype, shape = checked(stored, about, where, what)
    bits = about["bits"]
    if bits is None:
        return stored if dtype.name in _PLAIN else np.array(stored).view(dtype).reshape(shape)
    last = shape[-1] if shape else 1
    if qtype is not None and format_of(qtype).kind == "sign":
        signs = unpack_pieces(stored, 1, last, np.uint8)
        return (1 - 2 * signs.astype(np.int8)).view(dtype).reshape(shape)
    return unpack_pieces(stored, bits, last, dtype).reshape(shape)


def checked(
    stored: Any, about: Any, where: str, what: str
) -> tuple[np.ndarray, np.dtype, tuple[int, ...]]:
    """What a file holds, with the dtype and shape it stands for, if it is what was written."""
    try:
        dtype, shape = _DTYPES[about["dtype"]], tuple(about["shape"])
        wanted, given = stored_shape(about), about["checksum"]
    except (KeyError, TypeError) as error:
        raise damaged(where, what, f"its description lacks {error}") from None
    stored = np.asarray(stored)
    if stored.shape != wanted:
        raise damaged(where, what, f"expected the shape {wanted}, found {stored.shape}")
    if checksum(_bytes_of(stored).data) != given:
        raise damaged(where, what, "checksum")
    return stored, dtype, shape


def stored_shape(about: Any) -> tuple[int, ...]:
    """The shape in the file of an array that is described so.

    >>> stored_shape({'dtype': 'int4', 'shape': [3, 5], 'bits': 4})
    (3, 3)
    """
    dtype, shape, bits = _DTYPES[about["dtype"]], tuple(about["shape"]), about["bits"]
    if bits is not None:
        return (*shape[:-1], packed_length(shape[-1] if shape else 1, bits))
    return shape if dtype.name in _PLAIN else (math.prod(shape) * dtype.itemsize,)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# --- What a layer holds, in its group of the weights file, and back -------------------------------

_KEY = "fewbit"
_MOST_BYTES = 16 * 2**20  # of a layer's description
# The layers that were read while a file is proved to load: their values are checked, and not kept.
_read = contextvars.ContextVar[list[Any] | None]("fewbit_read", default=None)

_MSG_NOTHING = (
    "{where}: the file holds nothing for this quantized layer. It was saved from another model, or "
    "from the float one: load it into that, and quantize that again."
)
_MSG_FLOAT = (
    "{where} is quantized ({rule}), but the file holds float variables for it ({names}). Load it "
    "into the float model, and quantize that again."
)
_MSG_OTHER = (
    "{where}/{name} is stored as {here}, but the file holds {found}. Load the model that was saved "
    "(keras.saving.load_model or from_preset), or weights saved from a model quantized as this one."
)
_MSG_VARIABLES = "{where} has the variables {here}, but the file holds {found}."


def proving(read: list[Any]) -> AbstractContextManager[None]:
    """While this is open, layers keep no quantized values of the file, and are noted in `read`."""
    return holding(_read, read)


def save_variables(layer: keras.Layer, state: LayerState, store: Any) -> None:
    """Write all that the layer itself holds."""
    record: dict[str, Any] = {"variables": {}, "stored": {}, "scales": {}}
    for number, variable in enumerate(float_variables(layer, state)):
        store[str(number)], about = to_file(variable.value)
        record["variables"][str(number)] = {"name": variable.name, **about}
    for name, stored in state.stored.items():
        about = _save_stored(stored.value(), name, state, store)
        record["stored"][name] = about | ({"constant": True} if stored.constant else {})
    for name, scale in state.scales.items():
        store[f"scale.{name}"], about = to_file(value_of(scale))
        record["scales"][name] = {"constant": not isinstance(scale, keras.Variable), **about}
    text = json.dumps(sealed(record), sort_keys=True).encode()
    store[_KEY] = np.frombuffer(text, np.uint8)


def _save_stored(value: WithAux, name: str, state: LayerState, store: Any) -> dict[str, Any]:
    q, how = unpack(value.array), value.how
    parts = {}
    for part in PARTS:
        array = getattr(q, part)
        if array is not None:
            codes = q.qtype if part == "qvalue" else None
            store[f"{name}.{part}"], parts[part] = to_file(array, codes)
    return {
        "qtype": qtype_name(q.qtype),
        "dtype": str(q.dtype),
        "tiles": [list(pair) for pair in q.tiles],
        "how": how_to_dict(how),
        # None: the layer's own rule, which its config holds.
        "rule": None if how.rule in (None, state.rule) else rule_to_dict(how.rule),
        "parts": parts,
    }


def load_variables(layer: keras.Layer, state: LayerState, store: Any) -> None:
    """Take over what `save_variables` wrote, each array checked before it is used."""
    where = layer.path or layer.name
    record = _record(store, where, state)
    variables = float_variables(layer, state)
    names = [about.get("name") for about in record["variables"].values()]
    if len(names) != len(variables):
        here = [variable.name for variable in variables]
        raise ValueError(_MSG_VARIABLES.format(where=where, here=here, found=names))
    for (key, about), variable in zip(record["variables"].items(), variables, strict=True):
        variable.assign(_read_array(store, key, about, where, where, f"variable {key!r}"))
    awaited = state.hollow.keys() | state.stored.keys()
    if record["stored"].keys() != awaited:
        here, found = sorted(awaited), sorted(record["stored"])
        raise ValueError(_MSG_VARIABLES.format(where=where, here=here, found=found))
    read = _read.get()
    for name, about in record["stored"].items():
        _check_awaited(state.awaited.get(name), about, where, name)
        if read is not None:
            for part, fields in about["parts"].items():
                array = _get(store, f"{name}.{part}", where, fields)
                checked(array, fields, f"{where}/{name}", part)
            continue
        value = _load_stored(store, name, about, where, state)
        if name in state.stored:
            _check_same(state.stored[name].value(), value, where, name)
        old, constant = state.stored.get(name), about.get("constant") is True
        state.stored[name] = fill(layer, state.hollow[name], value, old, constant=constant)
    if read is not None:
        read.append(layer)
        return
    for name, about in record["scales"].items():
        key = f"scale.{name}"
        scale = jnp.asarray(_read_array(store, key, about, where, where, f"scale {name!r}"))
        old = state.scales.get(name)
        if old is not None and not isinstance(old, keras.Variable):
            check_constants(f"{where}/{name}", "const_scale", [old], [scale])
            continue
        constant = about["constant"] and old is None
        state.scales[name] = scale if constant else set_variable(layer, name, scale, old)


def float_variables(layer: keras.Layer, state: LayerState) -> list[keras.Variable]:
    """What the layer holds beside its quantized values and its scales."""
    skipped = {id(v) for v in [*state.parts(), *state.hollow.values()]}
    return [v for v in own_variables(layer) if id(v) not in skipped]


def _record(store: Any, where: str, state: LayerState) -> dict[str, Any]:
    keys = list(store.keys())
    if _KEY not in keys:
        if not keys:
            raise ValueError(_MSG_NOTHING.format(where=where))
        raise ValueError(_MSG_FLOAT.format(where=where, rule=state.rule, names=", ".join(keys)))
    size = math.prod(_claimed(store, _KEY) or ())
    if size > _MOST_BYTES:
        raise damaged(where, "its description", f"it has {size:,} bytes")
    try:
        record = json.loads(np.asarray(store[_KEY], np.uint8).tobytes())
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise damaged(where, "its description", str(error)[:80]) from None
    return opened(record, where, "its description")


def _load_stored(store: Any, name: str, about: Any, where: str, state: LayerState) -> WithAux:
    """One quantized variable, in the layout that this machine's kernels read, unless kept plain."""
    parts: dict[str, Any] = {}
    for part, fields in about["parts"].items():
        key, qtype = f"{name}.{part}", about["qtype"] if part == "qvalue" else None
        array = _read_array(store, key, fields, where, f"{where}/{name}", part, qtype)
        parts[part] = jnp.asarray(array)
    rule = state.rule if about["rule"] is None else rule_from_dict(about["rule"])
    how = how_from_dict(about["how"]).replace(rule=rule)
    tiles = [tuple(pair) for pair in about["tiles"]]
    q = QArray(**parts, qtype=about["qtype"], tiles=tiles).with_dtype(about["dtype"])
    validate_qarray(q)
    return WithAux(for_kernels(q, how) if state.settings.get("packed", True) else q, how)


def _check_awaited(awaited: Any, about: Any, where: str, name: str) -> None:
    """That a file holds what the model's config said of the layer."""
    if awaited is not None:
        here = f"{awaited['qtype']} of shape {tuple(awaited['shape'])}"
        found = f"{about['qtype']} of shape {tuple(about['parts']['qvalue']['shape'])}"
        if here != found:
            raise ValueError(_MSG_OTHER.format(where=where, name=name, here=here, found=found))


def _check_same(old: WithAux, new: WithAux, where: str, name: str) -> None:
    if old.shape != new.shape or how_to_dict(old.how) != how_to_dict(new.how):
        here, found = (f"{value.how!r} of shape {value.shape}" for value in (old, new))
        raise ValueError(_MSG_OTHER.format(where=where, name=name, here=here, found=found))


def _read_array(
    store: Any, key: str, about: Any, layer: str, where: str, what: str, qtype: Any = None
) -> np.ndarray:
    return from_file(_get(store, key, layer, about), about, where, what, qtype)


def _get(store: Mapping[str, Any], key: str, where: str, about: Any) -> Any:
    try:
        claimed, wanted = _claimed(store, key), stored_shape(about)
        if claimed in (None, wanted):
            return store[key]
        detail = f"expected the shape {wanted}, found {claimed}"
    except (KeyError, OSError, TypeError, ValueError) as error:
        detail = str(error)[:80] or "missing"
    raise damaged(where, f"variable {key!r}", detail)


def _claimed(store: Any, key: str) -> tuple[int, ...] | None:
    """The shape of an array that was not read yet: Keras' store reads all of it to tell."""
    group = getattr(store, "_h5_entry_group", None)
    if not isinstance(group, h5py.Group) or key not in group:
        return None
    if group.get(key, getclass=True, getlink=True) is not h5py.HardLink:
        return None  # Keras refuses it
    return getattr(group[key], "shape", None)
