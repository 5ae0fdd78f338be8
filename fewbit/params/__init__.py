"""Parameter trees: quantized leaf by leaf, taken apart for an optimizer."""

from fewbit.params._quantize import merge_trainable as merge_trainable
from fewbit.params._quantize import quantize_leaf as quantize_leaf
from fewbit.params._quantize import quantize_params as quantize_params
from fewbit.params._quantize import split_trainable as split_trainable
from fewbit.params._quantize import static_scales as static_scales
from fewbit.params._quantize import trainable as trainable
