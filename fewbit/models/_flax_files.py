"""Quantized trees through `flax.serialization`.

A state dict holds the arrays of a `QArray` and what is needed to see that they belong where they
are put: the type of the codes, their layout, uneven tiles. Everything static in the result is the
template's (`jax.eval_shape(quantized.init, key, x)`, or parameters quantized the same way).
"""

from typing import Any

import jax
import numpy as np
from flax import serialization

from fewbit._util import describe
from fewbit.numerics import qtype_name
from fewbit.qarray import (
    PanelArray,
    QArray,
    WithAux,
    is_box,
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
