"""One parameter of a checkpoint in the form of a template's: types, tiles, zero points.

Nothing is requantized: codes stay, scales are repeated where the template has more of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._errors import describe
from fewbit.boxes import is_box, rebox, unbox_parts, unboxed
from fewbit.numerics import format_of, qtype_name
from fewbit.qarray import QArray, WithAux, dequantize
from fewbit.qarray import unpack as unpack_codes

PARTS = ("qvalue", "scale", "zero_point", "tensor_scale")

_MSG_NOT_QUANTIZED = (
    "{path} is quantized in the template_params. Expected a dict containing qvalue/scale leaves. "
    "Got {found}; to quantize float parameters call fewbit.quantize_params."
)
_MSG_NO_PARTS = (
    '{path} is missing required "qvalue" or "scale" in pre-quantized dictionary. It has {found}.'
)
_MSG_UNSUPPORTED = "{path} has unsupported quantized leaves {found}. Expected only {known}."
_MSG_ZERO_POINT = (
    '{path} provided an unexpected "zero_point" for a symmetric quantized param. Make the template '
    "with weight_calibration_method='minmax' for this path."
)
_MSG_NO_ZERO_POINT = (
    '{path} is missing required quantized leaf "zero_point". The template is asymmetric: make it '
    "with weight_calibration_method='absmax', or pass zeros."
)
_MSG_SHAPE = "{path} has shape {found}, expected {wanted}.{hint}"
_MSG_TRANSPOSED = " It looks transposed."
_MSG_GRANULARITY = (
    "{path} has shape {found}, expected {wanted} for its {part}. The checkpoint has a number for "
    "each {mine}, the template for each {theirs}; make the template with the checkpoint's tiles: "
    "fewbit.restore_quantization_rules(checkpoint_params, fewbit.QuantizationRule)."
)
_MSG_COMBINATION = "Unhandled or invalid parameter combination for {path}. {why}"


def fitted(path: str, value: Any, leaf: Any, keeps_scales: bool) -> Any:
    """A checkpoint's parameter in the form of the template's `leaf`: types, tiles, boxes."""
    value = unboxed(value) if is_box(value) else value
    if isinstance(leaf, WithAux) and isinstance(leaf.array, QArray):
        wanted = jax.eval_shape(unpack_codes, unbox_parts(leaf.array))
        q = codes_of(path, value, leaf.how.qtype)
        new = _as_template(path, q, wanted, isinstance(value, Mapping), keeps_scales)
        boxed = leaf.array if is_box(leaf.array.data) else None
        return leaf.replace(array=rebox(new, boxed))
    target = leaf.array if isinstance(leaf, WithAux) else leaf  # a static scale is one number
    plain = unboxed(target) if is_box(target) else target
    if isinstance(value, WithAux | QArray | Mapping):
        q = codes_of(path, value, None)
        _check_shape(path, q.shape, tuple(plain.shape))
        array: Any = dequantize(q, plain.dtype)
    elif hasattr(value, "shape"):
        _check_shape(path, tuple(value.shape), tuple(plain.shape))
        array = jnp.asarray(value).astype(plain.dtype)
    else:
        raise ValueError(
            _MSG_COMBINATION.format(path=path, why=f"The checkpoint has {describe(value)}.")
        )
    array = target.replace_boxed(array) if is_box(target) else array
    return leaf.replace(array=array) if isinstance(leaf, WithAux) else array


def codes_of(path: str, value: Any, qtype: Any) -> QArray:
    """A checkpoint's quantized leaf as a plain QArray; `qtype` names codes of a bare dict."""
    if isinstance(value, WithAux):
        value = value.array
    if isinstance(value, QArray):
        return unpack_codes(unbox_parts(value))
    if not isinstance(value, Mapping):
        raise ValueError(_MSG_NOT_QUANTIZED.format(path=path, found=describe(value)))
    unknown = sorted(set(value) - set(PARTS))
    if unknown:
        raise ValueError(_MSG_UNSUPPORTED.format(path=path, found=unknown, known=list(PARTS)))
    if "qvalue" not in value or "scale" not in value:
        raise ValueError(_MSG_NO_PARTS.format(path=path, found=sorted(value)))
    parts: dict[str, Any] = {
        name: None if value.get(name) is None else jnp.asarray(value[name]) for name in PARTS
    }
    if qtype is None:
        return QArray(**parts)
    for name in ("qvalue", "zero_point"):
        if parts[name] is not None:
            parts[name] = _cast_codes(path, parts[name], qtype)
    return QArray(**parts, qtype=qtype)


def _as_template(path: str, q: QArray, wanted: QArray, bare: bool, keeps_scales: bool) -> QArray:
    _check_shape(path, q.shape, wanted.shape)
    if q.zero_point is not None and wanted.zero_point is None:
        raise ValueError(_MSG_ZERO_POINT.format(path=path))
    zero_point = q.zero_point
    if zero_point is None and wanted.zero_point is not None:
        if bare:
            raise ValueError(_MSG_NO_ZERO_POINT.format(path=path))
        zero_point = jnp.zeros(q.scale.shape, wanted.zero_point.dtype)
    qvalue = q.qvalue
    if qtype_name(q.qtype) != qtype_name(wanted.qtype):
        kinds = {format_of(t).kind for t in (q.qtype, wanted.qtype)}
        if kinds != {"int"}:
            why = f"The checkpoint has {qtype_name(q.qtype)} and the template "
            why += f"{qtype_name(wanted.qtype)}, which means other numbers by the same codes."
            raise ValueError(_MSG_COMBINATION.format(path=path, why=why))
        qvalue = _cast_codes(path, qvalue, wanted.qtype)
        if zero_point is not None:
            zero_point = _cast_codes(path, zero_point, wanted.qtype)
    scale = _repeated(path, "scale", q.scale, q, wanted)
    if not keeps_scales or scale.dtype.itemsize == 1:
        scale = scale.astype(wanted.scale.dtype)
    if zero_point is not None:
        zero_point = _repeated(path, "zero point", zero_point, q, wanted)
        zero_point = zero_point.astype(wanted.zero_point.dtype)
    new = QArray(
        qvalue,
        scale,
        zero_point,
        wanted.qtype,
        tensor_scale=q.tensor_scale,
        tiles=wanted.tiles,
    )
    return new.with_dtype(wanted.dtype)


def _cast_codes(path: str, codes: jax.Array, qtype: Any) -> jax.Array:
    """Codes in a format's storage type, if all of them are codes of it."""
    row = format_of(qtype)
    if row.kind == "float":
        if codes.dtype != row.storage:
            why = f"The codes are {codes.dtype} and {row.name} is stored as {row.storage}."
            raise ValueError(_MSG_COMBINATION.format(path=path, why=why))
        return codes
    low, high = row.asymmetric or ((-1, 1) if row.kind == "sign" else (0, 15))
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        why = f"The codes are {codes.dtype}, and {row.name} has integers from {low} to {high}."
        raise ValueError(_MSG_COMBINATION.format(path=path, why=why))
    wide = np.asarray(codes).astype(np.int32)
    if wide.size and (np.min(wide) < low or np.max(wide) > high):
        seen = f"from {np.min(wide)} to {np.max(wide)}"
        why = f"The codes go {seen}, those of {row.name} from {low} to "
        raise ValueError(_MSG_COMBINATION.format(path=path, why=f"{why}{high}."))
    return codes.astype(row.storage)


def _repeated(path: str, part: str, array: jax.Array, q: QArray, wanted: QArray) -> jax.Array:
    """One number per tile of the template, from tiles that are whole numbers of its own."""
    template = wanted.scale if part == "scale" else wanted.zero_point
    mine, theirs = q.tile_shape, wanted.tile_shape
    if array.shape == template.shape and mine == theirs:
        return array
    for a, b, dim in zip(mine, theirs, q.shape, strict=True):
        if a % b and a != dim:
            raise ValueError(
                _MSG_GRANULARITY.format(
                    path=path,
                    part=part,
                    found=tuple(array.shape),
                    wanted=tuple(template.shape),
                    mine="x".join(map(str, mine)),
                    theirs="x".join(map(str, theirs)),
                )
            )
    # A number for every element of the template's scale: the first element of its tile has it.
    for axis, (a, b, dim) in enumerate(zip(mine, theirs, q.shape, strict=True)):
        first = np.arange(0, dim, b) if dim else np.arange(0)
        if array.shape[axis] != 1 or template.shape[axis] != 1:
            array = jnp.take(array, jnp.asarray(first // a), axis=axis)
    return array


def _check_shape(path: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        turned = sorted(found) == sorted(wanted)
        hint = _MSG_TRANSPOSED if turned else ""
        raise ValueError(_MSG_SHAPE.format(path=path, found=found, wanted=wanted, hint=hint))
