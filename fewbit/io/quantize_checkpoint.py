"""From a float checkpoint to a quantized one, larger than memory: `fewbit.quantize_checkpoint`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from fewbit._errors import describe
from fewbit._plan import Plan
from fewbit._progress import bytes_progress
from fewbit._version import __version__
from fewbit.io import _manifest
from fewbit.io._leaf_stream import Piece, stream_leaf, write_ready
from fewbit.io._partial import Partial
from fewbit.io._plan_fits import check_scales
from fewbit.io._stream_plan import abstract_tree, find_pieces
from fewbit.io._stream_target import Target
from fewbit.io._tree import Leaf, TreeEncoder, leaf_arrays
from fewbit.io.errors import CheckpointError
from fewbit.io.inspecting import CheckpointInfo, inspect
from fewbit.io.saving import SHARD_BYTES, into_shards, shard_digest
from fewbit.io.stream_sources import Source, open_source
from fewbit.observed import Statistics
from fewbit.static_scales import QuantizedParams
from fewbit.static_statistics import add_scales, is_fixed

PARTIAL = ".partial"

_MSG_PLAN = (
    "fewbit.quantize_checkpoint(src, dst, plan) takes a Plan as its third argument, got {found}. "
    "Make one without weights: fewbit.plan(model, rules, *inputs) with jax.eval_shape'd parameters."
)
_MSG_SAME = "is the source itself; give another folder for the result"


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

    (`fewbit.io.names` says more.) The result is the same, byte for byte, as that of
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
        node, encoder, pieces = _matched(
            source, plan, names, quant_stats, into, allow_extra_params, strict
        )
        identity = _identity(source, plan, names, shard_size, seed)
        if into is not None:
            identity["into"] = _tree_digest(node)
        if quant_stats is not None:
            identity["quant_stats"] = _digest([p for p in pieces if isinstance(p, Leaf)])
        tensors = [tensor for leaf in encoder.leaves for tensor in leaf.tensors]
        groups = into_shards(tensors, shard_size)
        with (
            Target(target, target + PARTIAL) as place,
            Partial(target, target + PARTIAL, groups, identity, resume) as partial,
        ):
            _run(pieces, source, partial, encoder.leaves, progress)
            place.publish(partial, *_finished(partial, groups, node, tuple(encoder.hows), plan))
            partial.remove()
    finally:
        source.close()
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
    source = open_source(src)
    try:
        pieces = _matched(source, plan, names, quant_stats, into, allow_extra_params, strict)[2]
        read = [name for piece in pieces if isinstance(piece, Piece) for name in piece.sources]
        return sum(map(source.nbytes, read))
    finally:
        source.close()


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
        digest = shard_digest(groups[number], partial.checksums)
        name = _manifest.shard_name(number, len(groups), digest)
        files[name] = path
        shards.append((name, os.stat(path).st_size))
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
    return manifest, files


def _with_scales(tree: Any, plan: Plan, quant_stats: Any, allow_extra: bool, strict: bool) -> Any:
    """The tree with the static scales that statistics give, which are small and made at once."""
    scales = {scale.name: scale for scale in plan.scales}
    if quant_stats is None and not any(map(is_fixed, scales.values())):
        return tree
    if isinstance(quant_stats, Statistics):
        quant_stats.check_model(plan)
        quant_stats.check_methods(plan.scales)
    given = quant_stats is not None
    paths = [leaf.path for leaf in plan.leaves]
    return add_scales(
        tree,
        scales,
        quant_stats if given else {},
        by_site=plan.kind == "function",
        whole=given and strict,
        allow_extra=allow_extra,
        present=paths,
        known=paths,
    )


def _tree_digest(node: Any) -> str:
    return hashlib.blake2b(json.dumps(node).encode(), digest_size=16).hexdigest()


def _digest(leaves: Sequence[Leaf]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        for array in leaf_arrays(leaf.value):
            total.update(repr((leaf.path, array.dtype.name, array.shape)).encode())
            total.update(array.tobytes())
    return total.hexdigest()


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
