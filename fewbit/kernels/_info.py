"""What a person wants to know about the kernels of this machine, as one printable value."""

from __future__ import annotations

import contextlib
import dataclasses
import os

from fewbit.kernels._finish import BY_STEPS, xla_steps
from fewbit.kernels._library import asked_backend, native_part

# For a machine without the compiled part: the CPU flags that the kernels of each level need.
# Words as in fewbit/native/isa/isa.cc.
_ISA_FLAGS = {
    "avx512_vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
}

_MSG_FUSED = "done by a product's kernel, by the steps that XLA takes here ({steps})"
_MSG_APART = "done by XLA after a product: no kernel takes the steps that XLA takes here"


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """Which kernels this process can use. Prints as a few readable lines.

    Attributes:
      native: whether the compiled part is open and registered.
      missing: why it is not; None if it is.
      path: the library's file, if one was found.
      built_with: the jaxlib (and FFI version) it was compiled against.
      isa: the instruction set in use: the best of this CPU, or the one that FEWBIT_ISA names.
      threads: CPUs this process may use.
      backend: 'native' if its kernels are used here, else 'xla'.
      forced: who asked for that backend; None if nobody did.
      refused: a setting that cannot be followed, with which every product is an error.
    """

    native: bool
    missing: str | None
    path: str | None
    built_with: str | None
    isa: str
    threads: int
    backend: str = "native"
    forced: str | None = None
    refused: str | None = None

    @property
    def steps(self) -> str | None:
        """How the kernels compute silu and sigmoid with XLA's bits; None if XLA alone does.

        The first question in a process compiles a small function with XLA to compare.
        """
        return xla_steps() if self.native and self.backend == "native" else None

    def __str__(self) -> str:
        if self.refused is not None:
            native = f"no, and products are an error: {self.refused}"
        elif self.native:
            native = f"yes, {self.path} (built with {self.built_with})"
            if self.backend == "xla":
                native += f"; not used, XLA runs everything: {self.forced}"
        else:
            native = f"no, XLA runs everything: {self.missing}"
        by_steps = _MSG_APART if self.steps is None else _MSG_FUSED.format(steps=self.steps)
        if self.backend == "xla":
            by_steps = "done by XLA" if self.refused is None else "-"
        return "\n".join(
            (
                f"native kernels: {native}",
                f"CPU:            {self.isa}",
                f"threads:        {self.threads}",
                f"{', '.join(BY_STEPS) + ':':16}{by_steps}",
            )
        )


def info() -> KernelInfo:
    """Describes the kernels of this machine; `print` it.

    >>> from fewbit import kernels
    >>> print(kernels.info())
    native kernels: ...
    CPU:            ...
    threads:        ...
    silu, sigmoid:  ...
    """
    part = native_part()
    missing, refused = part.missing, part.refused
    try:
        asked, who = asked_backend()
    except ValueError as error:  # to be told here, and raised where a product is made
        asked, who = "xla", str(error)
        missing = refused = who
    return KernelInfo(
        native=missing is None,
        missing=missing,
        path=part.path,
        built_with=f"jaxlib {part.jaxlib}, FFI {part.ffi}" if part.jaxlib else None,
        isa=part.isa or isa_from_flags(_cpu_flags()),
        threads=usable_cpus(),
        backend="native" if asked != "xla" and missing is None else "xla",
        forced=None if asked is None else who,
        refused=refused if asked != "xla" or refused == who else None,
    )


def isa_from_flags(flags: set[str]) -> str:
    """The instruction set level that CPU flags (as in /proc/cpuinfo) allow.

    >>> isa_from_flags({"sse2", "avx2", "fma", "f16c"})
    'avx2'
    >>> isa_from_flags({"sse2"})
    'portable'
    """
    return next((level for level, needed in _ISA_FLAGS.items() if needed <= flags), "portable")


def usable_cpus() -> int:
    """CPUs that this process may run on, which inside a container can be fewer than exist.

    >>> usable_cpus() >= 1
    True
    """
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every operating system
        return os.cpu_count() or 1


def _cpu_flags() -> set[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()
