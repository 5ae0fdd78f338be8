"""Which layout a quantized parameter is kept in: what this machine's kernels read, or true width.

`pack` and `unpack` exchange layouts of whole trees; there is never a second copy of the codes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fewbit import kernels
from fewbit._qarray_checks import check_tree
from fewbit._qarray_panels import matrix_length, to_panels, why_no_panels
from fewbit.numerics import dtype_bits, format_of
from fewbit.packing_panels import COLUMNS, ROWS, padded
from fewbit.qarray import HowToQuantize, QArray, WithAux
from fewbit.qarray import pack as pack_codes
from fewbit.qarray import unpack as unpack_codes

_MSG_LAYOUT = (
    "pack(tree, layout={found!r}) is not known: 'native' (what this machine's kernels read) or "
    "'bits' (codes at true width, as bytes). fewbit.unpack(tree) gives one code per element."
)
# A matrix that padding to whole panels would blow up by more than this stays as it is. 48, 96, 100
# or 200 columns are still multiplied as fast as by XLA or up to five times faster; at twice the
# width (33 columns) many rows are not (docs/performance.md).
_MOST_PADDING = 1.34
# The kernel of a convolution is read once per image, not once per row, and is small.
_MOST_CONV_PADDING = 2.75


def for_kernels(q: QArray, how: HowToQuantize) -> QArray:
    """The array in panels where a native kernel will read it, else as it is.

    >>> import jax.numpy as jnp
    >>> from fewbit.qarray import quantize_with
    >>> how = HowToQuantize(qtype='int8', channelwise_axes=(1,), roles='kn')
    >>> for_kernels(quantize_with(jnp.ones((4, 3)), how), how).layout  # mostly padding
    'plain'
    """
    if not _fits_panels(q, how):
        return q
    roles = str(how.roles)
    packed = to_panels(q, roles)
    names = _column_names(q, roles)
    if names is None:
        return packed
    mesh = q.data.sharding.mesh

    stack = roles.count("l")

    def place(part):  # every part has its panels behind the stack axes, but a tensor's one scale
        spec = PartitionSpec(*[None] * stack, names) if part.ndim > stack + 2 else PartitionSpec()
        return jax.device_put(part, NamedSharding(mesh, spec))

    return jax.tree.map(place, packed)


def would_be_faster(q: QArray, how: HowToQuantize) -> bool:
    """Whether native kernels would read this parameter if it were packed."""
    roles = how.roles
    if roles is None or q.layout == "panels" or not kernels.native_available():
        return False
    if len(roles) != q.ndim or why_no_panels(q, roles) is not None:
        return False
    k, n = (matrix_length(q.shape, roles, role) for role in "kn")
    most = _MOST_CONV_PADDING if "c" in roles else _MOST_PADDING
    return padded(k, ROWS) * padded(n, COLUMNS) <= most * k * n


def _fits_panels(q: QArray, how: HowToQuantize) -> bool:
    return would_be_faster(q, how) and _column_names(q, str(how.roles)) != _ELSEWHERE


_ELSEWHERE = "elsewhere"


def _column_names(q: QArray, roles: str) -> Any:
    """The mesh axes that share the columns (None: no mesh, or whole on each device).

    `_ELSEWHERE` where panels cannot be placed so: the summed or the stack axes are split, a panel
    would be cut open, or where the array will live is not known yet.
    """
    if isinstance(q.data, jax.core.Tracer):
        return _ELSEWHERE
    sharding = getattr(q.data, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None if sharding.mesh.size <= 1 else _ELSEWHERE
    if sharding is None or len(sharding.device_set) == 1 or sharding.is_fully_replicated:
        return None
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit in sharding.mesh.axis_types:
        return _ELSEWHERE
    spec = (*sharding.spec, *[None] * q.ndim)[: q.ndim]
    first = roles.index("n")
    if any(entry is not None for axis, entry in enumerate(spec) if axis != first):
        return _ELSEWHERE
    names = (spec[first],) if isinstance(spec[first], str) else tuple(spec[first])
    ways = math.prod(sharding.mesh.shape[name] for name in names)
    columns = math.prod(d for d, r in zip(q.shape, roles, strict=True) if r == "n")
    return names if columns % (ways * COLUMNS) == 0 and q.shape[first] % ways == 0 else _ELSEWHERE


def pack(tree: Any, *, layout: str = "native") -> Any:
    """Every quantized parameter in the layout that this machine's kernels read.

    Parameters that no kernel reads get their codes at true width (int3 in 3 bits); those whose type
    is as narrow as its codes stay as they are, one code per element.

    `layout='bits'` gives all of them codes at true width, as bytes: the form for files of other
    libraries, which need not know a type of 4 bits. `pack(tree)` makes it this machine's again.

    >>> import jax.numpy as jnp
    >>> import fewbit
    >>> pack({'w': fewbit.quantize(jnp.ones(16), 'int4')})['w'].layout
    'bits'
    """
    check_tree("pack", tree)
    if layout not in ("native", "bits"):
        raise ValueError(_MSG_LAYOUT.format(found=layout))

    def one(x):
        if isinstance(x, WithAux) and isinstance(x.array, QArray):
            if layout == "bits":
                return x.replace(array=pack_codes(unpack_codes(x.array)))
            return x.replace(array=_packed(x.array, x.how))
        return pack_codes(x) if isinstance(x, QArray) else x

    return jax.tree.map(one, tree, is_leaf=_is_stored)


def _packed(q: QArray, how: HowToQuantize) -> QArray:
    if _fits_panels(q, how):
        return for_kernels(unpack_codes(q), how)
    if q.layout == "panels":
        return q
    return pack_codes(q) if _is_wider_than_its_codes(q) else unpack_codes(q)


def _is_wider_than_its_codes(q: QArray) -> bool:
    """Whether plain codes take more memory than packed ones: int3 does, int4 does not."""
    row = format_of(q.qtype)
    return dtype_bits(row.storage) > row.bits


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
