"""Flax Linen modules as pure functions of their variables, and back."""

from fewbit.models.linen._module import ALL_BUT_PARAMS as ALL_BUT_PARAMS
from fewbit.models.linen._module import Options as Options
from fewbit.models.linen._module import float_runs as float_runs
from fewbit.models.linen._module import last_call as last_call
from fewbit.models.linen._module import make_run as make_run
from fewbit.models.linen._module import plan as plan
from fewbit.models.linen._module import trained as trained
from fewbit.models.linen._quantized import pair as pair
from fewbit.models.linen._quantized import quantize as quantize
