"""Parameter trees as JSON: containers as they are, leaves as names of tensors, nothing pickled.

A node is null (None) or an object with one key, which says its kind:

    {"dict": {key: node}}  {"int_dict": {"0": node}}  {"frozen_dict": {key: node}}
    {"list": [node]}  {"tuple": [node]}  {"quantized_params": {"params": node, "act_scales": node}}
    {"custom": {"class": name, "children": {key: node}}}       a pytree class of the user's
    {"array": tensor}  {"key": {"data": tensor, "impl": name}}  {"number": 3}  {"text": "..."}
    {"qarray": {"qtype", "dtype", "tiles", "qvalue": node, "scale": node, ...}}
    {"with_aux": {"how": number in the list of hows, "array": node}}
    {"box": {"class": name, "names": [...], "value": node}}  {"opaque": "the function tanh"}
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fewbit import models
from fewbit._util import describe, key_name
from fewbit.io._encoding import KNOWN_DTYPES, Encoding, encoding_of, to_numpy
from fewbit.kernels import refuse_parts
from fewbit.numerics import qtype_name
from fewbit.planning import LeafPlan, QuantizedParams, how_to_dict
from fewbit.qarray import (
    HowToQuantize,
    PanelArray,
    QArray,
    WithAux,
    abstract_quantized,
    is_box,
    is_leaf,
    unbox_parts,
    unboxed,
    unpack,
)

MOST_DEPTH = 100
PARTS = ("qvalue", "scale", "zero_point", "tensor_scale")
_SHORT_IMPLS = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}  # what dtypes of keys call otherwise

_MSG_KEYS = (
    "{path}: a dict with the keys {keys} cannot be saved. Keys of one dict are all strings or all "
    "integers, in files as in JAX; rename them."
)
_MSG_DTYPE = "{path}: {dtype} arrays cannot be saved. Convert it, or leave it out of the tree."
_MSG_DATA = (
    "{path}: {found} cannot be saved. Make it an array or text, or leave it out of the tree."
)
_MSG_BOX = (
    "{path}: a box of class {kind} cannot be saved; nn.Partitioned and nn.LogicallyPartitioned "
    "can. Take the values out: flax.core.meta.unbox(params)."
)
_MSG_DEEP = "{path}: the tree is nested more than {most} deep; flatten it before saving."
_MSG_QTYPE = "{path}: this QArray has no qtype, so its codes mean nothing. Make it with one."
_MSG_TRACED = "{path} is a traced value: save outside jit, grad and vmap."
_MSG_TWICE = (
    "Two parameters have the path {path!r}: a key with a '/' in it ({{'a/b': ...}}) meets nested "
    "keys ({{'a': {{'b': ...}}}}). Parameters are found by their path; rename one of them."
)
_MSG_TEXT = "{path!r} cannot be saved: the name is no Unicode text (it has half a character)."
_MSG_REMOTE = (
    "{path} lies partly on devices of other processes. Gather it first: "
    "jax.experimental.multihost_utils.process_allgather(params, tiled=True)."
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: its name there, the leaf it belongs to, and how it lies."""

    name: str
    path: str
    encoding: Encoding

    @property
    def entry(self) -> tuple[str, str, tuple[int, ...]]:
        """Name, dtype and shape for a header of safetensors."""
        return self.name, self.encoding.stored_dtype, self.encoding.stored_shape


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a saved tree, and the tensors that hold it, in the order of `leaf_arrays`."""

    path: str
    value: Any
    tensors: tuple[Tensor, ...]


class TreeEncoder:
    """Turns a tree, abstract or concrete, into its node; collects leaves and how they were made.

    >>> import jax.numpy as jnp
    >>> encoder = TreeEncoder()
    >>> encoder.node({'b': jnp.ones(3), 'a': (None, 2)})
    {'dict': {'a': {'tuple': [None, {'number': 2}]}, 'b': {'array': 'b'}}}
    >>> [leaf.path for leaf in encoder.leaves]
    ['a/1', 'b']
    """

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.hows: dict[HowToQuantize, int] = {}  # with their numbers, in order
        self._names = {"__metadata__"}  # safetensors has a meaning of its own for it
        self._paths: set[str] = set()
        self._tensors: list[Tensor] = []

    def node(self, tree: Any, path: str = "", depth: int = 0) -> Any:
        """The node of a tree whose root has this path."""
        if depth > MOST_DEPTH:
            raise ValueError(_MSG_DEEP.format(path=path[:60] + "...", most=MOST_DEPTH))
        flax = flax_trees()
        if flax is not None and flax.is_nnx(tree):
            refuse_parts(tree, "fewbit.save(path, model), or the plan too, save(path, state, plan)")
            tree = flax.pure(tree)
        if tree is None:
            return None

        def inside(items: Mapping[Any, Any]) -> dict[str, Any]:
            below = f"{path}/" if path else ""
            return {str(k): self.node(items[k], f"{below}{k}", depth + 1) for k in sorted(items)}

        if isinstance(tree, QuantizedParams):
            parts = {"params": tree.params, "act_scales": dict(tree.act_scales)}
            return {"quantized_params": inside(parts)}
        frozen = flax is not None and flax.is_frozen_dict(tree)
        if frozen or type(tree) is dict:
            kinds = {type(key) for key in tree}
            if len(kinds) > 1 or not kinds <= {str, int}:
                shown = ", ".join(repr(key)[:40] for key in list(tree)[:4])
                raise ValueError(_MSG_KEYS.format(path=path or "the root", keys=shown))
            kind = "int_dict" if int in kinds else "dict"
            return {"frozen_dict" if frozen else kind: inside(tree)}
        if type(tree) in (list, tuple):
            return {type(tree).__name__: list(inside(dict(enumerate(tree))).values())}
        # The children of a pytree class by name: what JAX says of it, one level down.
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        if is_leaf(tree) or (len(pairs) == 1 and pairs[0][1] is tree):
            return self._leaf(tree, path)
        kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
        children = {key_name(keys): child for keys, child in pairs}
        return {"custom": {"class": kind, "children": inside(children)}}

    def _leaf(self, value: Any, path: str) -> Any:
        if path in self._paths:
            raise ValueError(_MSG_TWICE.format(path=path))
        self._paths.add(path)
        self._tensors = []
        node = self._value(value, path or "value", path)
        if self._tensors or set(node) & {"number", "text", "opaque"}:
            self.leaves.append(Leaf(path, value, tuple(self._tensors)))
        return node

    def _value(self, value: Any, name: str, path: str, qtype: Any = None) -> Any:
        if isinstance(value, WithAux):
            if value.how not in self.hows:
                how_to_dict(value.how)  # refuses what cannot be saved
                self.hows[value.how] = len(self.hows)
            inner = self._value(value.array, name, path)
            return {"with_aux": {"how": self.hows[value.how], "array": inner}}
        if isinstance(value, QArray):
            return {"qarray": self._qarray(value, name, path)}
        if is_box(value):
            flax = flax_trees()
            found = None if flax is None else flax.box_names(value)
            if found is None:
                raise ValueError(_MSG_BOX.format(path=path, kind=type(value).__name__))
            inner = self._value(unboxed(value), name, path, qtype)
            return {"box": {"class": found[0], "names": found[1], "value": inner}}
        return self._plain(value, name, path, qtype)

    def _qarray(self, q: QArray, name: str, path: str) -> dict[str, Any]:
        if q.qtype is None:
            raise ValueError(_MSG_QTYPE.format(path=path))
        q = _abstract_plain(q)
        tiles = [list(pair) for pair in q.tiles]
        fields = {"qtype": qtype_name(q.qtype), "dtype": q._static[1], "tiles": tiles}
        for part in PARTS:
            value = getattr(q, part)
            if value is not None:
                qtype = q.qtype if part == "qvalue" else None
                fields[part] = self._value(value, f"{name}.{part}", path, qtype)
        return fields

    def _plain(self, value: Any, name: str, path: str, qtype: Any) -> Any:
        if isinstance(value, str):
            return {"text": value}
        if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
            # JSON has no infinities; -1e400 reads back as one.
            odd = isinstance(value, float) and not math.isfinite(value)
            return {"number": repr(value) if odd else value}
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if isinstance(value, bytes | bytearray | set | frozenset | complex):
            raise ValueError(_MSG_DATA.format(path=path, found=describe(value)))
        if shape is None or dtype is None:
            return {"opaque": describe(value)}
        if isinstance(value, jax.core.Tracer):
            raise ValueError(_MSG_TRACED.format(path=path))
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise ValueError(_MSG_REMOTE.format(path=path))
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, value)
            tensor = self._tensor(data.shape, data.dtype, name, path)
            impl = str(dtype).removeprefix("key<").removesuffix(">")
            return {"key": {"data": tensor, "impl": _SHORT_IMPLS.get(impl, impl)}}
        if np.dtype(dtype).name not in KNOWN_DTYPES:
            raise ValueError(_MSG_DTYPE.format(path=path, dtype=dtype))
        return {"array": self._tensor(shape, dtype, name, path, qtype)}

    def _tensor(self, shape: Any, dtype: Any, name: str, path: str, qtype: Any = None) -> str:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(_MSG_TEXT.format(path=path)) from None
        wanted, number = name, 1
        while name in self._names:  # 'w.scale' beside the scale of 'w'
            number += 1
            name = f"{wanted}~{number}"
        self._names.add(name)
        self._tensors.append(Tensor(name, path, encoding_of(shape, dtype, qtype)))
        return name


def leaf_arrays(value: Any) -> Iterator[np.ndarray]:
    """The arrays of a leaf as its tensors hold them, codes one by one; in the tensors' order."""
    if isinstance(value, WithAux):
        yield from leaf_arrays(value.array)
    elif isinstance(value, QArray):
        q = value if value.layout == "plain" else unpack(value)
        for part in PARTS:
            yield from leaf_arrays(getattr(q, part))
    elif is_box(value):
        yield from leaf_arrays(unboxed(value))
    elif hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        yield to_numpy(jax.random.key_data(value))
    elif hasattr(value, "shape"):
        yield to_numpy(value)


def flax_trees() -> Any:
    """What knows Flax's containers, if there can be any of them."""
    return models.flax_trees if "flax" in sys.modules else None


def _abstract_plain(q: QArray) -> QArray:
    """The plain form: what `leaf_arrays` will give, without computing it."""
    if q.layout == "plain":
        return q
    if isinstance(q, PanelArray):
        return jax.eval_shape(PanelArray.plain, q)
    return q.replace(qvalue=jax.eval_shape(lambda q: q.qvalue, q), layout="plain", last_dim=None)


def abstract_leaf(leaf: LeafPlan) -> Any:
    """A parameter of a plan as it will be stored, as shapes and types."""
    value = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if leaf.how is None:
        return value
    return WithAux(abstract_quantized(value, leaf.how), leaf.how.replace(rule=leaf.rule))


def bare(value: Any) -> Any:
    """A leaf without its box and what lies beside its codes: an array, or a QArray of arrays."""
    value = unboxed(value) if is_box(value) else value
    value = value.array if isinstance(value, WithAux) else value
    return unbox_parts(value) if isinstance(value, QArray) and is_box(value.data) else value


def put_at(tree: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    """Put a value into nested dicts, which are made where there are none.

    >>> tree = {}
    >>> put_at(tree, ['up', 'kernel'], 1)
    >>> tree
    {'up': {'kernel': 1}}
    """
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def map_leaves(tree: Any, visit: Callable[[str, Any], Any]) -> Any:
    """A tree with each leaf (a QArray, a box, an array) replaced by `visit(path, leaf)`."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: visit(key_name(keys), leaf), tree, is_leaf=is_leaf
    )
