"""Which backend runs an operation on this machine: XLA (the reference) or native code (CPU).

Importing this package loads nothing: the compiled library is opened, and its functions are
registered with JAX, when it is first asked for. Without it everything runs through XLA.
"""

from fewbit.kernels._attention import cached_attention as cached_attention
from fewbit.kernels._codes import SCALED as SCALED
from fewbit.kernels._codes import codes_dot as codes_dot
from fewbit.kernels._codes import runs_natively as runs_natively
from fewbit.kernels._conv import LONGEST_CHANNEL_SUM as LONGEST_CHANNEL_SUM
from fewbit.kernels._conv import Window as Window
from fewbit.kernels._conv import panel_conv as panel_conv
from fewbit.kernels._conv import plain_conv as plain_conv
from fewbit.kernels._finish import ACTIVATIONS as ACTIVATIONS
from fewbit.kernels._finish import finish as finish
from fewbit.kernels._finish import finish_text as finish_text
from fewbit.kernels._finish import fused_activation as fused_activation
from fewbit.kernels._info import KernelInfo as KernelInfo
from fewbit.kernels._info import info as info
from fewbit.kernels._layouts import for_kernels as for_kernels
from fewbit.kernels._layouts import pack as pack
from fewbit.kernels._layouts import quantize_for_kernels as quantize_for_kernels
from fewbit.kernels._layouts import quantize_plain as quantize_plain
from fewbit.kernels._layouts import refuse_parts as refuse_parts
from fewbit.kernels._layouts import unpack as unpack
from fewbit.kernels._layouts import would_be_faster as would_be_faster
from fewbit.kernels._library import backend as backend
from fewbit.kernels._library import native_available as native_available
from fewbit.kernels._library import runs_on as runs_on
from fewbit.kernels._matmul import ROWS as ROWS
from fewbit.kernels._matmul import panel_product as panel_product
from fewbit.kernels._quantize import absmax_rows as absmax_rows
from fewbit.kernels._quantize import quantize_natively as quantize_natively
