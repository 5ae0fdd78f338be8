"""Which format a Hugging Face checkpoint is in: what config.json says of its quantization."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fewbit.io._errors import CheckpointError, cut, read_object
from fewbit.io.foreign import _awq, _compressed, _fp8, _gptq

FORMATS: dict[str, ModuleType] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
# Where tools put their settings, the newest habit first.
CONFIG_FILES = ("config.json", "quantize_config.json", "quant_config.json")
_KEYS = ("quantization_config", "compression_config")

_MSG_UNKNOWN = "is quantized with {found}, which is not read; {known} are"
_FIX_UNKNOWN = (
    "Dequantize it with the tool that made it and quantize the float checkpoint: "
    "fewbit.quantize_checkpoint(src, dst, plan)."
)
_MSG_NO_CONFIG = f"has none of {', '.join(CONFIG_FILES)}"
_MSG_SETTINGS = "has a quantization_config that is no object ({found})"


def read_config(place: str, *, named: bool = False) -> dict[str, Any] | None:
    """The settings in a folder, or (`named`) in a file; None where a folder has none.

    >>> read_config('/nowhere') is None
    True
    """
    if named and not os.path.isdir(place):
        return _settings(place)
    paths = [os.path.join(place, name) for name in CONFIG_FILES]
    there = [path for path in paths if os.path.exists(path)]
    if named and not there:
        raise CheckpointError(place, _MSG_NO_CONFIG)
    found = map(_settings, there)
    return next((one for one in found if any(one.get(key) for key in _KEYS)), None)


def _settings(path: str) -> dict[str, Any]:
    found = read_object(path)
    name = os.path.basename(path)
    if name in CONFIG_FILES[1:] and not any(found.get(key) for key in _KEYS):
        method = "gptq" if name == "quantize_config.json" else "awq"
        return {"quantization_config": {"quant_method": method, **found}}
    return found


def quantization_of(
    config: Mapping[str, Any] | None, path: str = "the checkpoint"
) -> tuple[str, Mapping[str, Any]] | None:
    """The method and its settings, None for a float checkpoint.

    >>> quantization_of({'quantization_config': {'quant_method': 'gptq', 'bits': 4}})
    ('gptq', {'quant_method': 'gptq', 'bits': 4})
    """
    settings = next((config[key] for key in _KEYS if config and config.get(key)), None)
    if settings is None and config and "quant_method" in config:  # the settings themselves
        settings = config
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(path, _MSG_SETTINGS.format(found=cut(settings)))
    method = str(settings.get("quant_method", "")).replace("_", "-").lower()
    if not method and "config_groups" in settings:
        method = "compressed-tensors"
    if method not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        what = _MSG_UNKNOWN.format(found=cut(settings.get("quant_method")), known=known)
        raise CheckpointError(path, what, fix=_FIX_UNKNOWN)
    return method, settings
