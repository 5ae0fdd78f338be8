"""Parameters that another tool quantized, brought into the form of a quantized model.

`restored_rules` goes the other way: from a checkpoint to the rules of such a model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from fewbit._errors import describe
from fewbit._plan import Plan
from fewbit.boxes import is_box
from fewbit.calls import key_name
from fewbit.io.prequantized_leaf import PARTS, fitted
from fewbit.io.read_checkpoint import ForeignCheckpoint
from fewbit.layouts import for_kernels
from fewbit.qarray import QArray, WithAux, abstract_quantized
from fewbit.qarray import pack as pack_codes
from fewbit.static_scales import QuantizedParams

_MSG_TEMPLATE = (
    "process_prequantized_params takes a quantized model, its parameter tree or a Plan as the "
    "template, got {found}. For NNX pass fewbit.quantize_model(model, provider, *inputs), for "
    "Linen jax.eval_shape(quantized.init, key, x)['params'], for a function fewbit.plan(...)."
)
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
    given = dict(leaves_of(checkpoint_params))
    template = _Template(template_params)
    extra = [path for path in given if path not in template.leaves]
    if extra and not allow_extra_params:
        near = _near(extra[0], [p for p in template.leaves if p not in given])
        raise ValueError(_MSG_EXTRA.format(path=extra[0], near=near))
    result = {}
    for path, value in given.items():
        if path in template.leaves:
            leaf = template.leaves[path]
            new = template.finished(fitted(path, value, leaf, template.keeps_scales), leaf)
            result[path] = new if use_checkpoint_sharding else _placed(path, new, leaf)
    return template.arranged(result, checkpoint_params, extra)


class _Template:
    """What each parameter should look like, and how the result is put together."""

    def __init__(self, source: Any):
        self.tree: Any = None
        self.keeps_scales = self.packs = isinstance(source, Plan)
        if isinstance(source, Plan):
            self.leaves = {leaf.path: _planned(leaf) for leaf in source.leaves}
            return
        if isinstance(source, QuantizedParams):
            source = source.params
        if hasattr(source, "_fewbit_pure_dict"):  # an NNX model
            source = source._fewbit_pure_dict()
        self.tree = source
        flat = jax.tree_util.tree_flatten_with_path(source, is_leaf=_is_leaf)[0]
        self.keys = {key_name(key): key for key, _ in flat}
        self.leaves = {key_name(key): value for key, value in flat}
        if not any(hasattr(v, "shape") or is_box(v) for v in self.leaves.values()):
            raise TypeError(_MSG_TEMPLATE.format(found=describe(source)))

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
            raise ValueError(_MSG_MISSING.format(path=missing[0], near=_near(missing[0], extra)))
        if self.tree is None:
            return _as_given(given, result)
        if not missing:
            pick = lambda key, _: result[key_name(key)]  # noqa: E731
            return jax.tree_util.tree_map_with_path(pick, self.tree, is_leaf=_is_leaf)
        nested: dict[Any, Any] = {}  # a part of a model, as nnx.update takes it
        for path, value in result.items():
            *parents, last = (getattr(key, "key", key) for key in self.keys[path])
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return nested


def _planned(leaf: Any) -> Any:
    abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if leaf.how is None:
        return abstract
    q = abstract_quantized(abstract, leaf.how)
    return WithAux(q, leaf.how.replace(rule=leaf.rule))


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Paths and leaves of a checkpoint; a dict with a qvalue is a leaf, and so is its `array`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_given)
    for key, value in flat:
        yield key_name(key), _without_array(value)


def _without_array(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"array"}:
        return value["array"]
    return value


def _is_given(value: Any) -> bool:
    if isinstance(value, Mapping):
        inner = value["array"] if set(value) == {"array"} else value
        return isinstance(inner, Mapping) and (
            "qvalue" in inner or "scale" in inner and _flat(inner)
        )
    return isinstance(value, QArray | WithAux) or is_box(value)


def _flat(value: Mapping[Any, Any]) -> bool:
    """A lone 'scale' may be a layer norm's: it is a quantized leaf only beside other parts."""
    return set(value) <= set(PARTS) and len(value) > 1


def _is_leaf(value: Any) -> bool:
    return isinstance(value, QArray | WithAux) or is_box(value)


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
            *parents, last = path.split("/")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
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
    return {
        key: value for key, value in kept.items() if not (isinstance(value, dict) and not value)
    }


def _near(path: str, others: Any) -> str:
    close = difflib.get_close_matches(path, list(others), 2)
    return f" The nearest are {', '.join(close)}." if close else ""
