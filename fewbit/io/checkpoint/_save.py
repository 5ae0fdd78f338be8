"""Save quantized parameters and the plan that made them: leaf by leaf, whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from fewbit._util import describe
from fewbit.io._encoding import encode
from fewbit.io._errors import first_few
from fewbit.io._safetensors import SafetensorsWriter, new_checksum
from fewbit.io.checkpoint import _manifest
from fewbit.io.checkpoint._folder import Folder, telling
from fewbit.io.checkpoint._inspect import CheckpointInfo, inspect
from fewbit.io.checkpoint._parts import parts_together
from fewbit.io.checkpoint._tree import Leaf, Tensor, TreeEncoder, bare, leaf_arrays
from fewbit.numerics import qtype_name
from fewbit.planning import SCALE, Plan
from fewbit.qarray import HowToQuantize, QArray, WithAux, is_box, unboxed

# --- Whether parameters are what a plan made: beside others it would be a lie in the file ---------

_MSG_OTHER_PLAN = (
    "{count} of the plan's parameters {are} not stored as it says: {examples}. Save the parameters "
    "that this plan made, or leave the plan out: fewbit.save(path, params); strict=False saves "
    "both as they are."
)
_MSG_NO_SCALES = (
    "The plan has {count} static activation {scales} that these parameters lack: {names}. A model "
    "loaded from them would not run. Quantize with statistics: stats = fewbit.calibrate(model, "
    "plan, params, batches), then quantize_params(params, plan, stats) or "
    "quantize_checkpoint(src, dst, plan, quant_stats=stats); strict=False writes them without."
)


def check_stored(plan: Plan, leaves: Sequence[Leaf], strict: bool) -> None:
    """The plan's parameters, each in the type, shape and tiles that it says."""
    stored = {leaf.path: _stored_type(leaf.value) for leaf in leaves}
    planned = {leaf.path: leaf for leaf in plan.leaves}
    # Linen's variables and QuantizedParams hold the planned tree under this name.
    prefix = "" if stored.keys() & planned.keys() else "params/"
    differences = []
    for path, leaf in planned.items():
        if leaf.how is None:
            continue
        found = stored.get(prefix + path, "missing")
        wanted = _words(qtype_name(leaf.how.qtype), leaf.shape, leaf.how)
        if found != wanted:
            differences.append(f"{path} is {found}, the plan says {wanted}")
    if not differences:
        return
    message = _MSG_OTHER_PLAN.format(
        count=len(differences),
        are="is" if len(differences) == 1 else "are",
        examples=first_few(differences, 5, "; "),
    )
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=4)


def check_scales(
    plan: Plan, leaves: Sequence[Leaf], strict: bool = True, stacklevel: int = 3
) -> None:
    """Static activation scales of the plan that are not among the leaves, nor their statistics."""
    by_site = plan.kind == "function"
    names = {
        scale.name: f"act_scales/{scale.site}/{scale.side}" if by_site else scale.name
        for scale in plan.scales
    }
    paths = [leaf.path.removeprefix("params/").removeprefix("quant_stats/") for leaf in leaves]
    # `up/dot_general0_lhs_scale`, or `up/dot_general0_lhs/count` where they are still collected.
    stored = {path.removesuffix(SCALE) for path in paths if path.endswith(SCALE)}
    stored |= {path.rpartition("/")[0] for path in paths}
    missing = [name for name, path in names.items() if path not in stored]
    if not missing:
        return
    message = _MSG_NO_SCALES.format(
        count=len(missing),
        scales="scale" if len(missing) == 1 else "scales",
        names=first_few(missing, 5),
    )
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=stacklevel + 1)


def _stored_type(value: Any) -> str:
    value = unboxed(value) if is_box(value) else value
    how = value.how if isinstance(value, WithAux) else None
    value = bare(value)
    if isinstance(value, QArray):
        name = "unknown" if value.qtype is None else qtype_name(value.qtype)
        return _words(name, value.shape, how)
    return str(getattr(value, "dtype", type(value).__name__))


def _words(qtype: str, shape: Sequence[int], how: HowToQuantize | None) -> str:
    """A quantized parameter for people, all that a plan and a file have to agree on."""
    tiles = {} if how is None else {axis % len(shape): t for axis, t in how.tiled_axes.items()}
    along = ", ".join(f"tiles of {tile} along axis {axis}" for axis, tile in sorted(tiles.items()))
    return f"{qtype}[{','.join(map(str, shape))}]" + (f" in {along}" if along else "")


# --- The writing ----------------------------------------------------------------------------------

SHARD_BYTES = 2 * 10**9

_MSG_PLAN = (
    "fewbit.save(path, params, plan) takes a Plan (or None) as its third argument, got {found}. "
    "Make one: fewbit.plan(model, rules, *inputs)."
)
_MSG_SWAPPED = "The parameters come second and the plan third: fewbit.save(path, params, plan)."
_MSG_ABSTRACT = "{path} is abstract: it has a shape, but no values to save."
_MSG_LEAF = "{path}: {found} does not fit where {expected} comes next."


def save(
    path: str | os.PathLike[str],
    params: Any,
    plan: Plan | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    strict: bool = True,
) -> CheckpointInfo:
    """Write parameters and their plan into a folder, from which `load` gives them back.

    Any pytree of parameters, quantized or not: nested dicts, lists and tuples, Flax's FrozenDict
    and boxes, an NNX model or state (as nested dicts); classes of your own are filled into a
    template by `load(path, into=...)`. Codes take their true width (int3: 3 bits), in plain order,
    so that a file suits every machine.

    The plan must fit: parameters stored as it says, and static scales if it has any (`strict=False`
    makes that a warning).

    The checkpoint that was at `path` stays whole until the new one is on disk. A second writer at
    the same time gets an error. The same parameters and plan give the same bytes.

    >>> import fewbit, tempfile, jax.numpy as jnp
    >>> f, x = lambda params, x: x @ params['w'], jnp.ones((1, 4))
    >>> params, rules = {'w': jnp.eye(4)}, [fewbit.QuantizationRule(weight_qtype='int3')]
    >>> plan = fewbit.plan(f, rules, params, x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = save(f'{folder}/model', fewbit.quantize_params(params, plan), plan)
    ...     loaded = fewbit.load(f'{folder}/model', lazy=False)
    >>> loaded.plan == plan, fewbit.dequantize(loaded.params['w']).shape
    (True, (4, 4))
    >>> info.leaves[0].qtype, info.leaves[0].bytes  # 3 bits each, rows on whole bytes; 4 scales
    ('int3', 24)
    """
    if isinstance(params, Plan):
        raise TypeError(_MSG_SWAPPED)
    with CheckpointWriter(path, params, plan, shard_bytes=shard_bytes, strict=strict) as writer:
        for leaf in writer.leaves:
            writer.write(leaf.path, leaf.value)
    return inspect(path)


class CheckpointWriter:
    """Writes a checkpoint leaf by leaf, for trees that are not all in memory at once.

    `tree` is the tree to be written, or an abstract one like it (`jax.eval_shape`). Leaves are
    written in the order of `leaves`; the checkpoint appears when the `with` block ends well.

    >>> import tempfile, jax, jax.numpy as jnp, fewbit
    >>> make = lambda key: fewbit.quantize(jax.random.normal(key, (8, 8)), 'int4')
    >>> tree = {'w': jax.eval_shape(make, jax.random.key(0))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with CheckpointWriter(f'{folder}/model', tree) as writer:
    ...         for leaf in writer.leaves:
    ...             writer.write(leaf.path, make(jax.random.key(1)))
    ...     fewbit.inspect(f'{folder}/model').leaves[0].qtype
    'int4'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tree: Any,
        plan: Plan | None = None,
        *,
        shard_bytes: int = SHARD_BYTES,
        strict: bool = True,
    ):
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(_MSG_PLAN.format(found=describe(plan)))
        self.path, self.plan = os.fspath(path), plan
        encoder = TreeEncoder()
        self._node = encoder.node(tree if plan is None else parts_together(tree, plan))
        self._hows = tuple(encoder.hows)
        self.leaves: tuple[Leaf, ...] = tuple(encoder.leaves)
        if plan is not None:
            check_stored(plan, self.leaves, strict)
            check_scales(plan, self.leaves, strict, stacklevel=4)
        self._groups = into_shards([t for leaf in self.leaves for t in leaf.tensors], shard_bytes)
        self._waiting = list(reversed(self.leaves))
        self._folder = Folder(self.path)
        self._shard: SafetensorsWriter | None = None
        self._shards: list[tuple[str, int]] = []
        self._tensors: dict[str, _manifest.Stored] = {}

    def __enter__(self) -> CheckpointWriter:
        self._folder.__enter__()
        return self

    def write(self, path: str, value: Any) -> None:
        """The next leaf; it may be packed for kernels, only what it stands for is written."""
        expected = self._waiting.pop() if self._waiting else None
        if expected is None or path != expected.path:
            wanted = "nothing" if expected is None else repr(expected.path)
            raise ValueError(_MSG_LEAF.format(path=path, found="this leaf", expected=wanted))
        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value))
        if abstract and any(t.encoding.nbytes for t in expected.tensors):
            raise ValueError(_MSG_ABSTRACT.format(path=path))
        arrays = leaf_arrays(value)
        for tensor in expected.tensors:
            array, e = next(arrays, None), tensor.encoding
            kind = (e.dtype, e.shape)
            found = None if array is None else (array.dtype.name, array.shape)
            if array is None or found != kind:
                raise ValueError(_MSG_LEAF.format(path=tensor.name, found=found, expected=kind))
            with telling(self._folder):
                writer = self._writer()
                for piece in encode(array, e):
                    writer.append(tensor.name, piece)
                if tensor.name not in writer.checksums:  # an empty one has no pieces
                    writer.append(tensor.name, b"")
            number = len(self._shards)
            checksum = writer.checksums[tensor.name]
            self._tensors[tensor.name] = _manifest.Stored(tensor, number, checksum)
            del array  # before the next one is made
            if len(writer.checksums) == len(self._groups[number]):
                self._finish_shard(writer)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._publish()
        except BaseException as failure:
            kind, error, trace = type(failure), failure, failure.__traceback__
            raise
        finally:
            if kind is not None and self._shard is not None:
                self._shard.abort()
            self._folder.__exit__(kind, error, trace)

    def _writer(self) -> SafetensorsWriter:
        if self._shard is None:
            number, count = len(self._shards), len(self._groups)
            file = os.path.join(self.path, f"weights-{number + 1:05}-of-{count:05}")
            tensors = [tensor.entry for tensor in self._groups[number]]
            self._shard = SafetensorsWriter(file, tensors, {"format": _manifest.FORMAT})
        return self._shard

    def _finish_shard(self, writer: SafetensorsWriter) -> None:
        name = name_shard(len(self._shards), self._groups, writer.checksums)
        writer.path = os.path.join(self.path, name)
        with telling(self._folder):
            writer.close()
            self._shards.append((name, os.stat(writer.path).st_size))
        self._shard = None

    def _publish(self) -> None:
        if self._waiting:
            raise ValueError(f"{self.path} is not complete: {self._waiting[-1].path!r} is missing.")
        shards = tuple(self._shards)
        manifest = _manifest.Manifest(self._node, self._hows, self.plan, shards, self._tensors)
        self._folder.publish(_manifest.to_bytes(manifest), {name for name, _ in shards})


def name_shard(
    number: int, groups: Sequence[Iterable[Tensor]], checksums: Mapping[str, str]
) -> str:
    """The name of a shard, which tells what it holds by a hash."""
    total = new_checksum()
    for tensor in groups[number]:
        total.update(repr((tensor.name, tensor.encoding, checksums[tensor.name])).encode())
    return _manifest.shard_name(number, len(groups), total.hexdigest())


def into_shards(tensors: Iterable[Tensor], most: int) -> list[list[Tensor]]:
    """Tensors in order, a new shard begun where the next would make one larger than `most` bytes.

    >>> from fewbit.io._encoding import encoding_of
    >>> tensors = [Tensor(n, n, encoding_of((4,), 'float32')) for n in 'abc']
    >>> [[t.name for t in shard] for shard in into_shards(tensors, 32)]
    [['a', 'b'], ['c']]
    """
    if most < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {most}.")
    shards: list[list[Tensor]] = []
    size = most
    for tensor in tensors:
        if not shards or size + tensor.encoding.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.encoding.nbytes
    return shards
