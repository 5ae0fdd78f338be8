"""Products and look-ups on arrays and QArrays, with the signatures of their JAX namesakes."""

from fewbit.ops.conv import conv_general_dilated as conv_general_dilated
from fewbit.ops.conv import decide_conv as decide_conv
from fewbit.ops.conv import describe_conv as describe_conv
from fewbit.ops.decision import Decision as Decision
from fewbit.ops.decision import decide_dot as decide_dot
from fewbit.ops.deferred import Deferred as Deferred
from fewbit.ops.dot_general import describe_dot as describe_dot
from fewbit.ops.dot_general import dot as dot
from fewbit.ops.dot_general import dot_general as dot_general
from fewbit.ops.einsum import einsum as einsum
from fewbit.ops.granularity import conv_how as conv_how
from fewbit.ops.granularity import dot_how as dot_how
from fewbit.ops.granularity import einsum_how as einsum_how
from fewbit.ops.granularity import ragged_dot_how as ragged_dot_how
from fewbit.ops.granularity import take_how as take_how
from fewbit.ops.ragged_dot import decide_ragged_dot as decide_ragged_dot
from fewbit.ops.ragged_dot import describe_ragged_dot as describe_ragged_dot
from fewbit.ops.ragged_dot import ragged_dot as ragged_dot
from fewbit.ops.ragged_dot import ragged_dot_general as ragged_dot_general
from fewbit.ops.take import take as take
