"""Adapters from a folder that PEFT or `save_adapters` wrote."""

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._files import SMALL_BYTES
from fewbit._patterns import PatternError, compile_pattern
from fewbit._plan_adapter import AdapterPlan
from fewbit.adapter_init import check_leaf, place
from fewbit.adapter_trees import leaves_by_path, put_adapters
from fewbit.io._given_files import read_object
from fewbit.io.errors import CheckpointError, cut
from fewbit.io.safetensors_file import SafetensorsFile
from fewbit.lora import peft_names
from fewbit.lora.peft_writing import CONFIG, TENSORS, config_inside, planned, strengths
from fewbit.lora.selecting import with_adapters
from fewbit.models import is_nnx

_MSG_MISSING = (
    "has no adapter for '{leaf}' ({tensor} is not there){near}. If the modules have other names "
    "there, say so: names={{{leaf!r}: '<module>'}}; to read what fits, pass strict=False"
)
_MSG_EXTRA = (
    "holds {count} tensors that no weight with an adapter takes, the first {first!r}. Let a "
    "LoraRule match the module, or map its name with names={{'<parameter path>': {module!r}}}; to "
    "leave them out, pass strict=False"
)
_MSG_RANK = (
    "has rank {found}, but the rule for '{leaf}' says {wanted}. Write rank={found} in {rule!r}"
)
_MSG_SHAPE = "does not fit '{leaf}'"
_MSG_ALPHA = (
    "was trained with lora_alpha={found} at {module}, but the rule for '{leaf}' says "
    "alpha={wanted}, which would make its adapter {times:.3g} times as strong. Write "
    "alpha={found} in {rule!r}"
)
_MSG_RSLORA = (
    "uses rsLoRA, whose strength is lora_alpha / sqrt(r), not lora_alpha / r. Set use_rslora to "
    "false and lora_alpha to {alpha} in it: the same numbers"
)
_MSG_KIND = "is a {kind} adapter, and fewbit reads LoRA (peft_type LORA without DoRA)"
_MSG_APART = (
    "does not belong to the {tensors} beside it: they differ in {what}. One of the two is from "
    "another save: the tensors were saved with {values}. Write that into it, or save the adapters "
    "again"
)
_FLOATS = ("F16", "BF16", "F32", "F64")
_MOST = 1e30
_MSG_PATTERN = "has a bad {key}: {reason}. Correct it, or save the adapters again"
_MSG_DTYPE = (
    "a LoRA factor is one of {kinds}: {config} names no scale by which other types could be read"
)
_FIX_DTYPE = "Convert it with the tool that made it, or save the adapter in bfloat16."
_MSG_NOT_FINITE = "holds {count} numbers that are NaN or infinite as {dtype}, the first at {index}"
_FIX_NOT_FINITE = (
    "They would spoil every result. Check the training run, or keep adapters in float32: the dtype "
    "of the weight that they belong to."
)
_MSG_IGNORED = (
    "{path}: {count} tensors were left out ({first}, ...): no weight with an adapter takes them."
)


def load_adapters(
    path: str | os.PathLike[str],
    params: Any,
    plan: Any = None,
    *,
    names: peft_names.Names = None,
    strict: bool = True,
) -> Any:
    """The parameters (or a clone of the NNX model) with the adapters of the folder `path`.

    Ranks and strengths are checked against the plan's rules. `names` is as in `save_adapters`. With
    `strict=False` modules that are missing keep the adapters they have, and others are left out
    with a warning.

    >>> import fewbit, jax, tempfile
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
    >>> plan = fewbit.plan(f, fewbit.LoraProvider(rank=2, alpha=4.0), params, x)
    >>> trained = fewbit.lora.init(plan, params, jax.random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fewbit.save_adapters(folder, trained, plan)
    ...     again = load_adapters(folder, params, plan)
    >>> bool((again['w_lora_a'] == trained['w_lora_a']).all())
    True
    """
    plans = planned("load_adapters", params, plan)
    folder = Path(path)
    file = SafetensorsFile(folder / TENSORS)
    inside = config_inside(folder / TENSORS)
    if inside and not (folder / CONFIG).exists():
        config = _checked(file.path, inside)  # of a save that was killed before its last rename
    else:
        config = _read_config(folder / CONFIG)
        _check_together(folder / CONFIG, config, inside)
    modules = peft_names.module_names(plans, names)
    made: dict[str, np.ndarray] = {}
    used: set[str] = set()
    for adapter in plans:
        found = _factors(file, adapter, modules[adapter.leaf], config, folder / CONFIG, strict)
        if found is not None:
            used.update(found[0])
            made |= found[1]
    _check_unused(file, used, strict)
    if is_nnx(params):
        return with_adapters(params, {n: jnp.asarray(v) for n, v in made.items()})
    leaves, by_name = leaves_by_path(params), {n: p for p in plans for n in p.names}
    for adapter in plans:
        check_leaf(adapter, leaves)
    placed = {
        name: place(jnp.asarray(value), name, by_name[name], leaves[by_name[name].leaf])
        for name, value in made.items()
    }
    return put_adapters(params, placed)


def _read_config(path: Path) -> dict[str, Any]:
    return _checked(path, read_object(path, SMALL_BYTES))


def _checked(path: Any, config: dict[str, Any]) -> dict[str, Any]:
    kind = "DoRA" if config.get("use_dora") else str(config.get("peft_type"))
    if kind != "LORA":
        raise CheckpointError(path, _MSG_KIND.format(kind=kind[:60]))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    _check_number(path, "r", rank, positive=True)
    _check_number(path, "lora_alpha", alpha, positive=True)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.setdefault(key, {}) or {}
        if not isinstance(patterns, Mapping):
            raise CheckpointError(path, f"has no usable {key}", expected="an object", found="other")
        for pattern, value in patterns.items():
            _check_number(path, f"{key}[{cut(pattern)}]", value)
            _check_pattern(path, key, pattern)
    if config.get("use_rslora"):
        fixed = round(alpha * math.sqrt(rank), 6)  # type: ignore[operator,arg-type]
        raise CheckpointError(path, _MSG_RSLORA.format(alpha=fixed))
    return config


def _check_number(path: Any, key: str, value: Any, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) < _MOST or (positive and value <= 0):
        what, words = f"has no usable {key}", "a positive number" if positive else "a number"
        raise CheckpointError(path, what, expected=words, found=cut(value))


def _check_pattern(path: Any, key: str, pattern: str) -> None:
    try:
        compile_pattern(pattern)  # on its own too: a parenthesis may close what is around it
        compile_pattern(_at_the_end(pattern))
    except (PatternError, re.error) as error:
        raise CheckpointError(path, _MSG_PATTERN.format(key=key, reason=error)) from None


def _check_together(path: Path, config: dict[str, Any], inside: dict[str, Any]) -> None:
    """Tensors that were trained with another strength are another adapter."""
    if not inside:
        return
    trained, outside = strengths(inside), strengths(config)
    differ = [key for key in trained if trained[key] != outside.get(key)]
    if differ:
        values = ", ".join(f"{key}={trained[key]!r}" for key in differ)
        text = _MSG_APART.format(tensors=TENSORS, what=", ".join(differ), values=values)
        raise CheckpointError(path, text)


def _factors(
    file: SafetensorsFile,
    plan: AdapterPlan,
    template: str,
    config: Mapping[str, Any],
    config_path: Path,
    strict: bool,
) -> tuple[set[str], dict[str, np.ndarray]] | None:
    """The tensors an adapter takes, and its two factors; None where it keeps what it has."""
    pairs = {}
    used: set[str] = set()
    for index, module in peft_names.entries(plan, template):
        tensors = peft_names.tensor_names(plan, module)
        absent = [tensor for tensor in tensors if tensor not in file]
        if absent:
            if not strict:
                return None
            near = get_close_matches(absent[0], file.names, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            text = _MSG_MISSING.format(leaf=plan.leaf, tensor=absent[0], near=hint)
            raise CheckpointError(file.path, text)
        _check_alpha(config_path, config, plan, module)
        for tensor, wanted in zip(tensors, peft_names.shapes(plan), strict=True):
            _check_tensor(file, tensor, wanted, plan)
        a, b = (_numbers(file, tensor, plan) for tensor in tensors)
        pairs[index] = peft_names.from_peft(plan, a, b)
        used.update(tensors)
    made = {}
    for k, (name, shape) in enumerate(plan.shapes.items()):
        whole = np.empty(shape, jnp.dtype(plan.dtype))
        for index, pair in pairs.items():
            whole[index] = pair[k].astype(whole.dtype)
        made[name] = whole
    return used, made


def _numbers(file: SafetensorsFile, tensor: str, plan: AdapterPlan) -> np.ndarray:
    """A factor in the plan's type, in which each number must be one."""
    with np.errstate(over="ignore"):
        array = file.read(tensor, copy=True).astype(jnp.dtype(plan.dtype))
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        text = dict(count=len(bad), dtype=plan.dtype, index=tuple(map(int, bad[0])))
        what = _MSG_NOT_FINITE.format(**text)
        raise CheckpointError(file.path, what, tensor=tensor, fix=_FIX_NOT_FINITE)
    return array


def _check_tensor(
    file: SafetensorsFile, tensor: str, wanted: Sequence[int], plan: AdapterPlan
) -> None:
    dtype, found = file.info(tensor).dtype, tuple(file.info(tensor).shape)
    if dtype not in _FLOATS:
        text = _MSG_DTYPE.format(config=CONFIG, kinds=", ".join(_FLOATS))
        raise CheckpointError(file.path, f"is {dtype}, and {text}", tensor=tensor, fix=_FIX_DTYPE)
    if found == tuple(wanted):
        return
    axis = 0 if tensor.endswith(("A.weight", "_A")) else 1
    rank = found[axis] if len(found) == len(wanted) else None
    others = [n for k, n in enumerate(found) if k != axis]
    if rank is not None and others == [n for k, n in enumerate(wanted) if k != axis]:
        text = _MSG_RANK.format(found=rank, wanted=plan.rank, leaf=plan.leaf, rule=plan.rule)
        raise CheckpointError(file.path, text, tensor=tensor)
    what = _MSG_SHAPE.format(leaf=plan.leaf)
    raise CheckpointError(file.path, what, tensor=tensor, expected=tuple(wanted), found=found)


def _check_alpha(path: Path, config: Mapping[str, Any], plan: AdapterPlan, module: str) -> None:
    found = _of_pattern(config["alpha_pattern"] or {}, module, config["lora_alpha"])
    if found != plan.rule.alpha:
        times = plan.rule.alpha / found if found else math.inf
        text = dict(found=found, module=module, leaf=plan.leaf, wanted=plan.rule.alpha)
        raise CheckpointError(path, _MSG_ALPHA.format(**text, times=times, rule=plan.rule))


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's patterns name a module by the end of its path, as a regular expression."""
    for key, value in pattern.items():
        if compile_pattern(_at_the_end(key)).matches(module):
            return value
    return default


def _at_the_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"


def _check_unused(file: SafetensorsFile, used: set[str], strict: bool) -> None:
    extra = [name for name in file.names if name not in used]
    if not extra:
        return
    if strict:
        module = extra[0].removeprefix(peft_names.PREFIX).partition(".lora_")[0]
        text = _MSG_EXTRA.format(count=len(extra), first=extra[0], module=module)
        raise CheckpointError(file.path, text)
    text = _MSG_IGNORED.format(path=file.path, count=len(extra), first=extra[0])
    warnings.warn(text, stacklevel=3)
