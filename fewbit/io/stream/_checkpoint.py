"""From a float checkpoint to a quantized one, larger than memory: `fewbit.quantize_checkpoint`.

First every parameter of the plan is matched with tensors of the source, by name, shape and type;
then they are read, quantized and written, a slice at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import jax

from fewbit._util import bytes_progress, describe, nearest
from fewbit._version import __version__
from fewbit.calibration import Statistics, add_scales, is_fixed
from fewbit.io._errors import CheckpointError, first_few
from fewbit.io._safetensors import new_checksum
from fewbit.io._sources import Source, open_source
from fewbit.io.checkpoint import _manifest
from fewbit.io.checkpoint._inspect import CheckpointInfo, inspect
from fewbit.io.checkpoint._save import SHARD_BYTES, check_scales, into_shards, name_shard
from fewbit.io.checkpoint._tree import (
    Leaf,
    TreeEncoder,
    abstract_leaf,
    leaf_arrays,
    map_leaves,
    put_at,
)
from fewbit.io.stream._leaf import Piece, stream_leaf, write_ready
from fewbit.io.stream._names import Target, map_names, turned
from fewbit.io.stream._partial import Destination, Partial
from fewbit.planning import LeafPlan, Plan, QuantizedParams, owner_of
from fewbit.training import QSCALE, is_learned

PARTIAL = ".partial"
FLOATS = ("bfloat16", "float16", "float32", "float64")

_MSG_PLAN = (
    "fewbit.quantize_checkpoint(src, dst, plan) takes a Plan as its third argument, got {found}. "
    "Make one without weights: fewbit.plan(model, rules, *inputs) with jax.eval_shape'd parameters."
)
_MSG_SAME = "is the source itself; give another folder for the result"

_MSG_MISSING = "has no tensor for {count} of the plan's parameters: {paths}"
_FIX_MISSING = "{near}Map names to parameters: names=[(pattern, replacement), ...]."
_MSG_EXTRA = "has {count} tensors that the plan does not know: {names}"
_FIX_EXTRA = (
    "Map them with names=..., or leave them out: some with names=[..., (pattern, None)], all with "
    "allow_extra_params=True."
)
_MSG_SHAPE = "has a shape that parameter {path!r} does not"
_FIX_TURNED = (
    "It looks transposed: add 'T' to its entry in names, (pattern, replacement, 'T'){axes}."
)
_FIX_SHAPE = "The plan was made for another model or other sizes."
_MSG_DTYPE = "is {dtype}, and a weight to be quantized is float"
_FIX_DTYPE = "For a checkpoint that is quantized already see fewbit.read_checkpoint."
_MSG_LEARNED = (
    "cannot be streamed into a plan that stores {count} parameters with learned scales ({paths})"
)
_FIX_LEARNED = (
    "Scales that training found are applied to parameters in memory: "
    "fewbit.save(dst, fewbit.quantize_params(params, plan), plan), or to_ptq(model, params) of the "
    "model that was trained."
)
_MSG_LEFT = "holds {count} learned scales that the plan does not use: {names}"
_FIX_LEFT = (
    "They belong to weights that were trained with weight_calibration_method='learned'. Make the "
    "plan with those rules and quantize in memory (fewbit.quantize_params), or quantize the "
    "weights without them: names=[..., (r'.*{suffix}', None)] or allow_extra_params=True."
)
_MSG_INTO = (
    "into has other parameters than the plan: {paths}. Give the tree, abstract or not, that the "
    "plan was made from."
)

# --- What a plan's parameters are made of ---------------------------------------------------------


def abstract_tree(plan: Plan, into: Any = None) -> Any:
    """The quantized parameters as a tree of shapes, nested as the paths say, or as `into` is."""
    planned = {leaf.path: leaf for leaf in plan.leaves}
    if into is None:
        tree: dict[Any, Any] = {}
        for path, leaf in planned.items():
            # NNX has integers for the items of a list; everything else has strings.
            nnx = plan.kind == "nnx"
            keys = [int(part) if nnx and part.isdigit() else part for part in path.split("/")]
            put_at(tree, keys, abstract_leaf(leaf))
        return tree
    seen = set[str]()

    def visit(path: str, old: Any) -> Any:
        seen.add(path)
        return abstract_leaf(planned[path]) if path in planned else old

    filled = map_leaves(into, visit)
    other = sorted(seen ^ set(planned))
    if other:
        raise ValueError(_MSG_INTO.format(paths=first_few(other, 4)))
    return filled


def find_pieces(
    source: Source,
    plan: Plan,
    names: Any,
    stored: Sequence[Leaf],
    root: str,
    allow_extra: bool = False,
) -> list[Piece | Leaf]:
    """Every leaf of the result, with its sources, or as it is if it has none."""
    planned = {leaf.path: leaf for leaf in plan.leaves}
    learned = [path for path, leaf in planned.items() if is_learned(leaf.how)]
    if learned:
        what = _MSG_LEARNED.format(count=len(learned), paths=first_few(learned, 4))
        raise CheckpointError(source.path, what, fix=_FIX_LEARNED)
    targets = {t.path: t for t in map_names(source.path, list(source.names), names, planned)}
    missing = [path for path in planned if path not in targets]
    extra = [path for path in targets if path not in planned]
    unknown = [name for path in extra for name in targets[path].sources]
    if missing:
        what = _MSG_MISSING.format(count=len(missing), paths=first_few(missing, 4))
        near = nearest(missing[0], [*extra, *unknown], "{}", 2, 0.4, show=str)
        near = f"The nearest to {missing[0]} are {near}. " if near else ""
        raise CheckpointError(source.path, what, fix=_FIX_MISSING.format(near=near))
    scales = [path for path in extra if owner_of(path, (QSCALE,)) in planned]
    if scales and not allow_extra:
        what = _MSG_LEFT.format(count=len(scales), names=first_few(scales, 4))
        raise CheckpointError(source.path, what, fix=_FIX_LEFT.format(suffix=QSCALE))
    if extra and not allow_extra:
        what = _MSG_EXTRA.format(count=len(unknown), names=first_few(unknown, 4))
        raise CheckpointError(source.path, what, fix=_FIX_EXTRA)
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


def _shape_fix(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if found == wanted or sorted(found) != sorted(wanted):
        return _FIX_SHAPE
    axes = next(p for p in permutations(range(len(found))) if tuple(found[a] for a in p) == wanted)
    return _FIX_TURNED.format(axes="" if len(found) == 2 else f", or {axes} in place of 'T'")


# --- The run --------------------------------------------------------------------------------------


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    plan: Plan,
    names: Iterable[Sequence[Any]] | None = None,
    *,
    quant_stats: Any = None,
    into: Any = None,
    allow_extra_params: bool = False,
    strict: bool = True,
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

    docs/checkpoints.md has more on names. The result is the same, byte for byte, as that of
    `fewbit.save(dst, fewbit.quantize_params(params, plan), plan)`, with memory for a slice, or for
    a whole parameter where its format has one range for all of it.

    `quant_stats` are statistics of calibration, as `quantize_params` takes them; a plan
    with static scales is an error without them, and with `strict=False` a warning. Tensors and
    statistics that the plan does not know are errors too; `allow_extra_params=True` leaves them
    out. A plan knows the parameters by their paths, so the result is nested
    dicts; `into` is a tree like the parameters, abstract or not, for those with lists, tuples or
    classes of your own.

    A run that was killed goes on where it was when it is called again with the same inputs, with
    the same bytes in the end; until then `dst` is what it was, or not there, and `<dst>.partial`
    holds what is done. Other inputs are an error there, unless `resume=False` drops it.

    >>> import fewbit, tempfile, jax.numpy as jnp, numpy as np
    >>> from fewbit.io._safetensors import SafetensorsWriter
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
    with contextlib.closing(open_source(src)) as source:
        target = os.fspath(dst).rstrip(os.sep) or os.fspath(dst)
        if os.path.realpath(target) == os.path.realpath(source.path):
            raise CheckpointError(target, _MSG_SAME)
        node, encoder, pieces = _matched(
            source, plan, names, quant_stats, into, allow_extra_params, strict
        )
        identity = _identity(source, plan, names, shard_size, seed)
        if into is not None:
            identity["into"] = new_checksum(json.dumps(node).encode()).hexdigest()
        if quant_stats is not None:
            identity["quant_stats"] = _digest([p for p in pieces if isinstance(p, Leaf)])
        groups = into_shards([t for leaf in encoder.leaves for t in leaf.tensors], shard_size)
        with (
            Destination(target, target + PARTIAL) as place,
            Partial(target, target + PARTIAL, groups, identity, resume) as partial,
        ):
            _run(pieces, source, partial, encoder.leaves, progress)
            place.publish(partial, *_finished(partial, groups, node, tuple(encoder.hows), plan))
            partial.remove()
    return inspect(target)


def check_source(
    src: str | os.PathLike[str],
    plan: Plan,
    names: Iterable[Sequence[Any]] | None = None,
    *,
    quant_stats: Any = None,
    into: Any = None,
    allow_extra_params: bool = False,
    strict: bool = True,
) -> int:
    """Whether `quantize_checkpoint` would find every parameter; the bytes that it would read.

    Names, shapes, types and statistics are compared, numbers are not read, nothing is written.
    """
    names = None if names is None else [tuple(entry) for entry in names]
    with contextlib.closing(open_source(src)) as source:
        pieces = _matched(source, plan, names, quant_stats, into, allow_extra_params, strict)[2]
        return sum(_bytes_read(source, piece) for piece in pieces)


def _matched(
    source: Source,
    plan: Plan,
    names: Any,
    quant_stats: Any,
    into: Any,
    allow_extra: bool,
    strict: bool,
) -> tuple[Any, TreeEncoder, list[Piece | Leaf]]:
    """The result as a node, its leaves, and what each of them is made of."""
    encoder = TreeEncoder()
    tree = _with_scales(abstract_tree(plan, into), plan, quant_stats, allow_extra, strict)
    node = encoder.node(tree)
    check_scales(plan, encoder.leaves, strict, stacklevel=4)
    root = "params/" if isinstance(tree, QuantizedParams) else ""
    return node, encoder, find_pieces(source, plan, names, encoder.leaves, root, allow_extra)


def _bytes_read(source: Source, piece: Piece | Leaf) -> int:
    return 0 if isinstance(piece, Leaf) else sum(map(source.nbytes, piece.sources))


def _run(
    pieces: Sequence[Piece | Leaf],
    source: Source,
    partial: Partial,
    leaves: Sequence[Leaf],
    show: bool,
) -> None:
    first = partial.begin_at(leaves)
    sizes = [_bytes_read(source, piece) for piece in pieces]
    bar = bytes_progress("Quantizing", sum(sizes[first:]), show=show)
    # One thread per core beside this one, which hashes and writes.
    with bar, ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 1)) as pool:
        for piece, size in zip(pieces[first:], sizes[first:], strict=True):
            if isinstance(piece, Leaf):
                write_ready(piece, partial.append)
            else:
                stream_leaf(piece, source, partial.append, pool)
            bar.update(size)


def _finished(
    partial: Partial,
    groups: Sequence[Sequence[Any]],
    node: Any,
    hows: tuple[Any, ...],
    plan: Plan,
) -> tuple[_manifest.Manifest, dict[str, str]]:
    """The manifest of what is done, and where its shards lie now, by their names."""
    shards: list[tuple[str, int]] = []
    stored: dict[str, _manifest.Stored] = {}
    files: dict[str, str] = {}
    for path, number in partial.shards():
        name = name_shard(number, groups, partial.checksums)
        files[name] = path
        shards.append((name, os.stat(path).st_size))
        for tensor in groups[number]:
            checksum = partial.checksums[tensor.name]
            stored[tensor.name] = _manifest.Stored(tensor, number, checksum)
    return _manifest.Manifest(node, hows, plan, tuple(shards), stored), files


def _with_scales(tree: Any, plan: Plan, quant_stats: Any, allow_extra: bool, strict: bool) -> Any:
    """The tree with the static scales that statistics give, which are small and made at once."""
    scales = {scale.name: scale for scale in plan.scales}
    if quant_stats is None and not any(map(is_fixed, scales.values())):
        return tree
    if isinstance(quant_stats, Statistics):
        quant_stats.check_model(plan)
        quant_stats.check_methods(plan.scales)
    paths = [leaf.path for leaf in plan.leaves]
    return add_scales(
        tree,
        scales,
        {} if quant_stats is None else quant_stats,
        by_site=plan.kind == "function",
        whole=quant_stats is not None and strict,
        allow_extra=allow_extra,
        present=paths,
        known=paths,
    )


def _digest(leaves: Sequence[Leaf]) -> str:
    total = new_checksum()
    for leaf in leaves:
        for array in leaf_arrays(leaf.value):
            total.update(repr((leaf.path, array.dtype.name, array.shape)).encode())
            total.update(array.tobytes())
    return str(total.hexdigest())


def _identity(source: Source, plan: Plan, names: Any, shard_size: int, seed: int) -> dict[str, Any]:
    """All that the result's bytes depend on; each entry has a name for people."""
    return {
        "source": source.identity(),
        "plan": new_checksum(plan.to_json().encode()).hexdigest(),
        "names": json.loads(json.dumps(names)),
        "shard_size": shard_size,
        "seed": seed,
        "version of fewbit or jax": [__version__, jax.__version__],
    }
