"""What a mode does at a Site; quantization after training."""

from fewbit.providers._provider import QuantizationProvider as QuantizationProvider
from fewbit.providers._ptq import BoxedParamProvider as BoxedParamProvider
from fewbit.providers._ptq import PtqProvider as PtqProvider
from fewbit.providers._ptq import activation_hows as activation_hows
from fewbit.providers._ptq import describe_einsum as describe_einsum
