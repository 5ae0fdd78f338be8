"""Which layout a quantized parameter is kept in: what this machine's kernels read, or true width.

`pack` and `unpack` exchange layouts of whole trees; there is never a second copy of the codes.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from fewbit import kernels
from fewbit._qarray_checks import check_tree
from fewbit._qarray_panels import to_panels, why_no_panels
from fewbit.packing_panels import COLUMNS, ROWS, padded
from fewbit.qarray import HowToQuantize, QArray, WithAux
from fewbit.qarray import pack as pack_codes
from fewbit.qarray import unpack as unpack_codes

# A matrix that padding to whole panels would blow up by more than this stays as it is.
_MOST_PADDING = 1.25


def for_kernels(q: QArray, how: HowToQuantize) -> QArray:
    """The array in panels where a native kernel will read it, else as it is.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize_with
    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(1,), roles='kn')
    >>> for_kernels(quantize_with(jnp.ones((4, 3)), how), how).layout  # mostly padding
    'plain'
    """
    return to_panels(q, str(how.roles)) if _fits_panels(q, how) else q


def _fits_panels(q: QArray, how: HowToQuantize) -> bool:
    roles = how.roles
    if roles is None or q.layout == "panels" or not kernels.native_available():
        return False
    if len(roles) != q.ndim or why_no_panels(q, roles) is not None or not _on_one_device(q):
        return False
    k, n = (math.prod(d for d, r in zip(q.shape, roles, strict=True) if r == x) for x in "kn")
    return padded(k, ROWS) * padded(n, COLUMNS) <= _MOST_PADDING * k * n


def _on_one_device(q: QArray) -> bool:
    """Kernels run where the bytes are; arrays spread over devices are left to XLA."""
    if isinstance(q.data, jax.core.Tracer):
        return False  # where it will live is not known yet
    sharding = getattr(q.data, "sharding", None)
    return sharding is None or len(sharding.device_set) == 1


def pack(tree: Any) -> Any:
    """Every quantized parameter in the layout that this machine's kernels read.

    Parameters that no kernel reads get their codes at true width (int3 in 3 bits).

    >>> import jax.numpy as jnp
    >>> import fewbit
    >>> pack({'w': fewbit.quantize(jnp.ones(16), 'int4')})['w'].layout
    'bits'
    """
    check_tree("pack", tree)

    def one(x):
        if isinstance(x, WithAux) and isinstance(x.array, QArray):
            return x.replace(array=_packed(x.array, x.how))
        return pack_codes(x) if isinstance(x, QArray) else x

    return jax.tree.map(one, tree, is_leaf=_is_stored)


def _packed(q: QArray, how: HowToQuantize) -> QArray:
    if _fits_panels(q, how):
        return for_kernels(unpack_codes(q), how)
    return q if q.layout == "panels" else pack_codes(q)


def unpack(tree: Any) -> Any:
    """Every quantized parameter with one element of its storage type per code.

    >>> import jax.numpy as jnp
    >>> import fewbit
    >>> unpack(pack({'w': fewbit.quantize(jnp.ones(16), 'int4')}))['w'].layout
    'plain'
    """
    check_tree("unpack", tree)

    def one(x):
        if isinstance(x, WithAux) and isinstance(x.array, QArray):
            return x.replace(array=unpack_codes(x.array))
        return unpack_codes(x) if isinstance(x, QArray) else x

    return jax.tree.map(one, tree, is_leaf=_is_stored)


def _is_stored(x: Any) -> bool:
    return isinstance(x, QArray | WithAux)
