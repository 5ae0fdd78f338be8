"""What a plan's parameters are made of: tensors of a source, matched by name, shape and type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any

import jax

from fewbit._plan import LeafPlan, Plan
from fewbit.beside import owner_of
from fewbit.io._leaf_stream import Piece
from fewbit.io._tree import Leaf, map_leaves
from fewbit.io.errors import CheckpointError
from fewbit.io.names import Target, map_names, turned
from fewbit.io.stream_sources import Source
from fewbit.learned_scales import is_learned
from fewbit.qarray import WithAux, abstract_quantized
from fewbit.training.learned import QSCALE

_MSG_MISSING = "has no tensor for {count} of the plan's parameters: {paths}"
_FIX_MISSING = "{near}Map names to parameters: names=[(pattern, replacement), ...]."
_MSG_EXTRA = "has {count} tensors that the plan does not know: {names}"
_FIX_EXTRA = (
    "{near}Map them with names=..., or leave them out: some with "
    "names=[..., (pattern, None)], all with allow_extra_params=True."
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
FLOATS = ("bfloat16", "float16", "float32", "float64")


def abstract_tree(plan: Plan, into: Any = None) -> Any:
    """The quantized parameters as a tree of shapes, nested as the paths say, or as `into` is."""
    if into is not None:
        return _filled(plan, into)
    tree: dict[Any, Any] = {}
    for leaf in plan.leaves:
        # NNX has integers for the items of a list; everything else has strings.
        parts = [int(p) if plan.kind == "nnx" and p.isdigit() else p for p in leaf.path.split("/")]
        place = tree
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = _abstract(leaf)
    return tree


def _filled(plan: Plan, into: Any) -> Any:
    planned, seen = {leaf.path: leaf for leaf in plan.leaves}, list[str]()

    def visit(path: str, old: Any) -> Any:
        seen.append(path)
        return _abstract(planned[path]) if path in planned else old

    tree = map_leaves(into, visit)
    other = sorted(set(seen) ^ set(planned))
    if other:
        raise ValueError(_MSG_INTO.format(paths=_some(other)))
    return tree


def _abstract(leaf: LeafPlan) -> Any:
    value = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if leaf.how is None:
        return value
    how = leaf.how
    q = abstract_quantized(value, how)
    return WithAux(q, how.replace(rule=leaf.rule))


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
        what = _MSG_LEARNED.format(count=len(learned), paths=_some(learned))
        raise CheckpointError(source.path, what, fix=_FIX_LEARNED)
    targets = {t.path: t for t in map_names(source.path, list(source.names), names, planned)}
    missing = [path for path in planned if path not in targets]
    extra = [path for path in targets if path not in planned]
    if missing:
        sources = [name for path in extra for name in targets[path].sources]
        raise CheckpointError(
            source.path,
            _MSG_MISSING.format(count=len(missing), paths=_some(missing)),
            fix=_FIX_MISSING.format(near=_near(missing[0], [*extra, *sources])),
        )
    scales = [path for path in extra if owner_of(path, (QSCALE,)) in planned]
    if scales and not allow_extra:
        what = _MSG_LEFT.format(count=len(scales), names=_some(scales))
        raise CheckpointError(source.path, what, fix=_FIX_LEFT.format(suffix=QSCALE))
    if extra and not allow_extra:
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


def _shape_fix(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if found == wanted or sorted(found) != sorted(wanted):
        return _FIX_SHAPE
    axes = next(p for p in permutations(range(len(found))) if tuple(found[a] for a in p) == wanted)
    return _FIX_TURNED.format(axes="" if len(found) == 2 else f", or {axes} in place of 'T'")


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:4]) + (", ..." if len(items) > 4 else "")


def _near(path: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(path, list(others), 2, cutoff=0.4)
    return f"The nearest to {path} are {', '.join(close)}. " if close else ""
