"""Emulation: values rounded to few bits, arithmetic in float.

The graph is quantize, dequantize, float product, with one activation scale per tensor: what Intel
Neural Compressor computes, and the pattern that XLA's oneDNN rewrite knows on CPUs with fp8 units.
Ranges here hold zero, though: activations that keep away from it have a coarser scale than there,
and constant ones are not lost.
"""

from collections.abc import Sequence
from typing import Any

import jax

from fewbit import current
from fewbit._qarray_static import quantize_static
from fewbit.modes.provider import QuantizationProvider, as_float
from fewbit.modes.ptq import PtqProvider, activation_hows
from fewbit.numerics import format_of
from fewbit.qarray import HowToQuantize, QArray, dequantize, quantize_with

# The second product of Keras' MultiHeadAttention is of the softmax and the values; jnp.einsum swaps
# its operands.
PROBABILITIES = "einsum1"


def range_of_probabilities(qtype: Any) -> str:
    """The calibration method for values that are known to lie between 0 and 1.

    >>> range_of_probabilities('int8'), range_of_probabilities('fp8_e4m3')
    ('fixed,0,1', 'fixed,-1,1')
    """
    return "fixed,0,1" if format_of(qtype).asymmetric is not None else "fixed,-1,1"


class EmulatingProvider(PtqProvider):
    """Every product in float, of operands that went through few bits and back.

    With `attention`, of Keras' MultiHeadAttention, the second einsum has a softmax on its right,
    whose range is known.
    """

    attention = False

    def dot_general(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("dot_general", (lhs, rhs))
        return QuantizationProvider.dot_general(self, *rounded, *args, **kwargs)

    def einsum(self, einsum_str: str, *operands: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("einsum", operands)
        return QuantizationProvider.einsum(self, einsum_str, *rounded, **kwargs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("conv_general_dilated", (lhs, rhs))
        return QuantizationProvider.conv_general_dilated(self, *rounded, *args, **kwargs)

    def ragged_dot(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        rounded = self._rounded("ragged_dot", (lhs, rhs))
        return QuantizationProvider.ragged_dot(self, *rounded, *args, **kwargs)

    def _rounded(self, op: str, operands: Sequence[Any]) -> list[Any]:
        rule, op_id = self._get_current_rule_and_op_id(op)

        def per_tensor(for_lhs: bool, tile_size: Any = None, **fields: Any) -> HowToQuantize:
            return HowToQuantize(**fields)

        hows = list(activation_hows(rule, operands, per_tensor))
        if self.attention and op_id == PROBABILITIES and hows[1] is not None:
            method = range_of_probabilities(hows[1].qtype)
            hows[1] = hows[1].replace(calibration_method=method)
        here = current.current_site()
        static = {} if here is None else dict(here.static)
        if here is not None:
            here.report("float, emulated")

        def rounded(k: int, x: Any) -> Any:
            how = hows[k]
            if how is None:
                return dequantize(x) if isinstance(x, QArray) else as_float(x)
            q = quantize_static(x, how, *static[k]) if k in static else quantize_with(x, how)
            return dequantize(q).astype(x.dtype)

        return [rounded(k, x) for k, x in enumerate(operands)]
