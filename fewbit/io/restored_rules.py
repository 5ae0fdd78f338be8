"""Rules read back from a quantized checkpoint: `fewbit.restore_quantization_rules`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax.numpy as jnp

from fewbit._scales import scale_type
from fewbit.io.prequantized import leaves_of
from fewbit.io.prequantized_leaf import codes_of
from fewbit.io.read_checkpoint import ForeignCheckpoint
from fewbit.numerics import qtype_name
from fewbit.qarray import QArray, WithAux

_MSG_CONFLICT = (
    "Conflicting quantization rules reconstructed for {path}: {first} and {second}. The later one "
    "is used; a checkpoint with several formats in one module needs rules of your own."
)
_MSG_NOTHING = (
    "restore_quantization_rules found no quantized parameter: a QArray, or a dict with qvalue and "
    "scale. Give it the checkpoint's parameters, before they are dequantized."
)
SAME = "the weight's type"
INFERRED = "from the scales"


def restore_quantization_rules(
    checkpoint_params: Any,
    rule_type: Any,
    *,
    tile_size: Any = INFERRED,
    act_qtype: Any = SAME,
    **kwargs: Any,
) -> list[Any]:
    """The rules that would quantize a model as the checkpoint is quantized, one per module.

    Numbers in paths become `[^/]+`, so that layers share a rule. The type, the tile size (where
    none is given) and whether there are zero points are read from the arrays. `act_qtype` is the
    weight's type unless given, None for weight-only rules; `kwargs` are further fields of the rule.

    >>> import fewbit
    >>> q = fewbit.quantize(jnp.ones((64, 8)), 'nf4', channelwise_axes=(1,), tiled_axes={0: 32})
    >>> tree = {'layers': {'0': {'up': {'kernel': q}}, '1': {'up': {'kernel': q}}}}
    >>> restore_quantization_rules(tree, fewbit.QuantizationRule, act_qtype=None)
    [QuantizationRule(module_path='layers/[^/]+/up(/kernel)?', weight_qtype='nf4', tile_size=32)]
    """
    if isinstance(checkpoint_params, ForeignCheckpoint):
        checkpoint_params = {path: checkpoint_params[path] for path in checkpoint_params.quantized}
    found: dict[str, tuple[set[str], dict[str, Any]]] = {}
    for path, value in leaves_of(checkpoint_params):
        if hasattr(value, "shape") and not isinstance(value, QArray | WithAux):
            continue
        if isinstance(value, WithAux) and not isinstance(value.array, QArray):
            continue  # a static activation scale
        fields = _fields(path, value, tile_size, act_qtype) | kwargs
        module, _, name = path.rpartition("/")
        pattern = "/".join("[^/]+" if p.isdigit() else re.escape(p) for p in module.split("/"))
        names, before = found.get(pattern, (set(), fields))
        if before != fields:
            text = _MSG_CONFLICT.format(path=pattern, first=before, second=fields)
            warnings.warn(text, stacklevel=2)
        found[pattern] = (names | {re.escape(name)}, fields)
    if not found:
        raise ValueError(_MSG_NOTHING)
    return [rule_type(module_path=_path(p, n), **fields) for p, (n, fields) in found.items()]


def _path(module: str, names: set[str]) -> str:
    """A regular expression for the module, and for the leaf: sites of plain functions have that."""
    leaf = "|".join(sorted(names))
    leaf = f"({leaf})" if len(names) > 1 else leaf
    return f"{module}(/{leaf})?" if module else leaf


def _fields(path: str, value: Any, tile_size: Any, act_qtype: Any) -> dict[str, Any]:
    q = codes_of(path, value, None)
    own = value.how if isinstance(value, WithAux) else None
    qtype = q.qtype if own is None else own.qtype
    method = "minmax" if q.zero_point is not None else "absmax"
    fields = {
        "weight_qtype": qtype_name(qtype),
        "act_qtype": qtype_name(qtype) if act_qtype is SAME else act_qtype,
        "tile_size": _tile(q) if tile_size is INFERRED else tile_size,
        "weight_calibration_method": method if own is None else own.calibration_method,
    }
    if own is not None and own.scale_dtype is not None:
        fields["scale_dtype"] = jnp.dtype(own.scale_dtype).name
    elif q.scale.dtype != scale_type(q.dtype) and q.scale.dtype.itemsize > 1:
        fields["scale_dtype"] = q.scale.dtype.name
    return fields


def _tile(q: QArray) -> Any:
    """The tile of the summed axis, which is the one that is neither whole nor single."""
    tiles = q.tile_shape
    between = {a: t for a, (t, d) in enumerate(zip(tiles, q.shape, strict=True)) if 1 < t < d}
    if len(between) == 1:
        return next(iter(between.values()))
    if between:
        return between
    return 1 if q.size > 1 and all(t == 1 for t in tiles) else None
