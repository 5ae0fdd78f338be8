"""Where a report was made: versions and the machine, without names or paths of people."""

import datetime
import importlib.metadata
import platform

import jax

from fewbit import kernels
from fewbit._version import __version__

_LIBRARIES = ("jax", "jaxlib", "numpy", "flax")


def facts() -> list[tuple[str, str]]:
    """Label and text of each fact.

    >>> [name for name, _ in facts()][:2]
    ['Made', 'fewbit']
    """
    now = datetime.datetime.now(datetime.UTC)
    found = [("Made", f"{now:%Y-%m-%d %H:%M} UTC"), ("fewbit", __version__)]
    for name in _LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    info = kernels.info()
    native = (
        f"native kernels for {info.isa}" if info.native else f"no native kernels: {info.missing}"
    )
    found += [
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("Devices", _devices()),
        ("CPU", f"{_cpu_model()}, {info.threads} usable threads, {native}"),
    ]
    return found


def _devices() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
