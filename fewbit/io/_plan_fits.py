"""Whether parameters are what a plan made: a plan beside others would be a lie in the file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fewbit._plan import Plan
from fewbit.boxes import is_box, unbox_parts, unboxed
from fewbit.io._tree import Leaf
from fewbit.numerics import qtype_name
from fewbit.qarray import HowToQuantize, QArray, WithAux
from fewbit.static_scales import SCALE

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
        examples="; ".join(differences[:5]) + "; ..." * (len(differences) > 5),
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
        names=", ".join(missing[:5]) + ", ..." * (len(missing) > 5),
    )
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=stacklevel + 1)


def _stored_type(value: Any) -> str:
    value = unboxed(value) if is_box(value) else value
    how = value.how if isinstance(value, WithAux) else None
    value = value.array if isinstance(value, WithAux) else value
    if isinstance(value, QArray):
        value = unbox_parts(value) if is_box(value.data) else value
        name = "unknown" if value.qtype is None else qtype_name(value.qtype)
        return _words(name, value.shape, how)
    return str(getattr(value, "dtype", type(value).__name__))


def _words(qtype: str, shape: Sequence[int], how: HowToQuantize | None) -> str:
    """A quantized parameter for people, all that a plan and a file have to agree on."""
    tiles = {} if how is None else {axis % len(shape): t for axis, t in how.tiled_axes.items()}
    along = ", ".join(f"tiles of {tile} along axis {axis}" for axis, tile in sorted(tiles.items()))
    return f"{qtype}[{','.join(map(str, shape))}]" + (f" in {along}" if along else "")
