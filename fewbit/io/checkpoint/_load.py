"""Load a checkpoint: lazily, leaf by leaf, each checked, into any tree, sharding and layout."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from fewbit import models
from fewbit._util import describe, nearest
from fewbit.io._encoding import KNOWN_DTYPES, decode, decode_part
from fewbit.io._errors import CheckpointError, cut, first_few
from fewbit.io._safetensors import SafetensorsFile, new_checksum, raw_bytes
from fewbit.io.checkpoint._folder import manifest_bytes
from fewbit.io.checkpoint._inspect import CheckpointInfo, check_header, info_of, tensor_of
from fewbit.io.checkpoint._manifest import FILE, Manifest, Stored, from_bytes
from fewbit.io.checkpoint._tree import MOST_DEPTH, PARTS, bare, flax_trees, map_leaves
from fewbit.kernels import for_kernels
from fewbit.numerics import FORMATS, qtype_name
from fewbit.planning import Plan, QuantizedParams
from fewbit.qarray import QArray, WithAux, unbox_parts, validate_qarray

# --- Nodes of a manifest back to a tree: all are checked before anything is built -----------------

_MSG_CUSTOM = (
    "holds a {kind} at {path!r}, a class of its own program. Give a tree like the one that was "
    "saved: fewbit.load(path, into=template)"
)
_MSG_OPAQUE = (
    "holds {what} at {path!r}, which is no data and was not saved. Give a tree like the one that "
    "was saved: fewbit.load(path, into=template)"
)
_MSG_FROZEN = "holds a FrozenDict of Flax, which is not installed here: pip install flax"
_MSG_BOXES = "has boxes of Flax: pip install flax"
CONTAINERS: dict[str, type] = {
    **dict.fromkeys(("dict", "int_dict", "frozen_dict"), dict),
    **dict.fromkeys(("list", "tuple"), list),
}
LEAVES = ("array", "key", "number", "text", "opaque", "qarray", "with_aux", "box")


class TreeDecoder:
    """The tree of a manifest: `leaves` are its leaf nodes by path, `build` makes the tree."""

    def __init__(self, path: str, manifest: Manifest):
        self.path = path
        self._tree = manifest.tree
        self.leaves: dict[str, Any] = {}
        self._walk(manifest.tree, "", self._collect, 0, checking=True)

    def build(self, read: Callable[[str], Any]) -> Any:
        """The tree, each leaf by `read(path)`."""

        def leaf(path: str, node: Any) -> Any:
            if "opaque" in node:
                what = str(node["opaque"])[:100]
                raise CheckpointError(self.path, _MSG_OPAQUE.format(what=what, path=path[:200]))
            return read(path)

        return self._walk(self._tree, "", leaf, 0, checking=False)

    def _collect(self, path: str, node: Any) -> None:
        if path in self.leaves:  # 'a/b' beside {'a': {'b'}}
            raise self._bad(path, "one leaf of this path", "two")
        self.leaves[path] = node

    def _walk(
        self, node: Any, path: str, leaf: Callable[[str, Any], Any], depth: int, checking: bool
    ) -> Any:
        if depth > MOST_DEPTH + 1:
            raise self._bad(path[:60], f"at most {MOST_DEPTH} levels", "more")
        if node is None:
            return None
        if not isinstance(node, dict) or len(node) != 1:
            raise self._bad(path, "a node of one kind", node)
        ((kind, value),) = node.items()

        def inside(child: Any, key: Any) -> Any:
            where = f"{path}/{key}" if path else str(key)
            return self._walk(child, where, leaf, depth + 1, checking)

        if kind in LEAVES:
            return leaf(path, node)
        if kind in CONTAINERS:
            if not isinstance(value, CONTAINERS[kind]):
                raise self._bad(path, f"a {CONTAINERS[kind].__name__}", value)
            if isinstance(value, list):
                listed = [inside(child, i) for i, child in enumerate(value)]
                return listed if kind == "list" else tuple(listed)
            items = cast(dict[str, Any], value).items()
            made = {self._key(kind, key, path): inside(child, key) for key, child in items}
            if kind != "frozen_dict" or checking:
                return made
            return _flax_for(self.path, _MSG_FROZEN).frozen_dict(made)
        if kind == "quantized_params":
            if not isinstance(value, dict) or set(value) != {"params", "act_scales"}:
                raise self._bad(path, "params and act_scales", value)
            return QuantizedParams(**{key: inside(child, key) for key, child in value.items()})
        if kind == "custom":
            ok = isinstance(value, dict) and isinstance(value.get("children"), dict)
            if not ok or set(value) != {"class", "children"}:
                raise self._bad(path, "class and children", value)
            if not checking:
                name = cut(str(value["class"])).strip("'")
                raise CheckpointError(self.path, _MSG_CUSTOM.format(kind=name, path=path[:200]))
            for key, child in value["children"].items():
                inside(child, key)
            return None
        raise self._bad(path, "a known kind of node", kind)

    def _key(self, kind: str, key: str, path: str) -> Any:
        if kind != "int_dict":
            return key
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            raise self._bad(path, "integer keys", key)
        return int(key)

    def _bad(self, path: str, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(
            self.path, f"has a bad tree at {cut(path)}", expected=expected, found=cut(found)
        )


def _flax_for(path: str, what: str) -> Any:
    """What knows Flax's containers, loaded for a file that has some."""
    try:
        return models.flax_trees
    except ImportError:
        raise CheckpointError(path, what) from None


# --- One leaf: its bytes checked, unpacked, placed on devices, packed for kernels -----------------

_MSG_CHECKSUM = "was changed after it was saved (checksum)"
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where loaded arrays go, and in which layout."""

    sharding: Sharding | Callable[[str], Sharding | None] | None
    layout: str

    def of(self, path: str) -> Sharding | None:
        if self.sharding is None or isinstance(self.sharding, Sharding):
            return self.sharding
        return self.sharding(path)


class LeafReader:
    """Builds leaves from their nodes; the only place that reads data."""

    def __init__(
        self, path: str, manifest: Manifest, files: list[SafetensorsFile], placement: Placement
    ):
        self.path, self.placement = path, placement
        self._manifest, self._files = manifest, files

    def read(self, path: str, node: Any) -> Any:
        """The leaf of a node."""
        return _LeafBuilder(self, path, self.placement.of(path)).value(node)

    def stored(self, name: Any) -> Stored:
        """The manifest's entry of a tensor that the tree names."""
        if not isinstance(name, str) or name not in self._manifest.tensors:
            raise CheckpointError(
                self.path, "has a bad tree", expected="a tensor of the manifest", found=cut(name)
            )
        return self._manifest.tensors[name]

    def how(self, number: Any) -> Any:
        hows = self._manifest.hows
        if type(number) is not int or not 0 <= number < len(hows):
            expected = f"a number below {len(hows)}"
            raise CheckpointError(self.path, "has a bad how", expected=expected, found=cut(number))
        return hows[number]

    def array(self, stored: Stored, sharding: Sharding | None) -> Any:
        """A tensor as an array of JAX; of NumPy if JAX would change its type."""
        file, name, e = self._files[stored.shard], stored.tensor.name, stored.tensor.encoding
        check_header(file, stored)
        dtype = KNOWN_DTYPES[e.dtype]
        held = jax.dtypes.canonicalize_dtype(dtype) == dtype
        if held and sharding is not None and len(sharding.device_set) > 1:
            # A device's part is read alone, so the whole is hashed first, piece by piece.
            self._compare(file, stored, file.checksum(name))
            mapped = file.read(name)
            return jax.make_array_from_callback(
                e.shape, sharding, lambda index: decode_part(mapped, e, index or ())
            )
        data = file.read(name, copy=True)
        self._compare(file, stored, new_checksum(raw_bytes(data)).hexdigest())
        array = decode(data, e)
        del data
        if not held:
            return array
        return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)

    def _compare(self, file: SafetensorsFile, stored: Stored, found: str) -> None:
        if found != stored.checksum:
            name, wanted = stored.tensor.name, stored.checksum
            raise CheckpointError(
                file.path, _MSG_CHECKSUM, tensor=name, expected=wanted, found=found
            )


class _LeafBuilder:
    def __init__(self, reader: LeafReader, path: str, sharding: Sharding | None):
        self.reader, self.path, self.sharding = reader, path, sharding

    def value(self, node: Any) -> Any:
        if not isinstance(node, dict) or len(node) != 1:
            raise self._bad("a node of one kind", node)
        ((kind, fields),) = node.items()
        if kind not in LEAVES or kind == "opaque":
            raise self._bad("a leaf", kind)
        return getattr(self, f"_{kind}")(fields)

    def _array(self, name: Any, full: tuple[int, ...] | None = None) -> Any:
        stored = self.reader.stored(name)
        shape = stored.tensor.encoding.shape
        return self.reader.array(stored, part_sharding(self.sharding, shape, full or shape))

    def _key(self, fields: Any) -> Any:
        if not isinstance(fields, dict) or set(fields) != {"data", "impl"}:
            raise self._bad("data and impl", fields)
        if fields["impl"] not in _KEY_IMPLS:
            raise self._bad(f"an impl of {', '.join(_KEY_IMPLS)}", fields["impl"])
        stored = self.reader.stored(fields["data"])
        sharding = self.sharding if isinstance(self.sharding, SingleDeviceSharding) else None
        data = self.reader.array(stored, sharding)
        try:
            return jax.random.wrap_key_data(data, impl=fields["impl"])
        except (TypeError, ValueError) as error:
            raise self._bad("data of a key", str(error)) from None

    def _number(self, value: Any) -> Any:
        if value in ("inf", "-inf", "nan"):
            return float(value)
        if not isinstance(value, bool | int | float):
            raise self._bad("a number", value)
        return value

    def _text(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise self._bad("a text", value)
        return value

    def _with_aux(self, fields: Any) -> Any:
        if not isinstance(fields, dict) or set(fields) != {"how", "array"}:
            raise self._bad("how and array", fields)
        how, array = self.reader.how(fields["how"]), self.value(fields["array"])
        if isinstance(array, bool | int | float | str | None):
            raise self._bad("an array", fields["array"])
        native = self.reader.placement.layout == "native"
        if native and isinstance(array, QArray) and isinstance(array.data, jax.Array):
            array = for_kernels(array, how)
        return WithAux(array, how)

    def _qarray(self, fields: Any) -> Any:
        static = ("qtype", "dtype", "tiles")
        if not isinstance(fields, dict) or not {*static, "qvalue", "scale"} <= set(fields):
            raise self._bad("qtype, dtype, tiles, qvalue and scale", fields)
        if set(fields) - {*static, *PARTS}:
            raise self._bad("the parts of a QArray", sorted(fields))
        qtype, dtype, tiles = (fields[name] for name in static)
        if not isinstance(qtype, str) or qtype not in FORMATS:
            raise self._bad(f"a qtype of {', '.join(FORMATS)}", qtype)
        if dtype not in (None, "float64", "float32", "float16", "bfloat16"):
            raise self._bad("a float dtype", dtype)
        if not isinstance(tiles, list) or not all(map(_is_tile, tiles)):
            raise self._bad("tiles as pairs of axis and size", tiles)
        full = self.reader.stored(tensor_of(fields["qvalue"])).tensor.encoding.shape
        parts = {n: self._part(fields[n], full) for n in PARTS if n in fields}
        q = QArray(**parts, qtype=qtype, dtype=dtype, tiles=[tuple(pair) for pair in tiles])
        self._check(q, full)
        return q

    def _part(self, node: Any, full: tuple[int, ...]) -> Any:
        if isinstance(node, dict) and set(node) == {"array"}:
            return self._array(node["array"], full)
        if isinstance(node, dict) and set(node) == {"box"}:
            return self._box(node["box"], full)
        raise self._bad("an array", node)

    def _box(self, fields: Any, full: tuple[int, ...] | None = None) -> Any:
        if not isinstance(fields, dict) or set(fields) != {"class", "names", "value"}:
            raise self._bad("class, names and value", fields)
        kind, names = fields["class"], fields["names"]
        if kind not in ("Partitioned", "LogicallyPartitioned"):
            raise self._bad("Partitioned or LogicallyPartitioned", kind)
        if not isinstance(names, list) or not all(map(_is_axis_name, names)):
            raise self._bad("axis names", names)
        flax = _flax_for(self.path, _MSG_BOXES)
        inner = self.value(fields["value"]) if full is None else self._part(fields["value"], full)
        return flax.make_box(kind, names, inner)

    def _check(self, q: QArray, full: tuple[int, ...]) -> None:
        try:
            bare = unbox_parts(q)
            validate_qarray(bare)
            tensor_scale = bare.tensor_scale
            if tensor_scale is not None:
                number = math.prod(tensor_scale.shape) == 1 and len(full) == tensor_scale.ndim
                if not number or not jnp.issubdtype(tensor_scale.dtype, jnp.floating):
                    raise ValueError(f"tensor_scale {tensor_scale.shape} is not one number.")
            _ = bare.tile_shape
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise self._bad("parts that belong together", str(error)) from None

    def _bad(self, expected: str, found: Any) -> CheckpointError:
        what = f"has a bad entry for parameter {cut(self.path)}"
        return CheckpointError(self.reader.path, what, expected=expected, found=cut(found, 200))


def part_sharding(
    sharding: Sharding | None, shape: tuple[int, ...], full: tuple[int, ...]
) -> Sharding | None:
    """The sharding of a part: the weight's own, but not on axes where the part is narrower.

    >>> mesh = jax.make_mesh((1,), ('m',), axis_types=(jax.sharding.AxisType.Auto,))
    >>> part_sharding(NamedSharding(mesh, PartitionSpec(None, 'm')), (1, 8), (4, 8)).spec
    P(None, 'm')
    >>> part_sharding(NamedSharding(mesh, PartitionSpec('m')), (1, 8), (4, 8)).spec
    P(None, None)
    """
    if not isinstance(sharding, NamedSharding) or shape == full:
        return sharding
    spec = (*sharding.spec, *[None] * len(shape))[: len(shape)]
    kept = []
    for entry, size in zip(spec, shape, strict=True):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        ways = math.prod(sharding.mesh.shape[name] for name in names)
        kept.append(entry if size != 1 and size % ways == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _is_tile(pair: Any) -> bool:
    whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
    return whole and pair[0] < 0 < pair[1]


def _is_axis_name(name: Any) -> bool:
    if isinstance(name, list):
        return all(isinstance(n, str) for n in name)
    return name is None or isinstance(name, str)


# --- All leaves, as the tree that was saved or into another ---------------------------------------

_MSG_LAYOUT = (
    "layout={found!r} is not known: 'native' (what this machine's kernels read) or 'plain'."
)
_MSG_SHARDING = (
    "sharding takes a jax.sharding.Sharding, or a function from a parameter's path to one (or to "
    "None), got {found}."
)
_MSG_NO_LEAF = "has no parameter {path!r}.{near}"
_MSG_MISSING = (
    "lacks {count} of the template's parameters: {paths}.{near} Make the template as the saved "
    "model was made; strict=False keeps the template's own"
)
_MSG_EXTRA = (
    "holds {count} parameters that the template does not have: {paths}.{near} Make the template as "
    "the saved model was made; strict=False leaves them out"
)
_MSG_OTHER = "does not fit the template"
_NEAREST = " The nearest is {}."


class Loaded:
    """A checkpoint that was opened: its plan at once, its parameters when they are asked for.

    `params` reads all of them, the first time; `leaf(path)` and `leaves()` read one at a time. The
    files stay open until this object goes away, so that a save to the same path changes nothing
    here.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        files: list[SafetensorsFile],
        placement: Placement,
        into: Any,
        strict: bool,
    ):
        self.path = path
        self.plan: Plan | None = manifest.plan
        self.info: CheckpointInfo = info_of(path, manifest)
        self._decoder = TreeDecoder(path, manifest)
        self._reader = LeafReader(path, manifest, files, placement)
        self._into, self._strict = into, strict

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters, in the order of the file."""
        return tuple(self._decoder.leaves)

    def leaf(self, path: str) -> Any:
        """One parameter, read now."""
        nodes = self._decoder.leaves
        if path not in nodes:
            near = nearest(path, nodes, _NEAREST, cutoff=0.6)
            raise CheckpointError(self.path, _MSG_NO_LEAF.format(path=path, near=near).rstrip("."))
        return self._reader.read(path, nodes[path])

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(path, parameter) one after another; none is kept here."""
        for path in self._decoder.leaves:
            yield path, self.leaf(path)

    @functools.cached_property
    def params(self) -> Any:
        """All parameters, as the tree that was saved, or in the template's."""
        if self._into is None:
            return self._decoder.build(self.leaf)
        flax = flax_trees()
        if flax is not None and flax.is_nnx(self._into):
            return flax.filled(self._into, self._fill)
        return self._fill(self._into)

    def _fill(self, template: Any) -> Any:
        nodes, wanted = self._decoder.leaves, dict[str, Any]()
        map_leaves(template, lambda path, leaf: wanted.setdefault(path, leaf))
        opaque = {path for path, node in nodes.items() if node is not None and "opaque" in node}
        missing = [p for p, leaf in wanted.items() if p not in nodes and hasattr(leaf, "shape")]
        extra = [path for path in nodes if path not in wanted and path not in opaque]
        self._complain(_MSG_MISSING, missing, extra)
        self._complain(_MSG_EXTRA, extra, missing)

        def fill(path: str, old: Any) -> Any:
            if path not in nodes or path in opaque:
                return old
            new = self.leaf(path)
            _compare(self.path, path, old, new)
            return new

        return map_leaves(template, fill)

    def _complain(self, message: str, paths: list[str], others: list[str]) -> None:
        if not paths:
            return
        near = nearest(paths[0], others, _NEAREST, cutoff=0.6)
        text = message.format(count=len(paths), paths=first_few(paths, 5), near=near)
        if self._strict:
            raise CheckpointError(self.path, text)
        warnings.warn(f"{self.path} {text}.", stacklevel=5)

    def __repr__(self) -> str:
        plan = "no plan" if self.plan is None else f"a plan of {len(self.plan.sites)} sites"
        return f"Loaded({self.path!r}: {len(self.paths)} parameters, {plan})"


def load(
    path: str | os.PathLike[str],
    *,
    into: Any = None,
    sharding: Sharding | Callable[[str], Sharding | None] | None = None,
    layout: str = "native",
    strict: bool = True,
    lazy: bool = True,
) -> Loaded:
    """Open a checkpoint that `save` wrote; `.params` and `.plan` are what was saved.

    Parameters are read when `.params` is first used (now with `lazy=False`), one leaf at a time,
    each compared with its checksum. Those that a native kernel will read come packed for it
    (`layout='plain'`: none). `sharding` is a sharding for all, or a function of a parameter's path;
    a device is given its part alone, and a quantized weight's scales follow its codes.

    `into` is a tree, or an NNX model, like the one that was saved; its leaves may be abstract. The
    result is that tree with the checkpoint's leaves, which classes of your own need. A parameter
    missing there or here is an error (`strict=False`: a warning).

    >>> import fewbit, tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = fewbit.save(f'{folder}/model', {'up': {'w': jnp.ones(3)}, 'steps': [1, None]})
    ...     loaded = load(f'{folder}/model')
    ...     loaded
    ...     loaded.params
    Loaded('.../model': 2 parameters, no plan)
    {'steps': [1, None], 'up': {'w': Array([1., 1., 1.], dtype=float32)}}
    """
    if layout not in ("native", "plain"):
        raise ValueError(_MSG_LAYOUT.format(found=layout))
    if sharding is not None and not isinstance(sharding, Sharding) and not callable(sharding):
        raise TypeError(_MSG_SHARDING.format(found=describe(sharding)))
    path = os.fspath(path)
    manifest, files = _open(path)
    loaded = Loaded(path, manifest, files, Placement(sharding, layout), into, strict)
    if not lazy:
        loaded.params  # noqa: B018
    return loaded


def _open(path: str) -> tuple[Manifest, list[SafetensorsFile]]:
    """The manifest and its shards. A save that ends in between is seen and followed."""
    while True:
        before = manifest_bytes(path)
        manifest = from_bytes(os.path.join(path, FILE), before)
        try:
            return manifest, [SafetensorsFile(os.path.join(path, n)) for n, _ in manifest.shards]
        except CheckpointError:
            if manifest_bytes(path) == before:
                raise


def _compare(checkpoint: str, path: str, old: Any, new: Any) -> None:
    """Raise if a leaf differs from the template's; a float template takes a quantized leaf."""
    old, new = bare(old), bare(new)
    quantized = [
        qtype_name(x.qtype) if isinstance(x, QArray) and x.qtype is not None else None
        for x in (old, new)
    ]
    shapes = [tuple(getattr(x, "shape", ())) for x in (old, new)]
    if isinstance(new, bool | int | float | str):  # a number takes the place of a number
        same = not shapes[0] and quantized[0] is None
    elif not isinstance(old, QArray) and not hasattr(old, "shape"):
        same = False
    elif quantized[0] is not None or quantized[1] is None:
        same = quantized[0] == quantized[1] and shapes[0] == shapes[1] and old.dtype == new.dtype
    else:
        same = shapes[0] == shapes[1]
    if same:
        return
    texts = [
        f"{qtype + ' codes of ' if qtype else ''}{describe(x)}"
        for x, qtype in zip((old, new), quantized, strict=True)
    ]
    raise CheckpointError(checkpoint, _MSG_OTHER, tensor=path, expected=texts[0], found=texts[1])
