"""Look at a checkpoint without reading its data (`inspect`), or read all of it (`verify`)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from fewbit._util import human_bytes, human_count, terminal_width, wrap
from fewbit._util import table as text_table
from fewbit.io._errors import CheckpointError
from fewbit.io._safetensors import SafetensorsFile
from fewbit.io.checkpoint._folder import read_manifest
from fewbit.io.checkpoint._manifest import Manifest, Stored
from fewbit.planning import Plan


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """One parameter of a checkpoint; `qtype` is None for one that is not quantized."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    qtype: str | None
    bytes: int
    tensors: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Bits in the file for each number, scales and zero points included."""
        size = math.prod(self.shape)
        return 8 * self.bytes / size if size else 0.0


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds. Prints as a table; `to_json()` for machines."""

    path: str
    version: int
    libraries: Mapping[str, str]
    plan: Plan | None
    leaves: tuple[LeafInfo, ...]
    shards: tuple[tuple[str, int], ...]

    def leaf(self, path: str) -> LeafInfo:
        """The parameter at `path`."""
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"{self.path} has no parameter {path!r}; info.leaves lists all of them.")

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def bits_per_weight(self) -> float:
        """Bits of a quantized weight with its share of scales and zero points; 0 without any."""
        quantized = [leaf for leaf in self.leaves if leaf.qtype is not None]
        weights = sum(math.prod(leaf.shape) for leaf in quantized)
        return 8 * sum(leaf.bytes for leaf in quantized) / weights if weights else 0.0

    @property
    def summary(self) -> str:
        """The totals as one line."""
        count = sum(leaf.qtype is not None for leaf in self.leaves)
        numbers = sum(math.prod(leaf.shape) for leaf in self.leaves)
        text = (
            f"{len(self.leaves)} parameters, {count} of them quantized; "
            f"{human_count(numbers)} numbers in {human_bytes(self.bytes)}"
        )
        if count:
            text += f", {self.bits_per_weight:.2f} bits per quantized weight"
        shards = f"{len(self.shards)} shard{'s' * (len(self.shards) != 1)}"
        made = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        return f"{text}; {shards}; written by {made}."

    def to_json(self) -> str:
        """The same as a JSON document."""
        fields = {
            "path": self.path,
            "version": self.version,
            "libraries": dict(self.libraries),
            "shards": [{"file": name, "bytes": size} for name, size in self.shards],
            "leaves": [
                {**dataclasses.asdict(leaf), "bits_per_weight": leaf.bits_per_weight}
                for leaf in self.leaves
            ],
            "totals": {"bytes": self.bytes, "bits_per_weight": self.bits_per_weight},
            "plan": None if self.plan is None else str(self.plan.totals),
        }
        return json.dumps(fields, indent=1)

    def table(self, *, width: int | None = None) -> str:
        """The checkpoint as text of the terminal's width."""
        width = terminal_width() if width is None else width
        rows = [
            (
                leaf.path,
                "x".join(map(str, leaf.shape)) or "one number",
                leaf.qtype or leaf.dtype,
                f"{leaf.bits_per_weight:.2f}",
                human_bytes(leaf.bytes),
            )
            for leaf in self.leaves
        ]
        header = ("parameter", "shape", "type", "bits each", "bytes")
        lines = [text_table(rows, header, "mllrr", width), ""] if rows else []
        lines += wrap(self.summary, width)
        plan = "no plan" if self.plan is None else f"plan: {self.plan.totals}"
        return "\n".join([*lines, *wrap(plan, width)])

    def __str__(self) -> str:
        return self.table()


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor whose bytes are not those that were saved."""

    tensor: str
    shard: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.tensor} in {self.shard}: expected {self.expected}, found {self.found}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found: how much was read, and every tensor that differs."""

    path: str
    tensors: int
    bytes: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        read = f"{self.path}: {self.tensors} tensors, {human_bytes(self.bytes)}"
        if self.ok:
            return f"{read}, all as they were saved"
        head = f"{read}, {len(self.differences)} not as saved:"
        return "\n".join([head, *(f"  {one}" for one in self.differences)])


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What is in a checkpoint: parameters, types, bits, bytes and the plan; no data is read.

    >>> import fewbit, tempfile, jax.numpy as jnp
    >>> params = {'w': fewbit.quantize(jnp.ones((64, 32)), 'int4', channelwise_axes=(1,))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = fewbit.save(f'{folder}/model', params)
    ...     inspect(f'{folder}/model') == info
    True
    >>> info.leaf('w').qtype, info.leaf('w').bytes, info.bits_per_weight
    ('int4', 1152, 4.5)
    """
    path = os.fspath(path)
    return info_of(path, read_manifest(path))


def info_of(path: str, manifest: Manifest) -> CheckpointInfo:
    """The same of a manifest that was read already."""
    found: dict[str, list[Stored]] = {}
    for stored in manifest.tensors.values():
        found.setdefault(stored.tensor.path, []).append(stored)
    qtypes = dict(_qtypes(manifest.tree))
    leaves = []
    for leaf_path, parts in found.items():
        first = parts[0].tensor
        qtype, dtype = qtypes.get(first.name, (None, first.encoding.dtype))
        if dtype is None:  # the scale's, if that is an ordinary float
            scale = parts[min(1, len(parts) - 1)].tensor.encoding
            dtype = scale.dtype if scale.bits >= 16 else "float32"
        nbytes = sum(part.tensor.encoding.nbytes for part in parts)
        names = tuple(part.tensor.name for part in parts)
        leaves.append(LeafInfo(leaf_path, first.encoding.shape, dtype, qtype, nbytes, names))
    return CheckpointInfo(
        path=path,
        version=manifest.version,
        libraries=manifest.libraries,
        plan=manifest.plan,
        leaves=tuple(leaves),
        shards=manifest.shards,
    )


def _qtypes(node: Any) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """For each tensor of codes, what they are codes of."""
    if isinstance(node, list):
        for item in node:
            yield from _qtypes(item)
    if not isinstance(node, dict):
        return
    q = node.get("qarray")
    if isinstance(q, dict) and "qvalue" in q:
        name = tensor_of(q["qvalue"])
        if isinstance(name, str):
            yield name, (str(q.get("qtype")), q.get("dtype"))
    for value in node.values():
        yield from _qtypes(value)


def tensor_of(node: Any) -> Any:
    """The tensor that a node of an array names, through its boxes."""
    while isinstance(node, dict) and isinstance(node.get("box"), dict):
        node = node["box"].get("value")
    return node.get("array") if isinstance(node, dict) else None


def verify(path: str | os.PathLike[str]) -> Verification:
    """Read every byte of a checkpoint and compare it with the checksums it was saved with.

    A damaged manifest raises; damaged shards are reported tensor by tensor.

    >>> import fewbit, pathlib, tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = fewbit.save(f'{folder}/model', {'w': jnp.ones(4), 'b': jnp.ones(2)})
    ...     shard = pathlib.Path(folder, 'model', info.shards[0][0])
    ...     good = verify(f'{folder}/model').ok
    ...     _ = shard.write_bytes(shard.read_bytes()[:-1] + b'!')
    ...     good, [one.tensor for one in verify(f'{folder}/model').differences]
    (True, ['w'])
    """
    path = os.fspath(path)
    manifest = read_manifest(path)
    tensors = manifest.tensors.values()
    differences: list[Difference] = []
    for number, (name, _) in enumerate(manifest.shards):
        wanted = [one for one in tensors if one.shard == number]
        differences += _shard_differences(path, name, wanted)
    nbytes = sum(one.tensor.encoding.nbytes for one in tensors)
    return Verification(path, len(tensors), nbytes, tuple(differences))


def _shard_differences(path: str, name: str, wanted: list[Stored]) -> Iterator[Difference]:
    try:
        file = SafetensorsFile(os.path.join(path, name))
    except CheckpointError as error:
        for one in wanted:
            yield Difference(one.tensor.name, name, one.checksum, f"no whole shard ({error})")
        return
    with file:
        for one in wanted:
            try:
                check_header(file, one)
                found = file.checksum(one.tensor.name)
            except CheckpointError as error:
                found = str(error)
            if found != one.checksum:
                yield Difference(one.tensor.name, name, one.checksum, found)


def check_header(file: SafetensorsFile, stored: Stored) -> None:
    """Raise if a shard's header says something else of a tensor than the manifest."""
    info, e = file.info(stored.tensor.name), stored.tensor.encoding
    if (info.dtype, info.shape) != (e.stored_dtype, e.stored_shape):
        wanted, found = f"{e.stored_dtype} {e.stored_shape}", f"{info.dtype} {info.shape}"
        what = "is not what the manifest says"
        raise CheckpointError(file.path, what, tensor=info.name, expected=wanted, found=found)
