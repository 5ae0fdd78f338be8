"""Products of quantized training: forward, input gradient and weight gradient, each configured."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from fewbit.training.configs import ConvGeneralQtConfig as ConvGeneralQtConfig
    from fewbit.training.configs import DotGeneralQtConfig as DotGeneralQtConfig
    from fewbit.training.configs import RaggedDotQtConfig as RaggedDotQtConfig
    from fewbit.training.conv_products import conv_general_qt as conv_general_qt
    from fewbit.training.delayed import delayed_range as delayed_range
    from fewbit.training.delayed import empty_history as empty_history
    from fewbit.training.dot_products import dot_general_qt as dot_general_qt
    from fewbit.training.drop_in import DotGeneral as DotGeneral
    from fewbit.training.drop_in import Einsum as Einsum
    from fewbit.training.drop_in import config_from_rule as config_from_rule
    from fewbit.training.drop_in import dot_general_cls as dot_general_cls
    from fewbit.training.drop_in import einsum_cls as einsum_cls
    from fewbit.training.drop_in_delayed import rule_histories as rule_histories
    from fewbit.training.einsum_products import einsum_qt as einsum_qt
    from fewbit.training.histories import accumulate as accumulate
    from fewbit.training.histories import is_history as is_history
    from fewbit.training.histories import merge_histories as merge_histories
    from fewbit.training.histories import overwrite_with_gradient as overwrite_with_gradient
    from fewbit.training.histories import split_histories as split_histories
    from fewbit.training.learned import learned_pair as learned_pair
    from fewbit.training.learned import quantize_learned as quantize_learned
    from fewbit.training.learned import start_scale as start_scale
    from fewbit.training.noise import NoiseFn as NoiseFn
    from fewbit.training.noise import get_noise_fn as get_noise_fn
    from fewbit.training.noise import low_bit_uniform_noise as low_bit_uniform_noise
    from fewbit.training.noise import uniform_noise as uniform_noise
    from fewbit.training.paired import Paired as Paired
    from fewbit.training.paired import clip_gradient as clip_gradient
    from fewbit.training.paired import pair as pair
    from fewbit.training.ragged_products import ragged_dot_qt as ragged_dot_qt

# Loaded when first used: whoever only serves never trains.
_HOMES = {
    "configs": (
        "ConvGeneralQtConfig",
        "DotGeneralQtConfig",
        "RaggedDotQtConfig",
    ),
    "conv_products": ("conv_general_qt",),
    "delayed": (
        "delayed_range",
        "empty_history",
    ),
    "dot_products": ("dot_general_qt",),
    "drop_in": (
        "DotGeneral",
        "Einsum",
        "config_from_rule",
        "dot_general_cls",
        "einsum_cls",
    ),
    "drop_in_delayed": ("rule_histories",),
    "einsum_products": ("einsum_qt",),
    "histories": (
        "accumulate",
        "is_history",
        "merge_histories",
        "overwrite_with_gradient",
        "split_histories",
    ),
    "learned": (
        "learned_pair",
        "quantize_learned",
        "start_scale",
    ),
    "noise": (
        "NoiseFn",
        "get_noise_fn",
        "low_bit_uniform_noise",
        "uniform_noise",
    ),
    "paired": (
        "Paired",
        "clip_gradient",
        "pair",
    ),
    "ragged_products": ("ragged_dot_qt",),
}


def __dir__() -> list[str]:
    return sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> _typing.Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(_importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
