"""An activation that is to be quantized: by the kernel that consumes it, if that kernel can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit._qarray_static import quantize_static
from fewbit.kernels import quantize_natively
from fewbit.qarray import HowToQuantize, QArray, quantize_with


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Deferred:
    """A float array and how to quantize it, as an operand of `dot_general` or `einsum`.

    With a `scale` (and a `zero_point`, if the method has one) it is not measured: these were stored
    when the model was calibrated.

    >>> import jax.numpy as jnp
    >>> Deferred(jnp.ones((2, 4)), HowToQuantize(qtype='int8')).quantized().qtype
    dtype('int8')
    """

    array: jax.Array
    how: HowToQuantize = field(metadata=dict(static=True))
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def quantized(self) -> QArray:
        """The QArray it stands for."""
        if self.scale is not None:
            return quantize_static(self.array, self.how, self.scale, self.zero_point)
        native = quantize_natively(self.array, self.how)
        return quantize_with(self.array, self.how) if native is None else native
