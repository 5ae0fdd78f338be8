"""What `fewbit doctor` says beyond versions and kernels: fp8 units, Keras' backend, settings."""

import json
import os
from pathlib import Path
from typing import Any

from fewbit._files import read_file
from fewbit._settings import VARIABLES, is_on, unknown_variables

_CPU_UNITS = {"amx_fp8": "AMX-FP8", "avx10_2": "AVX10.2", "avx10.2": "AVX10.2"}
_FIRST_FP8_GPU = 8.9  # NVIDIA Ada; Hopper is 9.0
_TPU_WITH_FP8 = ("7", "ironwood")

_MSG_CPU_NATIVE = (
    "native on this CPU ({units}): emulate=True with the XLA_FLAGS of docs/keras.md lets XLA use "
    "it; fewbit's own kernels decode fp8"
)
_MSG_DEVICE_NATIVE = "native on this {device}"
_MSG_NONE = (
    "not native here ({device} has no fp8 units): fp8 weights are decoded in the kernels, which "
    "saves memory; int8 is the fast 8-bit type"
)
_MSG_BACKEND = "{found}, which fewbit.keras runs on"
_MSG_OTHER_BACKEND = "{found}; fewbit.keras needs jax: set KERAS_BACKEND=jax"


def fp8_here(devices: Any = None, cpu_flags: frozenset[str] | None = None) -> str:
    """Whether products of fp8 numbers would run on units of this machine made for them.

    >>> fp8_here([], frozenset(['avx512f', 'amx_fp8'])).partition(':')[0]
    'native on this CPU (AMX-FP8)'
    >>> fp8_here([], frozenset(['avx512f'])).partition(':')[0]
    'not native here (the CPU has no fp8 units)'
    """
    for device in _accelerators() if devices is None else devices:
        kind = f"{device.platform.upper()} ({device.device_kind})"
        native = _gpu_has_fp8(device) if device.platform != "tpu" else _tpu_has_fp8(device)
        if native:
            return _MSG_DEVICE_NATIVE.format(device=kind)
        return _MSG_NONE.format(device=f"this {kind}")
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    units = sorted({_CPU_UNITS[flag] for flag in flags if flag in _CPU_UNITS})
    if units:
        return _MSG_CPU_NATIVE.format(units=", ".join(units))
    return _MSG_NONE.format(device="the CPU")


def keras_backend(environment: Any = os.environ) -> str:
    """The backend that Keras would take, read as Keras reads it; Keras is not imported.

    >>> keras_backend({'KERAS_BACKEND': 'jax'})
    'jax, which fewbit.keras runs on'
    >>> keras_backend({'KERAS_BACKEND': 'torch'})
    'torch; fewbit.keras needs jax: set KERAS_BACKEND=jax'
    """
    found = environment.get("KERAS_BACKEND") or _configured(environment) or "tensorflow"
    return (_MSG_BACKEND if found == "jax" else _MSG_OTHER_BACKEND).format(found=found)


def settings(environment: Any = os.environ) -> list[str]:
    """Fewbit's environment variables that are set; those that cannot be followed say so.

    >>> settings({'FEWBIT_PROGRESS': 'no', 'FEWBIT_BACKENDS': 'xla'})
    ["FEWBIT_PROGRESS is 'no', and can be 0 or 1. Set it to one of these, or unset it.",
     'FEWBIT_BACKENDS is set, but fewbit does not read it; did you mean FEWBIT_BACKEND?']
    """
    said = []
    for name in (name for name in VARIABLES if name in environment):
        try:
            if name == "FEWBIT_PROGRESS":
                is_on(name, environment)
            said.append(f"{name}={environment[name]}")
        except ValueError as error:
            said.append(str(error))
    return said + unknown_variables(environment)


def _configured(environment: Any) -> str | None:
    home = Path(environment.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return json.loads(read_file(home / "keras.json")).get("backend")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _accelerators() -> list[Any]:
    import jax

    return [device for device in jax.devices() if device.platform != "cpu"]


def _gpu_has_fp8(device: Any) -> bool:
    try:
        return float(device.compute_capability) >= _FIRST_FP8_GPU
    except (AttributeError, TypeError, ValueError):
        return False


def _tpu_has_fp8(device: Any) -> bool:
    kind = device.device_kind.lower().replace("tpu", "").strip(" v")
    return kind.startswith(_TPU_WITH_FP8)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
