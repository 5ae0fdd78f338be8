"""Flax trees in files: quantized ones through `flax.serialization`, Flax's containers in ours.

A state dict holds the arrays of a `QArray` and what is needed to see that they belong where they
are put: the type of the codes, their layout, uneven tiles. Everything static in the result is the
template's (`jax.eval_shape(quantized.init, key, x)`, or parameters quantized the same way).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.core
import flax.linen as nn
import jax
import numpy as np
from flax import nnx, serialization

from fewbit._util import describe
from fewbit.kernels import unpack as unpacked
from fewbit.models._flax_parts import joined, split_parts
from fewbit.numerics import qtype_name
from fewbit.qarray import (
    HowToQuantize,
    PanelArray,
    QArray,
    WithAux,
    apart,
    is_box,
    is_stored,
    pack,
    repack,
    unboxed,
    unpack,
)

_PARTS = ("qvalue", "scale", "zero_point", "tensor_scale")

_MSG_MISMATCH = (
    "{path}: the file holds {found}, the template {wanted}. Make the template with the rules that "
    "the saved parameters were quantized by, or restore them into a template of their own kind and "
    "quantize the float parameters anew."
)
_MSG_FLOAT = (
    "{path}: the template is quantized ({wanted}), the file holds {found}. Restore the file into "
    "float parameters and quantize them: fewbit.quantize_params(params, plan)."
)


def register() -> None:
    """Let Flax serialize QArray and WithAux; doing it again changes nothing.

    >>> import fewbit, jax.numpy as jnp
    >>> register()
    >>> params = {'w': fewbit.quantize(jnp.ones((4, 2)), 'int8')}
    >>> state = serialization.to_state_dict(params)
    >>> state['w']['qtype'], sorted(state['w'])
    ('int8', ['layout', 'qtype', 'qvalue', 'scale'])
    >>> serialization.from_bytes(params, serialization.to_bytes(params))['w']
    QArray(qvalue=int8[4,2], scale=float32[1,1], qtype=int8)
    """
    for kind, save, restore in (
        (QArray, _qarray_state, _restore_qarray),
        (PanelArray, _panels_state, _restore_panels),
        (WithAux, _with_aux_state, _restore_with_aux),
    ):
        if not serialization.is_serializable(kind):
            serialization.register_serialization_state(kind, save, restore)


def _with_aux_state(value: WithAux) -> dict[str, Any]:
    return {"array": serialization.to_state_dict(value.array)}


def _restore_with_aux(template: WithAux, state: Any) -> WithAux:
    if not isinstance(state, dict) or "array" not in state:
        raise ValueError(_no_qarray(template.array, state))
    array = serialization.from_state_dict(template.array, state["array"], name="array")
    if not isinstance(template.array, QArray):  # a scale of an activation
        _compare("array", template.array, array)
    return template.replace(array=array)


def _qarray_state(q: QArray) -> dict[str, Any]:
    state: dict[str, Any] = {"qtype": None if q.qtype is None else qtype_name(q.qtype)}
    state["layout"] = q.layout
    if q.last_dim is not None:
        state["last_dim"] = q.last_dim
    if q.tiles:
        state["tiles"] = {str(axis): tile for axis, tile in q.tiles}
    for name, part in _parts(q).items():
        state[name] = serialization.to_state_dict(part)
    return state


# Panels are one machine's layout: a file holds plain codes, and is packed again when read.
def _panels_state(p: PanelArray) -> dict[str, Any]:
    return _qarray_state(p.plain())


def _restore_panels(template: PanelArray, state: Any) -> QArray:
    return repack(_restore_qarray(jax.eval_shape(PanelArray.plain, template), state), template)


def _restore_qarray(template: QArray, state: Any) -> QArray:
    if not isinstance(state, dict) or not {"qtype", "layout", "qvalue", "scale"} <= set(state):
        raise ValueError(_no_qarray(template, state))
    wanted = None if template.qtype is None else qtype_name(template.qtype)
    if state["qtype"] != wanted:
        raise ValueError(_mismatch("qtype", f"{state['qtype']} codes", f"{wanted} codes"))
    _compare_parts(template, state)
    tiles = {int(axis): tile for axis, tile in state.get("tiles", {}).items()}
    if tiles != dict(template.tiles):
        texts = [f"uneven tiles {t}" if t else "even tiles" for t in (tiles, dict(template.tiles))]
        raise ValueError(_mismatch("scale", *texts))
    boxes = _parts(template)
    parts = {name: serialization.from_state_dict(boxes[name], state[name], name) for name in boxes}
    if state["layout"] != template.layout:
        template, parts = _in_layout(template, parts, state)
    for name, part in parts.items():
        _compare(name, _parts(template)[name], part)
    return template.replace(**parts)


def _in_layout(
    template: QArray, parts: dict[str, Any], state: dict[str, Any]
) -> tuple[QArray, dict[str, Any]]:
    """The file's codes packed or unpacked as the template's are: the same codes, moved."""
    bare = {name: unboxed(part) if is_box(part) else part for name, part in parts.items()}
    stored = QArray(
        **bare,
        qtype=template.qtype,
        layout=state["layout"],
        last_dim=state.get("last_dim"),
    )
    codes = (unpack if template.layout == "plain" else pack)(stored).data
    box = parts["qvalue"]
    return template, parts | {"qvalue": box.replace_boxed(codes) if is_box(box) else codes}


def _parts(q: QArray) -> dict[str, Any]:
    values = (q.data, q.scale, q.zero_point, q.tensor_scale)
    return {name: part for name, part in zip(_PARTS, values, strict=True) if part is not None}


def _compare_parts(template: QArray, state: dict[str, Any]) -> None:
    for name in _PARTS:
        stored, wanted = name in state, name in _parts(template)
        if stored != wanted:
            words = (f"a {name}", f"no {name}")
            raise ValueError(_mismatch(name, *(words if stored else words[::-1])))


def _compare(name: str, template: Any, found: Any) -> None:
    """Raise if an array of the file differs from the template's in shape or type."""
    template, found = (unboxed(x) if is_box(x) else x for x in (template, found))
    if not hasattr(template, "shape") or not isinstance(found, np.ndarray | jax.Array):
        return
    if tuple(found.shape) != tuple(template.shape) or found.dtype != template.dtype:
        raise ValueError(_mismatch(name, describe(found), describe(template)))


def _path(name: str = "") -> str:
    return "/".join([serialization.current_path(), name]).removeprefix("./").rstrip("/")


def _mismatch(name: str, found: str, wanted: str) -> str:
    return _MSG_MISMATCH.format(path=_path(name), found=found, wanted=wanted)


def _no_qarray(template: Any, state: Any) -> str:
    return _MSG_FLOAT.format(path=_path(), found=describe(state), wanted=describe(template))


# --- Flax's own containers of parameters, for files: FrozenDict, partitioning boxes, NNX states ---

_BOXES = {"Partitioned": nn.Partitioned, "LogicallyPartitioned": nn.LogicallyPartitioned}


def is_frozen_dict(value: Any) -> bool:
    """Whether a tree node is Flax's immutable dict."""
    return isinstance(value, flax.core.FrozenDict)


def frozen_dict(items: dict[str, Any]) -> Any:
    """Flax's immutable dict of these items."""
    return flax.core.FrozenDict(items)


def box_names(box: Any) -> tuple[str, list[Any]] | None:
    """Class and axis names of a partitioning box; None for a box of another kind.

    >>> box_names(nn.Partitioned(None, names=('model', None)))
    ('Partitioned', ['model', None])
    """
    for name, kind in _BOXES.items():
        if type(box) is kind:
            return name, [list(n) if isinstance(n, tuple) else n for n in box.names]
    return None


def make_box(kind: str, names: list[Any], value: Any) -> Any:
    """The box again. Meshes and rules are a machine's own and not part of it."""
    own: Any = tuple(tuple(n) if isinstance(n, list) else n for n in names)
    return _BOXES[kind](value, names=own)


def pure(value: Any) -> Any:
    """An NNX model or state as nested dicts of its values; anything else as it is.

    >>> sorted(pure(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    ['bias', 'kernel']
    """
    return nnx.to_pure_dict(nnx.state(with_wholes(value))) if is_nnx(value) else value


def with_wholes(value: Any) -> Any:
    """An NNX model with each stored weight in one Variable; a state as it is."""
    return joined(value) if isinstance(value, nnx.Module) else value


def is_nnx(value: Any) -> bool:
    """Whether this is an NNX model or state."""
    return isinstance(value, nnx.Module | nnx.State)


def filled(template: Any, fill: Callable[[Any], Any]) -> Any:
    """A model or state like the template with the values that `fill` makes of its pure dict."""
    is_state = isinstance(template, nnx.State)
    graph, state = (None, template) if is_state else nnx.split(joined(template))
    values = nnx.to_pure_dict(state)
    values = apart(unpacked(fill(with_whole_weights(values)))) if is_state else fill(values)
    new = nnx.from_flat_state(
        (path, _with_value(old, functools.reduce(operator.getitem, path, values)))
        for path, old in nnx.to_flat_state(state)
    )
    return new if graph is None else split_parts(nnx.merge(graph, new))


def with_whole_weights(tree: Any) -> Any:
    """A pure dict of a state in which the parts of a stored weight are one leaf.

    Its type is that of its codes, and `how` tells nothing.
    """
    if not isinstance(tree, dict):
        return tree
    parts = tree.get("array")
    is_weight = isinstance(parts, dict) and {"qvalue", "scale"} <= set(parts)
    if set(tree) == {"array"} and (is_weight or not isinstance(parts, dict)):
        array = QArray(**parts) if isinstance(parts, dict) else parts
        return WithAux(array, HowToQuantize(qtype="int8"))
    return {key: with_whole_weights(value) for key, value in tree.items()}


def _with_value(old: Any, value: Any) -> Any:
    """A Variable, or an array that is a plain attribute, with another value."""
    if isinstance(old, nnx.Variable):
        held = old.get_value()
        if isinstance(held, WithAux) and isinstance(value, WithAux) and is_stored(held.array):
            like = held.array
            q = unpack(value.array)
            if isinstance(like, PanelArray):
                q = repack(q, like)
            value = value.replace(array=pack(q) if like.layout == "bits" else q)
        return old.replace(value)
    return np.asarray(value) if isinstance(old, np.ndarray) else value
