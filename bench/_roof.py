"""The roofs of this machine: read bandwidth and products per second, measured by a few C loops."""

from __future__ import annotations

import concurrent.futures
import ctypes
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable

import numpy as np
from _measure import threads

BUFFER_BYTES = 512 * 2**20  # far beyond any cache
LOOPS = 2_000_000
HANDOVERS = 20_000
CHAINS = 12  # products per turn of the loops in _roof.c

# name -> (function in _roof.c, multiply-adds per instruction), per instruction set
_PEAKS = {
    "avx2": {"float32": ("roof_f32_avx2", 8), "int8": ("roof_int8_avx2", 16),
             "int4": ("roof_int4_avx2", 32)},
    "avx512_vnni": {"float32": ("roof_f32_avx512", 16), "int8": ("roof_int8_avx512", 64)},
}  # fmt: skip


class Roof:
    """`read_seconds()` is one pass over the buffer by all threads; `peaks(isa)` in GOP/s."""

    def __init__(self) -> None:
        self._library = _compile()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads())
        # Written to, so that pages are really there.
        self._buffer = np.ones(BUFFER_BYTES, np.uint8)

    def _together(self, call: Callable[[int], object]) -> float:
        """Seconds until every thread has finished its share; ctypes lets go of the GIL."""
        start = time.perf_counter()
        list(self._pool.map(call, range(threads())))
        return time.perf_counter() - start

    def read_seconds(self) -> float:
        share = BUFFER_BYTES // threads()
        address = self._buffer.ctypes.data

        def read(i: int) -> None:
            begin = ctypes.c_void_p(address + i * share)
            self._library.roof_read(begin, ctypes.c_int64(share))

        return self._together(read)

    def gigabytes_per_second(self) -> float:
        return BUFFER_BYTES / self.read_seconds() / 1e9

    def handover_ns(self) -> float | None:
        """How long a line of memory takes from one core to another; None on a single core."""
        if threads() < 2:
            return None
        line = np.zeros(1, np.int64)
        address = ctypes.c_void_p(line.ctypes.data)

        def hand(i: int) -> None:
            if i < 2:
                self._library.roof_handover(address, ctypes.c_int64(i), ctypes.c_int64(HANDOVERS))

        seconds = []
        for _ in range(5):
            line[0] = 0
            seconds.append(self._together(hand))
        return min(seconds) / HANDOVERS / 2 * 1e9

    def peaks(self, isa: str) -> dict[str, float]:
        """Best of a few runs, in GOP/s (a multiply-add is two); empty for an ISA without loops."""
        found = {}
        for name, (function, width) in _PEAKS.get(isa, {}).items():
            loop = getattr(self._library, function)
            seconds = min(
                self._together(lambda _, loop=loop: loop(ctypes.c_int64(LOOPS))) for _ in range(25)
            )
            found[name] = 2 * width * CHAINS * LOOPS * threads() / seconds / 1e9
        return found


def _compile() -> ctypes.CDLL:
    source = pathlib.Path(__file__).with_name("_roof.c")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "roof.so"
        command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    return loaded


if __name__ == "__main__":
    roof = Roof()
    print("ns from core to core:", *(f"{roof.handover_ns():.0f}" for _ in range(8)))
    print("GB/s:", *(f"{roof.gigabytes_per_second():.1f}" for _ in range(8)))
    for _isa in _PEAKS:
        with open("/proc/cpuinfo", encoding="utf-8") as _cpu:
            if _isa in _cpu.read():
                print(_isa, {k: round(v) for k, v in roof.peaks(_isa).items()})
