"""A quantized layer's variables in Keras' weights file, and back: the same codes on any machine.

Beside its float variables ('0', '1', ... as Keras numbers them) a layer's group holds the parts of
each quantized one ('kernel.qvalue'), its static scales, and 'fewbit': a JSON text that says what
they are, with a checksum of each.
"""

import contextlib
import contextvars
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import jax.numpy as jnp
import keras
import numpy as np

from fewbit._plan_json import how_from_dict, how_to_dict
from fewbit.keras._serial_arrays import checked, from_file, stored_shape, to_file
from fewbit.keras._serial_format import damaged, opened, sealed
from fewbit.keras._state import LayerState
from fewbit.keras._variables import fill, own_variables, set_variable, value_of
from fewbit.layouts import for_kernels
from fewbit.numerics import qtype_name
from fewbit.qarray import QArray, WithAux, unpack, validate_qarray
from fewbit.rules_io import rule_from_dict, rule_to_dict

_KEY = "fewbit"
_MOST_BYTES = 16 * 2**20  # of a layer's description
# The layers that were read while a file is proved to load: their values are checked, and not kept.
_read: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar(
    "fewbit_read", default=None
)
_PARTS = ("qvalue", "scale", "zero_point", "tensor_scale")

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


@contextlib.contextmanager
def proving(read: list[Any]) -> Iterator[None]:
    """While this is open, layers keep no quantized values of the file, and are noted in `read`."""
    token = _read.set(read)
    try:
        yield
    finally:
        _read.reset(token)


def save_variables(layer: keras.Layer, state: LayerState, store: Any) -> None:
    """Write all that the layer itself holds."""
    record: dict[str, Any] = {"variables": {}, "stored": {}, "scales": {}}
    for number, variable in enumerate(float_variables(layer, state)):
        store[str(number)], about = to_file(variable.value)
        record["variables"][str(number)] = {"name": variable.name, **about}
    for name, stored in state.stored.items():
        record["stored"][name] = _save_stored(stored.value(), name, state, store)
    for name, scale in state.scales.items():
        store[f"scale.{name}"], about = to_file(value_of(scale))
        record["scales"][name] = {"constant": not isinstance(scale, keras.Variable), **about}
    text = json.dumps(sealed(record), sort_keys=True).encode()
    store[_KEY] = np.frombuffer(text, np.uint8)


def _save_stored(value: WithAux, name: str, state: LayerState, store: Any) -> dict[str, Any]:
    q, how = unpack(value.array), value.how
    parts = {}
    for part in _PARTS:
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
    for key, variable in zip(record["variables"], variables, strict=True):
        about = record["variables"][key]
        array = from_file(_get(store, key, where, about), about, where, f"variable {key!r}")
        variable.assign(array)
    awaited = state.hollow.keys() | state.stored.keys()
    if record["stored"].keys() != awaited:
        here, found = sorted(awaited), sorted(record["stored"])
        raise ValueError(_MSG_VARIABLES.format(where=where, here=here, found=found))
    read = _read.get()
    for name, about in record["stored"].items():
        _check_awaited(state.awaited.get(name), about, where, name)
        if read is not None:
            _check_parts(store, name, about, where)
            continue
        value = _load_stored(store, name, about, where, state)
        if name in state.stored:
            _check_same(state.stored[name].value(), value, where, name)
        state.stored[name] = fill(layer, state.hollow[name], value, state.stored.get(name))
    if read is not None:
        read.append(layer)
        return
    for name, about in record["scales"].items():
        key = f"scale.{name}"
        scale = jnp.asarray(
            from_file(_get(store, key, where, about), about, where, f"scale {name!r}")
        )
        old = state.scales.get(name)
        state.scales[name] = scale if about["constant"] else set_variable(layer, name, scale, old)


def float_variables(layer: keras.Layer, state: LayerState) -> list[keras.Variable]:
    """What the layer holds beside its quantized values and its scales."""
    ours = [part for stored in state.stored.values() for part in stored.parts]
    ours += [scale for scale in state.scales.values() if isinstance(scale, keras.Variable)]
    skipped = {id(v) for v in [*ours, *state.hollow.values()]}
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
    whole = f"{where}/{name}"
    parts: dict[str, Any] = {
        part: jnp.asarray(
            from_file(
                _get(store, f"{name}.{part}", where, fields),
                fields,
                whole,
                part,
                about["qtype"] if part == "qvalue" else None,
            )
        )
        for part, fields in about["parts"].items()
    }
    rule = state.rule if about["rule"] is None else rule_from_dict(about["rule"])
    how = how_from_dict(about["how"]).replace(rule=rule)
    q = QArray(
        **parts, qtype=about["qtype"], tiles=[tuple(pair) for pair in about["tiles"]]
    ).with_dtype(about["dtype"])
    validate_qarray(q)
    return WithAux(for_kernels(q, how) if state.settings.get("packed", True) else q, how)


def _check_awaited(awaited: Any, about: Any, where: str, name: str) -> None:
    """That a file holds what the model's config said of the layer."""
    if awaited is not None:
        here = f"{awaited['qtype']} of shape {tuple(awaited['shape'])}"
        found = f"{about['qtype']} of shape {tuple(about['parts']['qvalue']['shape'])}"
        if here != found:
            raise ValueError(_MSG_OTHER.format(where=where, name=name, here=here, found=found))


def _check_parts(store: Any, name: str, about: Any, where: str) -> None:
    for part, fields in about["parts"].items():
        checked(_get(store, f"{name}.{part}", where, fields), fields, f"{where}/{name}", part)


def _check_same(old: WithAux, new: WithAux, where: str, name: str) -> None:
    if old.shape != new.shape or how_to_dict(old.how) != how_to_dict(new.how):
        here, found = (f"{value.how!r} of shape {value.shape}" for value in (old, new))
        raise ValueError(_MSG_OTHER.format(where=where, name=name, here=here, found=found))


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
