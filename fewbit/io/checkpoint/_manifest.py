"""fewbit.json: what a checkpoint holds, and where. One JSON object, one line per tensor.

Its `checksum` is that of the whole file with the checksum's own digits as zeros, so that not even a
space can change unseen. docs/files.md describes the fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fewbit._util import LARGE_BYTES, versions_of
from fewbit.io._encoding import ENCODINGS, Encoding
from fewbit.io._errors import CheckpointError, cut
from fewbit.io._safetensors import new_checksum, parse_json
from fewbit.io.checkpoint._tree import Tensor
from fewbit.planning import Plan, how_from_dict, how_to_dict
from fewbit.qarray import HowToQuantize
from fewbit.rules import rule_from_dict, rule_to_dict

FILE = "fewbit.json"
FORMAT, VERSION = "fewbit-checkpoint", 1
MOST_BYTES = LARGE_BYTES
_ZEROS = "0" * 32
_HEX = re.compile("[0-9a-f]{32}")
_SHARD = re.compile(r"weights-\d{5,}-of-\d{5,}-[0-9a-f]{16}\.safetensors")

_MSG_NEWER = (
    "has format version {found}, but this fewbit reads up to {version}. Upgrade fewbit, or save "
    "the checkpoint again with the version that wrote it, for this one"
)
_MSG_CHECKSUM = "was changed after it was written (checksum)"
_MSG_NOT_OURS = "is no manifest of a fewbit checkpoint"
_DIGITS = "32 hexadecimal digits"


def is_shard(name: str) -> bool:
    """Whether a file's name is one that `shard_name` gives.

    >>> is_shard(shard_name(0, 2, 'ab' * 16)), is_shard('model.safetensors')
    (True, False)
    """
    return _SHARD.fullmatch(name) is not None


def shard_name(index: int, count: int, digest: str) -> str:
    """The name of a shard: its number and what it holds, so that new content has a new name."""
    return f"weights-{index + 1:05}-of-{count:05}-{digest[:16]}.safetensors"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: in which shard, how it lies there, and the hash of its bytes."""

    tensor: Tensor
    shard: int
    checksum: str


def _versions() -> dict[str, str]:
    """The versions that make a file, for whoever has to find out about it later."""
    return dict(versions_of(("jax", "jaxlib", "numpy", "ml_dtypes", "flax")))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What fewbit.json says."""

    tree: Any
    hows: tuple[HowToQuantize, ...]
    plan: Plan | None
    shards: tuple[tuple[str, int], ...]  # name, bytes
    tensors: Mapping[str, Stored]
    libraries: Mapping[str, str] = dataclasses.field(default_factory=_versions)
    version: int = VERSION


def to_bytes(manifest: Manifest) -> bytes:
    """The file's bytes; equal manifests give equal ones."""
    rules: list[Any] = []
    for how in manifest.hows:
        if how.rule is not None and how.rule not in rules:
            rules.append(how.rule)
    fields = {
        "libraries": dict(manifest.libraries),
        "plan": None if manifest.plan is None else json.loads(manifest.plan.to_json()),
        "rules": [rule_to_dict(rule) for rule in rules],
        "hows": [
            {**how_to_dict(how), "rule": None if how.rule is None else rules.index(how.rule)}
            for how in manifest.hows
        ],
        "tree": manifest.tree,
        "shards": [{"file": name, "bytes": size} for name, size in manifest.shards],
    }
    lines = [f' "{name}": {_json(value)},' for name, value in fields.items()]
    rows = [f"  {_json(name)}: {_json(_entry(one))}" for name, one in manifest.tensors.items()]
    lines += [' "tensors": {', ",\n".join(rows), " }"]
    head = f' "format": "{FORMAT}",\n "version": {manifest.version},\n "checksum": "{_ZEROS}",'
    text = "\n".join(["{", head, *lines, "}", ""]).encode()
    return text.replace(_ZEROS.encode(), new_checksum(text).hexdigest().encode(), 1)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def _entry(stored: Stored) -> dict[str, Any]:
    e = stored.tensor.encoding
    return {
        "path": stored.tensor.path,
        "shard": stored.shard,
        "dtype": e.dtype,
        "shape": list(e.shape),
        "bits": e.bits,
        "encoding": e.kind,
        "bytes": e.nbytes,
        "checksum": stored.checksum,
    }


def from_bytes(path: str, text: bytes) -> Manifest:
    """The manifest in a file's bytes, every field of it checked."""
    document = parse_json(path, text, "manifest")
    if document.get("format") != FORMAT:
        wanted, found = f'"format": "{FORMAT}"', cut(document.get("format"))
        raise CheckpointError(path, _MSG_NOT_OURS, expected=wanted, found=found)
    version, given = document.get("version"), document.get("checksum")
    if type(version) is int and version > VERSION:
        raise CheckpointError(path, _MSG_NEWER.format(found=version, version=VERSION))
    if not isinstance(given, str) or not _HEX.fullmatch(given):
        raise CheckpointError(path, "has no checksum", expected=_DIGITS, found=cut(given))
    found = new_checksum(text.replace(given.encode(), _ZEROS.encode(), 1)).hexdigest()
    if found != given:
        raise CheckpointError(path, _MSG_CHECKSUM, expected=given, found=found)
    if version != VERSION:
        raise CheckpointError(path, "has no version", expected=VERSION, found=cut(version))
    return _Reader(path).manifest(document)


class _Reader:
    """Checks a document field by field; a wrong one is named."""

    def __init__(self, path: str):
        self.path = path

    def manifest(self, d: dict[str, Any]) -> Manifest:
        names = ("libraries", "plan", "rules", "hows", "tree", "shards", "tensors")
        self._fields("the manifest", d, ("format", "version", "checksum", *names))
        shards = tuple(self._shard(i, s) for i, s in enumerate(self._is("shards", d, list)))
        tensors = self._is("tensors", d, dict)
        versions = self._is("libraries", d, dict)
        try:
            rules = [rule_from_dict(rule) for rule in self._is("rules", d, list)]
            hows = tuple(self._how(how, rules) for how in self._is("hows", d, list))
            plan = None if d["plan"] is None else Plan.from_json(_json(d["plan"]))
        except CheckpointError:
            raise
        # What rules and plans say of bad values is worth reading; all of it is about the file.
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            what = f"has a bad plan or rule ({cut(error, 200)})"
            raise CheckpointError(self.path, what) from None
        return Manifest(
            d["tree"],
            hows,
            plan,
            shards,
            tensors={name: self._tensor(name, e, len(shards)) for name, e in tensors.items()},
            libraries={name: str(version) for name, version in versions.items()},
        )

    def _how(self, fields: Any, rules: Sequence[Any]) -> HowToQuantize:
        if not isinstance(fields, dict) or "rule" not in fields:
            raise self._bad("an entry of hows", "an object with a rule", fields)
        number = fields["rule"]
        if number is not None and (type(number) is not int or not 0 <= number < len(rules)):
            raise self._bad("a how's rule", f"a number below {len(rules)}", number)
        how = how_from_dict({k: v for k, v in fields.items() if k != "rule"})
        if how.roles is not None and not set(how.roles) <= set("lkcn"):
            raise self._bad("a how's roles", "letters of 'lkcn'", how.roles)
        return how if number is None else how.replace(rule=rules[number])

    def _shard(self, i: int, fields: Any) -> tuple[str, int]:
        self._fields(f"shard {i}", fields, ("file", "bytes"))
        name = self._is("file", fields, str)
        if not is_shard(name):  # nor any other way out of the folder
            raise self._bad(f"shard {i}", "weights-<number>-of-<count>-<hash>.safetensors", name)
        return name, self._count("bytes", fields["bytes"])

    def _tensor(self, name: str, fields: Any, shards: int) -> Stored:
        where = f"tensor {cut(name)}"
        keys = ("path", "shard", "dtype", "shape", "bits", "encoding", "bytes", "checksum")
        self._fields(where, fields, keys)
        path, dtype = (self._is(key, fields, str) for key in ("path", "dtype"))
        shape = tuple(self._count(where, n) for n in self._is("shape", fields, list))
        shard, bits = (self._count(where, fields[key]) for key in ("shard", "bits"))
        kind, checksum = fields["encoding"], fields["checksum"]
        if kind not in ENCODINGS:
            raise self._bad(f"{where}'s encoding", f"one of {', '.join(ENCODINGS)}", kind)
        if not isinstance(checksum, str) or not _HEX.fullmatch(checksum):
            raise self._bad(f"{where}'s checksum", _DIGITS, checksum)
        if shard >= shards:
            raise self._bad(f"{where}'s shard", f"a number below {shards}", shard)
        encoding = Encoding(dtype, shape, bits, kind)
        problem = encoding.problem()
        if problem is not None:
            raise CheckpointError(self.path, f"contradicts itself: {problem}", tensor=name)
        if encoding.nbytes != fields["bytes"]:
            raise self._bad(f"{where}'s bytes", str(encoding.nbytes), fields["bytes"])
        return Stored(Tensor(name, path, encoding), shard, checksum)

    def _fields(self, where: str, value: Any, names: Sequence[str]) -> None:
        if not isinstance(value, dict) or set(value) != set(names):
            found = sorted(value) if isinstance(value, dict) else value
            raise self._bad(where, f"the fields {', '.join(names)}", found)

    def _is(self, key: str, fields: dict[str, Any], kind: type) -> Any:
        if not isinstance(fields[key], kind):
            raise self._bad(key, f"a {kind.__name__}", fields[key])
        return fields[key]

    def _count(self, where: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 2**60:
            raise self._bad(where, "a count", value)
        return value

    def _bad(self, where: str, expected: str, found: Any) -> CheckpointError:
        what = f"has a bad manifest, {where}"
        return CheckpointError(self.path, what, expected=expected, found=cut(found))
