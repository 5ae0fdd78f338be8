"""Parameters that another tool quantized, brought into the form of a quantized model.

`restore_quantization_rules` goes the other way: from a checkpoint to the rules of such a model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from fewbit._util import describe, key_name, nearest
from fewbit.io.checkpoint._parts import weight_of_parts
from fewbit.io.checkpoint._tree import (
    PARTS,
    abstract_leaf,
    flax_trees,
    map_leaves,
    put_at,
)
from fewbit.io.foreign._read import ForeignCheckpoint
from fewbit.kernels import for_kernels
from fewbit.numerics import format_of, qtype_name
from fewbit.planning import Plan, QuantizedParams
from fewbit.qarray import (
    QArray,
    WithAux,
    apart,
    dequantize,
    is_box,
    is_leaf,
    is_stored,
    parts_of,
    rebox,
    scale_type,
    unbox_parts,
    unboxed,
)
from fewbit.qarray import pack as pack_codes
from fewbit.qarray import unpack as unpack_codes

# --- One parameter in the form of a template's: types, tiles, zero points -------------------------

# What flax.serialization writes beside the parts.
_STATICS = ("qtype", "layout", "last_dim", "tiles")

_MSG_NOT_QUANTIZED = (
    "{path} is quantized in the template_params. Expected a dict containing qvalue/scale leaves. "
    "Got {found}; to quantize float parameters call fewbit.quantize_params."
)
_MSG_NO_PARTS = (
    '{path} is missing required "qvalue" or "scale" in pre-quantized dictionary. It has {found}.'
)
_MSG_UNSUPPORTED = "{path} has unsupported quantized leaves {found}. Expected only {known}."
_MSG_PACKED = (
    "{path} holds codes that lie packed for one machine's kernels, which do not tell their type. "
    "Give a model quantized alike as the template, or unpack before saving: "
    "nnx.state(fewbit.unpack(model))."
)
_MSG_IN_BYTES = (
    "{path} holds codes at their true width, as bytes, and the template one for each element. Give "
    "a model that lies so as the template, and update that: fewbit.pack(model, layout='bits')."
)
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
    if isinstance(leaf, Mapping):  # the parts of a weight that a layer of its own reads
        wanted = QArray(**leaf)
        q = codes_of(path, value, wanted.qtype)
        return parts_of(_as_template(path, q, wanted, isinstance(value, Mapping), keeps_scales))
    if isinstance(leaf, WithAux) and isinstance(leaf.array, QArray):
        wanted = jax.eval_shape(unpack_codes, unbox_parts(leaf.array))
        in_bytes = _is_in_bytes(value, wanted)
        if in_bytes and leaf.array.layout != "bits":
            raise ValueError(_MSG_IN_BYTES.format(path=path))
        packed = in_bytes or _is_packed(value)
        found = weight_of_parts(value, wanted, leaf.how) if packed else None
        q = codes_of(path, value, leaf.how.qtype) if found is None else found
        new = _as_template(path, q, wanted, isinstance(value, Mapping), keeps_scales)
        return leaf.replace(array=rebox(new, leaf.array if is_box(leaf.array.data) else None))
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
        raise _invalid(path, f"The checkpoint has {describe(value)}.")
    array = target.replace_boxed(array) if is_box(target) else array
    return leaf.replace(array=array) if isinstance(leaf, WithAux) else array


def codes_of(path: str, value: Any, qtype: Any) -> QArray:
    """A checkpoint's quantized leaf as a plain QArray; `qtype` names codes of a bare dict."""
    value = value.array if isinstance(value, WithAux) else value
    if isinstance(value, QArray):
        return unpack_codes(unbox_parts(value))
    if not isinstance(value, Mapping):
        raise ValueError(_MSG_NOT_QUANTIZED.format(path=path, found=describe(value)))
    value = {name: part for name, part in value.items() if part is not None}
    told = {name: value.pop(name) for name in _STATICS if name in value}
    unknown = sorted(set(value) - set(PARTS))
    if unknown:
        raise ValueError(_MSG_UNSUPPORTED.format(path=path, found=unknown, known=list(PARTS)))
    if "qvalue" not in value or "scale" not in value:
        raise ValueError(_MSG_NO_PARTS.format(path=path, found=sorted(value)))
    if _is_packed(value):
        raise ValueError(_MSG_PACKED.format(path=path))
    parts: dict[str, Any] = {
        name: jnp.asarray(value[name]) if name in value else None for name in PARTS
    }
    if "qtype" in told:
        tiles = [(int(axis), int(tile)) for axis, tile in told.pop("tiles", {}).items()]
        return unpack_codes(QArray(**parts, **told, tiles=tiles))
    if qtype is None:
        return QArray(**parts)
    for name in ("qvalue", "zero_point"):
        if parts[name] is not None:
            parts[name] = _cast_codes(path, parts[name], qtype)
    return QArray(**parts, qtype=qtype)


def _is_packed(value: Any) -> bool:
    """Whether codes lie in panels, as in the state of a packed NNX model."""
    return _has_bytes(value) and value["qvalue"].ndim > value["scale"].ndim


def _is_in_bytes(value: Any, wanted: QArray) -> bool:
    """Whether codes lie at true width, as in the state of a model packed with layout='bits'."""
    if not _has_bytes(value) or "qtype" in value or wanted.data.dtype == np.uint8:
        return False
    return value["qvalue"].shape == pack_codes(wanted).data.shape != wanted.shape


def _has_bytes(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"qvalue", "scale"} <= set(value):
        return False
    return getattr(value["qvalue"], "dtype", None) == np.uint8


def _as_template(path: str, q: QArray, wanted: QArray, bare: bool, keeps_scales: bool) -> QArray:
    _check_shape(path, q.shape, wanted.shape)
    qvalue, zero_point = q.qvalue, q.zero_point
    if zero_point is not None and wanted.zero_point is None:
        raise ValueError(_MSG_ZERO_POINT.format(path=path))
    if zero_point is None and wanted.zero_point is not None:
        if bare:
            raise ValueError(_MSG_NO_ZERO_POINT.format(path=path))
        zero_point = jnp.zeros(q.scale.shape, wanted.zero_point.dtype)
    mine, theirs = qtype_name(q.qtype), qtype_name(wanted.qtype)
    if mine != theirs:
        if {format_of(t).kind for t in (mine, theirs)} != {"int"}:
            why = f"The checkpoint has {mine} and the template {theirs}, "
            raise _invalid(path, f"{why}which means other numbers by the same codes.")
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
        qvalue, scale, zero_point, wanted.qtype, tensor_scale=q.tensor_scale, tiles=wanted.tiles
    )
    return new.with_dtype(wanted.dtype)


def _cast_codes(path: str, codes: jax.Array, qtype: Any) -> jax.Array:
    """Codes in a format's storage type, if all of them are codes of it."""
    row = format_of(qtype)
    if row.kind == "float":
        if codes.dtype != row.storage:
            why = f"The codes are {codes.dtype} and {row.name} is stored as {row.storage}."
            raise _invalid(path, why)
        return codes
    low, high = row.asymmetric or ((-1, 1) if row.kind == "sign" else (0, 15))
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        why = f"The codes are {codes.dtype}, and {row.name} has integers from {low} to {high}."
        raise _invalid(path, why)
    wide = np.asarray(codes).astype(np.int32)
    if wide.size and (np.min(wide) < low or np.max(wide) > high):
        seen = f"from {np.min(wide)} to {np.max(wide)}"
        raise _invalid(path, f"The codes go {seen}, those of {row.name} from {low} to {high}.")
    return codes.astype(row.storage)


def _invalid(path: str, why: str) -> ValueError:
    return ValueError(_MSG_COMBINATION.format(path=path, why=why))


def _repeated(path: str, part: str, array: jax.Array, q: QArray, wanted: QArray) -> jax.Array:
    """One number per tile of the template, from tiles that are whole numbers of its own."""
    template = wanted.scale if part == "scale" else wanted.zero_point
    mine, theirs = q.tile_shape, wanted.tile_shape
    if array.shape == template.shape and mine == theirs:
        return array
    for a, b, dim in zip(mine, theirs, q.shape, strict=True):
        if a % b and a != dim:
            shapes = dict(found=tuple(array.shape), wanted=tuple(template.shape))
            tiles = dict(mine="x".join(map(str, mine)), theirs="x".join(map(str, theirs)))
            raise ValueError(_MSG_GRANULARITY.format(path=path, part=part, **shapes, **tiles))
    # A number for every element of the template's scale: the first element of its tile has it.
    for axis, (a, b, dim) in enumerate(zip(mine, theirs, q.shape, strict=True)):
        if array.shape[axis] != 1 or template.shape[axis] != 1:
            first = np.arange(0, dim, b) if dim else np.arange(0)
            array = jnp.take(array, jnp.asarray(first // a), axis=axis)
    return array


def _check_shape(path: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        hint = _MSG_TRANSPOSED if sorted(found) == sorted(wanted) else ""
        raise ValueError(_MSG_SHAPE.format(path=path, found=found, wanted=wanted, hint=hint))


# --- All parameters in the form of a template -----------------------------------------------------

_MSG_TEMPLATE = (
    "process_prequantized_params takes a quantized model, its parameter tree or a Plan as the "
    "template, got {found}. For NNX pass fewbit.quantize_model(model, provider, *inputs), for "
    "Linen jax.eval_shape(quantized.init, key, x)['params'], for a function fewbit.plan(...)."
)
_NEAREST = " The nearest are {}."
_MSG_EXTRA = (
    "Found extra parameters in prequantized_params not present in template: {path}.{near} Pass "
    "allow_extra_params=True to leave them out."
)
_MSG_MISSING = "{path} is in the template and not in the checkpoint.{near}"
_MSG_MESH = (
    "{path} requires an active mesh to place pre-quantized arrays. Call this under "
    "jax.set_mesh(mesh), or pass use_checkpoint_sharding=True."
)


def process_prequantized_params(
    checkpoint_params: Any,
    template_params: Any,
    *,
    allow_extra_params: bool = False,
    use_checkpoint_sharding: bool = False,
) -> Any:
    """A checkpoint's parameters in the form that a quantized model takes.

    `template_params` is a quantized NNX model (then the result is a pure dict for `nnx.update`),
    the abstract parameters of a quantized Linen model, a tree of quantized parameters, or a
    `Plan`. In `checkpoint_params` a quantized weight is a QArray or a dict of `qvalue`, `scale` and
    `zero_point`; it is what `fewbit.read_checkpoint` gives, or any tree.

    A quantized weight that the template keeps float is dequantized; a scale for a block is repeated
    where the template has one for each channel; the codes stay as they are. Arrays are cast to the
    template's types and placed where it has them; a Plan takes scales in the checkpoint's own type.
    With `allow_extra_params=True` parameters that the template lacks are left out.

    >>> import fewbit, jax.numpy as jnp
    >>> f = lambda params, x: x @ params['w']
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8')]
    >>> plan = fewbit.plan(f, rules, {'w': jnp.ones((4, 2))}, jnp.ones((1, 4)))
    >>> leaf = {'qvalue': jnp.ones((4, 2), jnp.int8), 'scale': jnp.ones((1, 1))}
    >>> process_prequantized_params({'w': leaf}, plan)['w'].array
    QArray(qvalue=int8[4,2], scale=float32[1,2], qtype=int8)
    """
    if isinstance(checkpoint_params, ForeignCheckpoint):
        checkpoint_params = checkpoint_params.tree()
    template = _Template(template_params)
    given = template.named(leaves_of(checkpoint_params))
    if template.is_nnx and template.misfits(given):
        # As Orbax restores an NNX state without a template: each Variable a dict of its value.
        bare = template.named(leaves_of(_without_values(checkpoint_params)))
        given = bare if template.misfits(bare) < template.misfits(given) else given
    extra = [path for path in given if path not in template.leaves]
    if extra and not allow_extra_params:
        missing = [path for path in template.leaves if path not in given]
        near = nearest(extra[0], missing, _NEAREST, 2, 0.6, show=str)
        raise ValueError(_MSG_EXTRA.format(path=extra[0], near=near))
    result = {}
    for path, value in given.items():
        if path in template.leaves:
            leaf = template.leaves[path]
            new = template.finished(fitted(path, value, leaf, template.keeps_scales), leaf)
            result[path] = new if use_checkpoint_sharding else _placed(path, new, leaf)
    made = template.arranged(result, checkpoint_params, extra)
    return apart(made) if template.is_nnx else made


class _Template:
    """What each parameter should look like, and how the result is put together."""

    def __init__(self, source: Any):
        self.tree: Any = None
        self.keeps_scales = self.packs = isinstance(source, Plan)
        self.is_nnx = False
        if isinstance(source, Plan):
            self.leaves = {leaf.path: abstract_leaf(leaf) for leaf in source.leaves}
            return
        if isinstance(source, QuantizedParams):
            source = source.params
        flax = flax_trees()
        self.is_nnx = flax is not None and flax.is_nnx(source)
        if self.is_nnx:
            source = flax.pure(source)
        self.tree = source
        ends = _is_given if self.is_nnx else is_leaf
        flat = jax.tree_util.tree_flatten_with_path(source, is_leaf=ends)[0]
        self.keys = {key_name(key): key for key, _ in flat}
        self.leaves = {key_name(key): _without_array(value) for key, value in flat}
        self.wrapped = {key_name(key) for key, value in flat if _without_array(value) is not value}
        known = lambda v: hasattr(v, "shape") or is_box(v) or isinstance(v, Mapping)  # noqa: E731
        if not any(map(known, self.leaves.values())):
            raise TypeError(_MSG_TEMPLATE.format(found=describe(source)))

    def named(self, given: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        """A checkpoint's parameters by name; a static scale may lie below a word 'array'."""
        found = {}
        for path, value in given:
            owner = path.removesuffix("/array")
            found[owner if path not in self.leaves and owner in self.leaves else path] = value
        return found

    def misfits(self, given: Mapping[str, Any]) -> int:
        """How many parameters are not there, or have parts that are no arrays."""
        parts = {
            path: value.values() if isinstance(value, Mapping) else ()
            for path, value in given.items()
        }
        return sum(
            path not in self.leaves or any(isinstance(part, Mapping) for part in found)
            for path, found in parts.items()
        )

    def finished(self, value: Any, leaf: Any) -> Any:
        """In the layout that the template has, or that kernels read."""
        if not isinstance(value, WithAux) or not isinstance(value.array, QArray):
            return value
        if leaf.array.layout == "bits":
            return value.replace(array=pack_codes(value.array))
        if self.packs or leaf.array.layout == "panels":
            return value.replace(array=for_kernels(value.array, value.how))
        return value

    def arranged(self, result: dict[str, Any], given: Any, extra: list[str]) -> Any:
        """The result as the template is built; as the checkpoint is, for a Plan."""
        missing = [path for path in self.leaves if path not in result]
        if missing and self.tree is None:
            near = nearest(missing[0], extra, _NEAREST, 2, 0.6, show=str)
            raise ValueError(_MSG_MISSING.format(path=missing[0], near=near))
        if self.tree is None:
            return _as_given(given, result)
        if not missing and not self.is_nnx:
            return map_leaves(self.tree, lambda path, _: result[path])
        nested: dict[Any, Any] = {}  # a part of a model, as nnx.update takes it
        for path, value in result.items():
            value = {"array": value} if path in self.wrapped else value
            put_at(nested, [getattr(key, "key", key) for key in self.keys[path]], value)
        return nested


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Paths and leaves of a checkpoint; a dict with a qvalue is a leaf, and so is its `array`."""
    flax = flax_trees()
    tree = tree if flax is None else flax.pure(tree)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_given)
    for key, value in flat:
        yield key_name(key), _without_array(value)


def _is_given(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return is_leaf(value)
    inner = _without_array(value)
    if not isinstance(inner, Mapping):
        return False
    # A lone 'scale' may be a layer norm's: it is a quantized leaf only beside other parts.
    return "qvalue" in inner or ("scale" in inner and len(inner) > 1 and set(inner) <= set(PARTS))


def _without_array(value: Any) -> Any:
    return value["array"] if isinstance(value, Mapping) and set(value) == {"array"} else value


def _all_in_values(tree: Any) -> bool:
    """Whether each array stands below a key 'value', as in an NNX state that Orbax restored."""
    keys = [key for key, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return bool(keys) and all(any(getattr(k, "key", None) == "value" for k in key) for key in keys)


def _without_values(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    if set(tree) == {"value"} and not _all_in_values(tree["value"]):  # else a module of that name
        return tree["value"]
    return {key: _without_values(value) for key, value in tree.items()}


def _placed(path: str, value: Any, leaf: Any) -> Any:
    """Each array where the template has its own, if the template says so."""

    def place(array, like):
        if is_box(array):
            return array
        sharding = getattr(like, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return array
        if isinstance(sharding.mesh, AbstractMesh):
            if sharding.mesh.size <= 1:
                return array
            mesh = jax.sharding.get_mesh()
            if mesh.empty:
                raise ValueError(_MSG_MESH.format(path=path))
            sharding = NamedSharding(mesh, sharding.spec)
        return jax.device_put(array, sharding)

    leaves, structure = jax.tree.flatten(value, is_leaf=is_box)
    like = jax.tree.leaves(leaf, is_leaf=is_box)
    if len(like) != len(leaves):
        return value
    placed = [place(a, b) for a, b in zip(leaves, like, strict=True)]
    return jax.tree.unflatten(structure, placed)


def _as_given(given: Any, result: dict[str, Any]) -> Any:
    if isinstance(given, Mapping) and any("/" in str(key) for key in given):
        nested: dict[str, Any] = {}
        for path, value in result.items():
            put_at(nested, path.split("/"), value)
        return nested
    absent = object()
    tree = jax.tree_util.tree_map_with_path(
        lambda key, _: result.get(key_name(key), absent), given, is_leaf=_is_given
    )
    return _pruned(tree, absent)


def _pruned(tree: Any, absent: object) -> Any:
    """Without the leaves that the template does not have, where containers allow it."""
    if not isinstance(tree, dict):
        return tree
    kept = {key: _pruned(value, absent) for key, value in tree.items() if value is not absent}
    return {key: value for key, value in kept.items() if not isinstance(value, dict) or value}


# --- The rules of a quantized checkpoint ----------------------------------------------------------

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
    Codes in a bare dict (of an NNX state, say) tell the type that stores them: those of int2 and
    int3 look like int4, and those of int5 to int7 like int8. Give the model itself, which knows.

    >>> import fewbit
    >>> q = fewbit.quantize(jnp.ones((64, 8)), 'nf4', channelwise_axes=(1,), tiled_axes={0: 32})
    >>> tree = {'layers': {'0': {'up': {'kernel': q}}, '1': {'up': {'kernel': q}}}}
    >>> restore_quantization_rules(tree, fewbit.QuantizationRule, act_qtype=None)
    [QuantizationRule(module_path='layers/[^/]+/up(/kernel)?', weight_qtype='nf4', tile_size=32)]
    """
    if isinstance(checkpoint_params, ForeignCheckpoint):
        checkpoint_params = {path: checkpoint_params[path] for path in checkpoint_params.quantized}
    elif _all_in_values(checkpoint_params):
        checkpoint_params = _without_values(checkpoint_params)
    found: dict[str, tuple[set[str], dict[str, Any]]] = {}
    for path, value in leaves_of(checkpoint_params):
        if hasattr(value, "shape") and not is_stored(value):
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
    rules = []
    for module, (names, fields) in found.items():
        leaf = "|".join(sorted(names))
        leaf = f"({leaf})" if len(names) > 1 else leaf
        # The leaf is there for sites of plain functions, which have its name.
        path = f"{module}(/{leaf})?" if module else f"({leaf})?"
        rules.append(rule_type(module_path=path, **fields))
    return rules


def _fields(path: str, value: Any, tile_size: Any, act_qtype: Any) -> dict[str, Any]:
    q = codes_of(path, value, None)
    own = value.how if isinstance(value, WithAux) else None
    qtype = qtype_name(q.qtype if own is None else own.qtype)
    method = "minmax" if q.zero_point is not None else "absmax"
    if own is None and qtype == "uint4" and method == "absmax":
        qtype = "nf4"  # the one format without a zero point whose codes are uint4
    fields = {
        "weight_qtype": qtype,
        "act_qtype": qtype if act_qtype is SAME else act_qtype,
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
    if between:
        return between if len(between) > 1 else next(iter(between.values()))
    return 1 if q.size > 1 and all(t == 1 for t in tiles) else None
