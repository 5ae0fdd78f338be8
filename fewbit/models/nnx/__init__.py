"""Flax NNX modules, which hold their parameters, as pure functions of these, and back."""

from fewbit.models.nnx._calls import AmaxHistory as AmaxHistory
from fewbit.models.nnx._calls import QuantStat as QuantStat
from fewbit.models.nnx._calls import last_call as last_call
from fewbit.models.nnx._calls import noise_key as noise_key
from fewbit.models.nnx._calls import prepare as prepare
from fewbit.models.nnx._calls import result_of as result_of
from fewbit.models.nnx._companions import adapters as adapters
from fewbit.models.nnx._companions import merged as merged
from fewbit.models.nnx._companions import plans as plans
from fewbit.models.nnx._companions import with_adapters as with_adapters
from fewbit.models.nnx._model import HOLDS_PARAMS as HOLDS_PARAMS
from fewbit.models.nnx._model import converted as converted
from fewbit.models.nnx._model import float_params as float_params
from fewbit.models.nnx._model import float_runs as float_runs
from fewbit.models.nnx._model import pair as pair
from fewbit.models.nnx._model import plan as plan
from fewbit.models.nnx._model import quantize as quantize
from fewbit.models.nnx._model import restart_learned as restart_learned
from fewbit.models.nnx._model import trained as trained
from fewbit.models.nnx._model import with_provider as with_provider
