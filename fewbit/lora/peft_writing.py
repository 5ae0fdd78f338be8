"""Adapters to a folder that PEFT reads: adapter_model.safetensors and adapter_config.json."""

import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fewbit._atomic import move_into_place
from fewbit._plan_adapter import AdapterPlan
from fewbit.adapter_init import check_plan
from fewbit.adapter_run import check_adapters
from fewbit.boxes import is_box, unboxed
from fewbit.io._given_files import read_object
from fewbit.io._safetensors_header import dtype_name
from fewbit.io.errors import CheckpointError
from fewbit.io.safetensors_file import SafetensorsFile, SafetensorsWriter
from fewbit.lora import peft_names
from fewbit.lora.selecting import adapters as adapters_in
from fewbit.models import is_nnx

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONFIG_KEY = "fewbit.adapter_config"  # also inside the tensors' file: the two belong together
_BESIDE = (f".{TENSORS}.tmp-*", f".{CONFIG}.tmp-*")  # what a save that was killed leaves behind


def save_adapters(
    path: str | os.PathLike[str],
    params: Any,
    plan: Any = None,
    *,
    names: peft_names.Names = None,
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
    ...     fewbit.io.safetensors_file.SafetensorsFile(f'{folder}/adapter_model.safetensors').names
    ('base_model.model.up.lora_A.weight', 'base_model.model.up.lora_B.weight')
    """
    plans = planned("save_adapters", params, plan)
    values = {n: unboxed(v) if is_box(v) else v for n, v in adapters_in(params).items()}
    check_adapters({p.leaf: p for p in plans}, values, strict=True)
    modules = peft_names.module_names(plans, names)
    tensors: dict[str, np.ndarray] = {}
    for adapter in plans:
        a, b = (np.asarray(values[name]) for name in adapter.names)
        for index, module in peft_names.entries(adapter, modules[adapter.leaf]):
            pair = peft_names.to_peft(adapter, a[index], b[index])
            tensors |= zip(peft_names.tensor_names(adapter, module), pair, strict=True)
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
        text = (SafetensorsFile(path).metadata or {}).get(CONFIG_KEY, "{}")
        found = json.loads(text)
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
    if is_nnx(params):
        from fewbit.models.nnx_adapters import plans

        if plans(params):
            return plans(params)
    check_plan(name, plan)
    return plan.adapters


def strengths(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config without which the tensors mean something else."""
    return {k: config.get(k) for k in ("r", "lora_alpha", "rank_pattern", "alpha_pattern")}


def _config(
    plans: Sequence[AdapterPlan], modules: dict[str, str], base: str | None, task: str | None
) -> dict[str, Any]:
    """What PEFT reads. Modules whose rank or alpha is not the common one are in its patterns."""
    named = [
        (module, plan)
        for plan in plans
        for _, module in peft_names.entries(plan, modules[plan.leaf])
    ]
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
