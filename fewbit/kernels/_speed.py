"""Whether an operation, run as it will be run here, is slower than the float32 one it replaces."""

from typing import Any

import jax
from jax.export import is_symbolic_dim

# XLA's integer product needs a few rows to pay for quantizing them (bench/products.py); its integer
# convolution is as fast as float32 at best, and far slower at worst (bench/convolutions.py).
_ROWS_FOR_INT8 = 8


def runs_on(what: str, rows: int) -> str:
    """The plan's word for what runs a Site, with `slow` where float32 would be faster.

    Only this machine's own backend is judged, from measurements on CPUs; others get no verdict.

    >>> import jax
    >>> runs_on('dequantize + float dot', 1) if jax.default_backend() == 'cpu' else 'slow'
    'xla dequantize + float dot, slow'
    """
    if what.startswith("native"):
        return what
    text = f"xla {what}"
    if jax.default_backend() != "cpu":
        return text
    fast = what.startswith("int8") and not what.endswith("conv") and _many(rows)
    return text if fast else f"{text}, slow"


def _many(rows: Any) -> bool:
    # A symbolic batch may be many.
    return is_symbolic_dim(rows) or bool(rows >= _ROWS_FOR_INT8)
