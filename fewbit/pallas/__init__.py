"""Quantized arrays in Pallas kernels: what a kernel needs to know its rule and its operands.

Quantize outside of the kernel, call it by `pallas_call` with the specs of the float arrays, and
multiply inside by `dot`, `dot_general` or `einsum`:

>>> import fewbit.pallas as qpl
>>> qpl.get_current_rule('gmm') is None
True
"""

from fewbit.interpreter._current import get_current_rule as get_current_rule
from fewbit.ops._in_kernels import quantized_call as pallas_call
from fewbit.ops._in_kernels import tiled_dot as dot
from fewbit.ops._in_kernels import tiled_dot_general as dot_general
from fewbit.ops._in_kernels import tiled_einsum as einsum
from fewbit.qarray._quantize import dequantize as dequantize
from fewbit.qarray._quantize import quantize as quantize
from fewbit.qarray._type import QArray as QArray

__all__ = [
    *("QArray", "quantize", "dequantize", "get_current_rule"),
    *("pallas_call", "dot_general", "dot", "einsum"),
]
