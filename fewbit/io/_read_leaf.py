"""One leaf out of a checkpoint: bytes, checked, unpacked, placed on devices, packed for kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from fewbit.boxes import unbox_parts
from fewbit.io._encoding import KNOWN_DTYPES, decode, decode_part
from fewbit.io._manifest import Manifest, Stored
from fewbit.io._tree import PARTS, flax_trees
from fewbit.io._tree_decoding import import_flax
from fewbit.io.errors import CheckpointError, cut
from fewbit.io.inspecting import check_header
from fewbit.io.safetensors_file import SafetensorsFile, new_checksum
from fewbit.layouts import for_kernels
from fewbit.numerics import FORMATS
from fewbit.qarray import QArray, WithAux, validate_qarray

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
        self,
        path: str,
        manifest: Manifest,
        files: list[SafetensorsFile],
        placement: Placement,
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
        file, e = self._files[stored.shard], stored.tensor.encoding
        name = stored.tensor.name
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
        total = new_checksum()
        total.update(data.reshape(-1).view(np.uint8).data)
        self._compare(file, stored, total.hexdigest())
        array = decode(data, e)
        del data
        if not held:
            return array
        return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)

    def _compare(self, file: SafetensorsFile, stored: Stored, found: str) -> None:
        if found != stored.checksum:
            raise CheckpointError(
                file.path,
                _MSG_CHECKSUM,
                tensor=stored.tensor.name,
                expected=stored.checksum,
                found=found,
            )


class _LeafBuilder:
    def __init__(self, reader: LeafReader, path: str, sharding: Sharding | None):
        self.reader, self.path, self.sharding = reader, path, sharding

    def value(self, node: Any) -> Any:
        if not isinstance(node, dict) or len(node) != 1:
            raise self._bad("a node of one kind", node)
        ((kind, fields),) = node.items()
        if kind not in ("array", "key", "number", "text", "with_aux", "qarray", "box"):
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
        full = self.reader.stored(_tensor_of(fields["qvalue"])).tensor.encoding.shape
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
        try:
            import_flax()
        except ImportError:
            raise CheckpointError(self.path, "has boxes of Flax: pip install flax") from None
        inner = self.value(fields["value"]) if full is None else self._part(fields["value"], full)
        return flax_trees().make_box(kind, names, inner)

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


def _tensor_of(node: Any) -> Any:
    while isinstance(node, dict) and isinstance(node.get("box"), dict):
        node = node["box"].get("value")
    return node.get("array") if isinstance(node, dict) else None


def _is_tile(pair: Any) -> bool:
    whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
    return whole and pair[0] < 0 < pair[1]


def _is_axis_name(name: Any) -> bool:
    if isinstance(name, list):
        return all(isinstance(n, str) for n in name)
    return name is None or isinstance(name, str)
