"""Adapters saved to and loaded from folders that PEFT reads and writes, in its names and shapes.

`base_model.model.<module>.lora_A.weight` is (rank, in), `lora_B.weight` (out, rank); those of a
convolution are convolutions (rank, in, *window) and (out, rank, 1, ...); a table that is only
looked up in has `lora_embedding_A` (rank, rows) and `lora_embedding_B` (width, rank). Layers of a
stack and experts are modules of their own there: a name has a `{}` for each such axis.
"""

import json
import math
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit._util import SMALL_BYTES, PatternError, compile_pattern, move_into_place, nearest
from fewbit.adapters import check_adapters, check_leaf, check_plan, place
from fewbit.io import (
    CheckpointError,
    SafetensorsFile,
    SafetensorsWriter,
    cut,
    dtype_name,
    read_object,
)
from fewbit.lora._merge import adapters as adapters_in
from fewbit.lora._merge import with_adapters
from fewbit.models import front_end, is_nnx
from fewbit.planning import AdapterPlan, leaves_by_path, put_adapters
from fewbit.qarray import is_box, unboxed

PREFIX = "base_model.model."
_WEIGHTS = ("kernel", "weight", "embedding")  # a module's one weight: named after the module

Names = Mapping[str, str] | Callable[[str], str] | None

_MSG_UNKNOWN = (
    "names has an entry for {leaf!r}, and no adapter has that weight. The weights with adapters "
    "are {known}."
)
_MSG_PLACES = (
    "The name {name!r} for '{leaf}' needs {count} '{{}}', one for each axis of {axes}, got "
    "{found}: write for example {example!r}."
)
_MSG_TWICE = (
    "'{first}' and '{second}' both have the name {name!r}. Give each weight a name of its own."
)


def module_names(adapters: Sequence[AdapterPlan], names: Names = None) -> dict[str, str]:
    """The module of each weight in PEFT's files, by parameter path."""
    plain = {plan.leaf: _default(plan, adapters) for plan in adapters}
    if isinstance(names, Mapping):
        for leaf in names:
            if leaf not in plain:
                raise ValueError(_MSG_UNKNOWN.format(leaf=leaf, known=", ".join(plain)))
        found = {leaf: names.get(leaf, name) for leaf, name in plain.items()}
    else:
        found = {leaf: names(leaf) if names else name for leaf, name in plain.items()}
    taken: dict[str, str] = {}
    for plan in adapters:
        name, count = found[plan.leaf], len(plan.stack + plan.batch)
        if name.count("{}") != count:
            axes = "the stack" if plan.stack else "the experts"
            text = dict(name=name, leaf=plan.leaf, count=count, found=name.count("{}"), axes=axes)
            raise ValueError(_MSG_PLACES.format(**text, example=plain[plan.leaf]))
        if taken.setdefault(name, plan.leaf) != plan.leaf:
            raise ValueError(_MSG_TWICE.format(first=taken[name], second=plan.leaf, name=name))
    return found


def _default(plan: AdapterPlan, adapters: Sequence[AdapterPlan]) -> str:
    path, _, last = plan.leaf.rpartition("/")
    others = [a for a in adapters if a.leaf.rpartition("/")[0] == path]
    parts = (path if path and last in _WEIGHTS and len(others) == 1 else plan.leaf).split("/")
    return ".".join([parts[0], *["{}"] * len(plan.stack), *parts[1:], *["{}"] * len(plan.batch)])


def entries(plan: AdapterPlan, name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """Each layer and expert of an adapter, and its module's name."""
    for index in product(*map(range, plan.a_shape[: len(plan.stack + plan.batch)])):
        yield index, name.format(*index)


def tensor_names(plan: AdapterPlan, module: str) -> tuple[str, str]:
    """What the two factors of one module are called.

    >>> from fewbit.rules import LoraRule
    >>> plan = AdapterPlan('w', 'w:take0', 'take', (9, 4), (9, 4), (), (), ((0,),), ((1,),),
    ...                    'float32', LoraRule(rank=2, alpha=4.0))
    >>> tensor_names(plan, 'wte')
    ('base_model.model.wte.lora_embedding_A', 'base_model.model.wte.lora_embedding_B')
    """
    if plan.op == "take":
        return f"{PREFIX}{module}.lora_embedding_A", f"{PREFIX}{module}.lora_embedding_B"
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def shapes(plan: AdapterPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the two tensors of one module."""
    a, b = _one(plan)
    if plan.op == "conv_general_dilated":
        *window, channels, rank = a
        return (rank, channels, *window), (b[-1], rank, *[1] * len(window))
    return (plan.rank, prod(a[:-1])), (prod(b[1:]), plan.rank)


def _one(plan: AdapterPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    many = len(plan.stack + plan.batch)
    return plan.a_shape[many:], plan.b_shape[many:]


def to_peft(plan: AdapterPlan, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors of one module as PEFT keeps them."""
    if plan.op == "conv_general_dilated":
        return np.moveaxis(a, (-1, -2), (0, 1)), b.T.reshape(shapes(plan)[1])
    return a.reshape(-1, plan.rank).T, b.reshape(plan.rank, -1).T


def from_peft(plan: AdapterPlan, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `to_peft`."""
    if plan.op == "conv_general_dilated":
        return np.moveaxis(a, (0, 1), (-1, -2)), b.reshape(b.shape[:2]).T
    a_shape, b_shape = _one(plan)
    return a.T.reshape(a_shape), b.T.reshape(b_shape)


# --- Adapters to a folder that PEFT reads: adapter_model.safetensors and adapter_config.json ------

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONFIG_KEY = "fewbit.adapter_config"  # also inside the tensors' file: the two belong together
_BESIDE = (f".{TENSORS}.tmp-*", f".{CONFIG}.tmp-*")  # what a save that was killed leaves behind


def save_adapters(
    path: str | os.PathLike[str],
    params: Any,
    plan: Any = None,
    *,
    names: Names = None,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
) -> None:
    """Write the adapters alone to the folder `path`, named and turned as PEFT does.

    `params` is a parameter tree with its plan, or an NNX model. `names` maps a parameter's path to
    the module it is in the base model that others use, for example
    `{'layers/q/kernel': 'model.layers.{}.self_attn.q_proj'}` with a `{}` for the layer of a stack;
    a function of the path does too. Without it, modules are called as in the parameter tree.

    >>> import fewbit, jax, jax.numpy as jnp, tempfile
    >>> f = lambda params, x: x @ params['up']['kernel']
    >>> params, x = {'up': {'kernel': jnp.eye(4)}}, jnp.ones((1, 4))
    >>> plan = fewbit.plan(f, fewbit.LoraProvider(rank=2, alpha=4.0), params, x)
    >>> params = fewbit.lora.init(plan, params, jax.random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapters(folder, params, plan)
    ...     fewbit.io._safetensors.SafetensorsFile(f'{folder}/adapter_model.safetensors').names
    ('base_model.model.up.lora_A.weight', 'base_model.model.up.lora_B.weight')
    """
    plans = planned("save_adapters", params, plan)
    values = {n: unboxed(v) if is_box(v) else v for n, v in adapters_in(params).items()}
    check_adapters({p.leaf: p for p in plans}, values, strict=True)
    modules = module_names(plans, names)
    tensors: dict[str, np.ndarray] = {}
    for adapter in plans:
        a, b = (np.asarray(values[name]) for name in adapter.names)
        for index, module in entries(adapter, modules[adapter.leaf]):
            pair = to_peft(adapter, a[index], b[index])
            tensors |= zip(tensor_names(adapter, module), pair, strict=True)
    config = _config(plans, modules, base_model_name_or_path, task_type)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(tensors.items())
    infos = [(name, str(dtype_name(array.dtype)), array.shape) for name, array in ordered]
    own = {"format": "pt", CONFIG_KEY: json.dumps(config, sort_keys=True)}
    for leftover in (file for pattern in _BESIDE for file in folder.glob(pattern)):
        leftover.unlink(missing_ok=True)
    staged = folder / f".{CONFIG}.tmp-{secrets.token_hex(6)}"
    try:
        staged.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        with SafetensorsWriter(folder / TENSORS, infos, own) as writer:
            for name, array in ordered:
                writer.write(name, array)
            if config_inside(folder / TENSORS) and not _same_strength(folder / CONFIG, config):
                # New tensors under an old alpha would be another adapter, so for a moment there is
                # no config: the one inside the tensors' file, old or new, is read then.
                (folder / CONFIG).unlink(missing_ok=True)
        move_into_place(staged, folder / CONFIG)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def config_inside(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config that `save_adapters` put into a file of tensors; empty in those of others."""
    try:
        found = json.loads((SafetensorsFile(path).metadata or {}).get(CONFIG_KEY, "{}"))
    except (CheckpointError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and "peft_type" in found else {}


def _same_strength(path: Path, config: dict[str, Any]) -> bool:
    try:
        return strengths(read_object(path)) == strengths(config)
    except CheckpointError:
        return False


def planned(name: str, params: Any, plan: Any) -> tuple[AdapterPlan, ...]:
    """The plans of the adapters in a tree (from `plan`) or in an NNX model (its own)."""
    if is_nnx(params) and (own := front_end(params).plans(params)):
        return own
    check_plan(name, plan)
    return plan.adapters


def strengths(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config without which the tensors mean something else."""
    return {k: config.get(k) for k in ("r", "lora_alpha", "rank_pattern", "alpha_pattern")}


def _config(
    plans: Sequence[AdapterPlan], modules: dict[str, str], base: str | None, task: str | None
) -> dict[str, Any]:
    """What PEFT reads. Modules whose rank or alpha is not the common one are in its patterns."""
    named = [(module, plan) for plan in plans for _, module in entries(plan, modules[plan.leaf])]
    rank = Counter(plan.rank for _, plan in named).most_common(1)[0][0]
    alpha = Counter(plan.rule.alpha for _, plan in named).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": max(plan.rule.dropout for plan in plans),
        "target_modules": sorted(module for module, _ in named),
        "rank_pattern": {m: plan.rank for m, plan in named if plan.rank != rank},
        "alpha_pattern": {m: _plain(p.rule.alpha) for m, p in named if p.rule.alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _plain(number: float) -> int | float:
    return int(number) if float(number).is_integer() else number


# --- Adapters from a folder that PEFT or `save_adapters` wrote ------------------------------------

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
    names: Names = None,
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
        config = _checked(folder / CONFIG, read_object(folder / CONFIG, SMALL_BYTES))
        if inside:
            _check_together(folder / CONFIG, config, inside)
    modules = module_names(plans, names)
    made: dict[str, np.ndarray] = {}
    used: set[str] = set()
    for adapter in plans:
        module = modules[adapter.leaf]
        taken, factors = _factors(file, adapter, module, config, folder / CONFIG, strict)
        used |= taken
        made |= factors
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


def _checked(path: Any, config: dict[str, Any]) -> dict[str, Any]:
    kind = "DoRA" if config.get("use_dora") else str(config.get("peft_type"))
    if kind != "LORA":
        raise CheckpointError(path, _MSG_KIND.format(kind=kind[:60]))
    for key in ("r", "lora_alpha"):
        _check_number(path, key, config.get(key), positive=True)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.setdefault(key, {}) or {}
        if not isinstance(patterns, Mapping):
            raise CheckpointError(path, f"has no usable {key}", expected="an object", found="other")
        for pattern, value in patterns.items():
            _check_number(path, f"{key}[{cut(pattern)}]", value)
            _check_pattern(path, key, pattern)
    if config.get("use_rslora"):
        fixed = round(config["lora_alpha"] * math.sqrt(config["r"]), 6)
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
    trained = strengths(inside)
    differ = [key for key in trained if trained[key] != config.get(key)]
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
) -> tuple[set[str], dict[str, np.ndarray]]:
    """The tensors an adapter takes, and its two factors; nothing where it keeps what it has."""
    pairs = {}
    used: set[str] = set()
    for index, module in entries(plan, template):
        tensors = tensor_names(plan, module)
        absent = [tensor for tensor in tensors if tensor not in file]
        if absent:
            if not strict:
                return set(), {}
            near = nearest(absent[0], file.names, "; the nearest is {}", cutoff=0.6, show=str)
            text = _MSG_MISSING.format(leaf=plan.leaf, tensor=absent[0], near=near)
            raise CheckpointError(file.path, text)
        _check_alpha(config_path, config, plan, module)
        for tensor, wanted in zip(tensors, shapes(plan), strict=True):
            _check_tensor(file, tensor, wanted, plan)
        a, b = (_numbers(file, tensor, plan) for tensor in tensors)
        pairs[index] = from_peft(plan, a, b)
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
        index = tuple(map(int, bad[0]))
        what = _MSG_NOT_FINITE.format(count=len(bad), dtype=plan.dtype, index=index)
        raise CheckpointError(file.path, what, tensor=tensor, fix=_FIX_NOT_FINITE)
    return array


def _check_tensor(
    file: SafetensorsFile, tensor: str, wanted: tuple[int, ...], plan: AdapterPlan
) -> None:
    dtype, found = file.info(tensor).dtype, tuple(file.info(tensor).shape)
    if dtype not in _FLOATS:
        text = _MSG_DTYPE.format(config=CONFIG, kinds=", ".join(_FLOATS))
        raise CheckpointError(file.path, f"is {dtype}, and {text}", tensor=tensor, fix=_FIX_DTYPE)
    if found == wanted:
        return
    axis = 0 if tensor.endswith(("A.weight", "_A")) else 1
    differ = [k for k, n in enumerate(wanted) if found[k : k + 1] != (n,)]
    if len(found) == len(wanted) and differ == [axis]:
        rank = dict(found=found[axis], wanted=plan.rank)
        text = _MSG_RANK.format(**rank, leaf=plan.leaf, rule=plan.rule)
        raise CheckpointError(file.path, text, tensor=tensor)
    what = f"does not fit '{plan.leaf}'"
    raise CheckpointError(file.path, what, tensor=tensor, expected=wanted, found=found)


def _check_alpha(path: Path, config: Mapping[str, Any], plan: AdapterPlan, module: str) -> None:
    # PEFT's patterns name a module by the end of its path, as a regular expression.
    patterns = (config["alpha_pattern"] or {}).items()
    matching = (v for key, v in patterns if compile_pattern(_at_the_end(key)).matches(module))
    found = next(matching, config["lora_alpha"])
    if found != plan.rule.alpha:
        times = plan.rule.alpha / found if found else math.inf
        text = dict(found=found, module=module, leaf=plan.leaf, wanted=plan.rule.alpha)
        raise CheckpointError(path, _MSG_ALPHA.format(**text, times=times, rule=plan.rule))


def _at_the_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"


def _check_unused(file: SafetensorsFile, used: set[str], strict: bool) -> None:
    extra = [name for name in file.names if name not in used]
    if extra and strict:
        module = extra[0].removeprefix(PREFIX).partition(".lora_")[0]
        text = _MSG_EXTRA.format(count=len(extra), first=extra[0], module=module)
        raise CheckpointError(file.path, text)
    if extra:
        text = _MSG_IGNORED.format(path=file.path, count=len(extra), first=extra[0])
        warnings.warn(text, stacklevel=3)
