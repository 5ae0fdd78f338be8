"""From a float checkpoint to a quantized one, larger than memory: `fewbit.quantize_checkpoint`."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import jax

from fewbit._errors import describe
from fewbit._plan import LeafPlan, Plan
from fewbit._version import __version__
from fewbit.io import _manifest
from fewbit.io._folder import _MSG_BUSY as _FOLDER_BUSY
from fewbit.io._folder import Folder
from fewbit.io._leaf_stream import Piece, stream_leaf, write_ready
from fewbit.io._partial import Partial, writer_of
from fewbit.io._stream_progress import StreamProgress
from fewbit.io._tree import Leaf, TreeEncoder, leaf_arrays
from fewbit.io.errors import CheckpointError
from fewbit.io.inspecting import CheckpointInfo, inspect
from fewbit.io.names import Target, map_names, turned
from fewbit.io.saving import SHARD_BYTES, into_shards, shard_digest
from fewbit.io.stream_sources import Source, open_source
from fewbit.qarray import WithAux, quantize_with
from fewbit.static_scales import QuantizedParams
from fewbit.static_statistics import add_scales

PARTIAL = ".partial"

_MSG_PLAN = (
    "fewbit.quantize_checkpoint(src, dst, plan) takes a Plan as its third argument, got {found}. "
    "Make one without weights: fewbit.plan(model, rules, *inputs) with jax.eval_shape'd parameters."
)
_MSG_MISSING = "has no tensor for {count} of the plan's parameters: {paths}"
_FIX_MISSING = "{near}Map names to parameters: names=[(pattern, replacement), ...]."
_MSG_EXTRA = "has {count} tensors that the plan does not know: {names}"
_FIX_EXTRA = "{near}Map them with names=..., or leave them out: names=[..., (pattern, None)]."
_MSG_SHAPE = "has a shape that parameter {path!r} does not"
_FIX_TURNED = (
    "It looks transposed: add 'T' to its entry in names, (pattern, replacement, 'T'){axes}."
)
_FIX_SHAPE = "The plan was made for another model or other sizes."
_MSG_DTYPE = "is {dtype}, and a weight to be quantized is float"
_FIX_DTYPE = "For a checkpoint that is quantized already see fewbit.read_checkpoint."
_MSG_BUSY = "is being written by {who}"
_FIX_BUSY = "Wait until it has finished, or give another folder."
_MSG_SAME = "is the source itself; give another folder for the result"


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    plan: Plan,
    names: Iterable[Sequence[Any]] | None = None,
    *,
    quant_stats: Any = None,
    progress: bool = True,
    resume: bool = True,
    shard_size: int = SHARD_BYTES,
    seed: int = 0,
) -> CheckpointInfo:
    """Quantize a checkpoint file to file, a slice at a time; `fewbit.load(dst)` loads the result.

    `src` is a `.safetensors` file, a folder of them (sharded or not) or an Orbax checkpoint, in
    bfloat16, float16 or float32. `plan` needs no weights to be made. `names` maps the source's
    names to the plan's paths by regular expressions, transposes (`'T'`) and stacks layers:

        names=[(r'model\\.layers\\.{i}\\.(.*)\\.weight', r'layers/{i}/\\1/kernel', 'T')]

    (`fewbit.io.names` says more.) The result is the same, byte for byte, as that of
    `fewbit.save(dst, fewbit.quantize_params(params, plan), plan)`, with memory for a slice, or for
    a whole parameter where its format has one range for all of it.

    `quant_stats` are statistics of calibration, as `quantize_params` takes them; without them only
    weights are quantized.

    A run that was killed goes on where it was when it is called again with the same inputs, with
    the same bytes in the end; until then `dst` is what it was, and `<dst>.partial` holds what is
    done. Other inputs are an error there, unless `resume=False` drops it.

    >>> import fewbit, tempfile, jax.numpy as jnp, numpy as np
    >>> from fewbit.io.safetensors_file import SafetensorsWriter
    >>> f = lambda params, x: x @ params['up']['kernel']
    >>> params = {'up': {'kernel': jax.ShapeDtypeStruct((64, 8), 'float32')}}
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int4', tile_size=32)]
    >>> plan = fewbit.plan(f, rules, params, jnp.ones((1, 64)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SafetensorsWriter(f'{folder}/a.safetensors', [('up.weight', 'F32', (8, 64))]) as w:
    ...         w.write('up.weight', np.ones((8, 64), np.float32))
    ...     info = quantize_checkpoint(
    ...         f'{folder}/a.safetensors', f'{folder}/small', plan,
    ...         names=[(r'(.*)\\.weight', r'\\1/kernel', 'T')])
    >>> info.leaves[0].qtype
    'int4'
    """
    if not isinstance(plan, Plan):
        raise TypeError(_MSG_PLAN.format(found=describe(plan)))
    names = None if names is None else [tuple(entry) for entry in names]
    source = open_source(src)
    try:
        target = os.fspath(dst).rstrip(os.sep) or os.fspath(dst)
        if os.path.realpath(target) == os.path.realpath(source.path):
            raise CheckpointError(target, _MSG_SAME)
        encoder = TreeEncoder()
        tree = _with_scales(_abstract_tree(plan), plan, quant_stats)
        node = encoder.node(tree)
        root = "params/" if isinstance(tree, QuantizedParams) else ""
        pieces = _pieces(source, plan, names, encoder.leaves, root)
        identity = _identity(source, plan, names, shard_size, seed)
        if quant_stats is not None:
            identity["quant_stats"] = _digest([p for p in pieces if isinstance(p, Leaf)])
        tensors = [tensor for leaf in encoder.leaves for tensor in leaf.tensors]
        groups = into_shards(tensors, shard_size)
        with (
            _locked(target) as folder,
            Partial(target + PARTIAL, groups, identity, resume) as partial,
        ):
            _run(pieces, source, partial, encoder.leaves, progress)
            _publish(folder, partial, groups, node, tuple(encoder.hows), plan)
            partial.remove()
    finally:
        source.close()
    return inspect(target)


def _run(
    pieces: Sequence[Piece | Leaf],
    source: Source,
    partial: Partial,
    leaves: Sequence[Leaf],
    show: bool,
) -> None:
    first = partial.begin_at(leaves)
    sizes = [
        0 if isinstance(piece, Leaf) else sum(map(source.nbytes, piece.sources)) for piece in pieces
    ]
    bar = StreamProgress("Quantizing", sum(sizes), show)
    bar.skip(sum(sizes[:first]))
    # One thread per core beside this one, which hashes and writes.
    with bar, ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 1)) as pool:
        for piece, size in zip(pieces[first:], sizes[first:], strict=True):
            if isinstance(piece, Leaf):
                write_ready(piece, partial.append)
            else:
                stream_leaf(piece, source, partial.append, pool)
            bar.advance(size)


def _publish(
    folder: Folder,
    partial: Partial,
    groups: Sequence[Sequence[Any]],
    node: Any,
    hows: tuple[Any, ...],
    plan: Plan,
) -> None:
    """Give the shards their place and the checkpoint its manifest, in this order."""
    shards: list[tuple[str, int]] = []
    stored: dict[str, _manifest.Stored] = {}
    for path, number in partial.shards():
        digest = shard_digest(groups[number], partial.checksums)
        name = _manifest.shard_name(number, len(groups), digest)
        place = os.path.join(folder.path, name)
        try:
            # A second name: should this run be killed now, the next one still finds the first.
            if not os.path.exists(place):
                os.link(path, place)
        except OSError as error:
            raise folder.failed(error) from error
        shards.append((name, os.stat(place).st_size))
        for tensor in groups[number]:
            checksum = partial.checksums[tensor.name]
            stored[tensor.name] = _manifest.Stored(tensor, number, checksum)
    manifest = _manifest.Manifest(
        tree=node,
        hows=hows,
        plan=plan,
        shards=tuple(shards),
        tensors=stored,
        libraries=_manifest.libraries(),
    )
    folder.publish(_manifest.to_bytes(manifest), {name for name, _ in shards})


class _locked:
    """The folder of the result, held for the whole run: nobody else writes to it."""

    def __init__(self, path: str):
        self._path, self._folder = path, Folder(path)

    def __enter__(self) -> Folder:
        try:
            return self._folder.__enter__()
        except CheckpointError as error:
            if _FOLDER_BUSY not in str(error):
                raise
            what = _MSG_BUSY.format(who=writer_of(self._path + PARTIAL))
            raise CheckpointError(self._path, what, fix=_FIX_BUSY) from None

    def __exit__(self, *error: Any) -> None:
        self._folder.__exit__(*error)


def _abstract_tree(plan: Plan) -> Any:
    """The quantized parameters as a tree of shapes, nested as the paths say."""
    tree: dict[Any, Any] = {}
    for leaf in plan.leaves:
        # NNX has integers for the items of a list; everything else has strings.
        parts = [int(p) if plan.kind == "nnx" and p.isdigit() else p for p in leaf.path.split("/")]
        place = tree
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        value: Any = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if leaf.how is not None:
            how = leaf.how
            q = jax.eval_shape(lambda x, how=how: quantize_with(x, how), value)
            value = WithAux(q, how.replace(rule=leaf.rule))
        place[parts[-1]] = value
    return tree


def _with_scales(tree: Any, plan: Plan, quant_stats: Any) -> Any:
    """The tree with the static scales that statistics give, which are small and made at once."""
    if quant_stats is None:
        return tree
    paths = [leaf.path for leaf in plan.leaves]
    return add_scales(
        tree,
        {scale.name: scale for scale in plan.scales},
        quant_stats,
        by_site=plan.kind == "function",
        whole=True,
        allow_extra=False,
        present=paths,
        known=paths,
    )


def _digest(leaves: Sequence[Leaf]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        for array in leaf_arrays(leaf.value):
            total.update(repr((leaf.path, array.dtype.name, array.shape)).encode())
            total.update(array.tobytes())
    return total.hexdigest()


def _pieces(
    source: Source, plan: Plan, names: Any, stored: Sequence[Leaf], root: str
) -> list[Piece | Leaf]:
    """Every leaf of the result, with its sources, or as it is if it has none."""
    targets = {t.path: t for t in map_names(source.path, list(source.names), names)}
    planned = {leaf.path: leaf for leaf in plan.leaves}
    missing = [path for path in planned if path not in targets]
    extra = [path for path in targets if path not in planned]
    if missing:
        sources = [name for path in extra for name in targets[path].sources]
        raise CheckpointError(
            source.path,
            _MSG_MISSING.format(count=len(missing), paths=_some(missing)),
            fix=_FIX_MISSING.format(near=_near(missing[0], [*extra, *sources])),
        )
    if extra:
        found = [name for path in extra for name in targets[path].sources]
        raise CheckpointError(
            source.path,
            _MSG_EXTRA.format(count=len(found), names=_some(found)),
            fix=_FIX_EXTRA.format(near=_near(extra[0], [])),
        )
    pieces: list[Piece | Leaf] = []
    for leaf in stored:
        path = leaf.path.removeprefix(root)
        known = path in planned
        pieces.append(_piece(source, planned[path], targets[path], leaf) if known else leaf)
    return pieces


def _piece(source: Source, plan: LeafPlan, target: Target, stored: Leaf) -> Piece:
    for name in target.sources:
        if plan.how is not None and source.dtype(name) not in FLOATS:
            what = _MSG_DTYPE.format(dtype=source.dtype(name))
            raise CheckpointError(source.path, what, tensor=name, fix=_FIX_DTYPE)
        shape = source.shape(name)
        try:
            perm = turned(shape, target.axes)
        except ValueError as error:
            raise CheckpointError(source.path, f"cannot be turned: {error}", tensor=name) from None
        found = shape if perm is None else tuple(shape[axis] for axis in perm)
        wanted = plan.shape[len(target.stack) :]
        if found != wanted or target.stack != plan.shape[: len(target.stack)]:
            raise CheckpointError(
                source.path,
                _MSG_SHAPE.format(path=plan.path),
                tensor=name,
                expected=plan.shape,
                found=(*target.stack, *found),
                fix=_shape_fix(found, wanted),
            )
    return Piece(plan, stored, target.sources, target.stack, perm)


FLOATS = ("bfloat16", "float16", "float32", "float64")


def _shape_fix(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if found == wanted or sorted(found) != sorted(wanted):
        return _FIX_SHAPE
    axes = next(p for p in permutations(range(len(found))) if tuple(found[a] for a in p) == wanted)
    return _FIX_TURNED.format(axes="" if len(found) == 2 else f", or {axes} in place of 'T'")


def _identity(source: Source, plan: Plan, names: Any, shard_size: int, seed: int) -> dict[str, Any]:
    """All that the result's bytes depend on; each entry has a name for people."""
    text = plan.to_json()
    return {
        "source": source.identity(),
        "plan": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        "names": json.loads(json.dumps(names)),
        "shard_size": shard_size,
        "seed": seed,
        "version of fewbit or jax": [__version__, jax.__version__],
    }


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:4]) + (", ..." if len(items) > 4 else "")


def _near(path: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(path, list(others), 2, cutoff=0.4)
    return f"The nearest to {path} are {', '.join(close)}. " if close else ""
