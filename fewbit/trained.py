"""The parameters of a training run: floats that get gradients, with the codes that products see.

Each leaf is quantized once, as its storage after training will be, so the forward pass is the one
that serves later, a weight used twice is rounded once, and what moves between devices are codes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.decisions import Leaf, Request
from fewbit.qarray import HowToQuantize
from fewbit.trained_histories import delayed_pair
from fewbit.training.learned import QSCALE, learned_pair
from fewbit.training.paired import pair
from fewbit.weight import TrainedWeight


def trained_values(
    values: Sequence[Any],
    leaves: Sequence[Leaf | None],
    requests: Mapping[str, Request],
    learned: Mapping[str, Any] = {},
    delayed: Mapping[str, tuple[HowToQuantize, Any]] = {},
) -> list[Any]:
    """The inputs of a run, each requested float leaf with its codes.

    `learned` are the scales that are parameters themselves, by name; `delayed` tells of leaves
    whose scales come from the steps before.
    """
    return [
        _trained(
            value,
            leaf.path,
            requests[leaf.path],
            learned.get(leaf.path + QSCALE),
            delayed.get(leaf.path),
        )
        if leaf is not None and leaf.path in requests
        else value
        for value, leaf in zip(values, leaves, strict=True)
    ]


def _trained(value: Any, path: str, request: Request, scale: Any, delayed: Any) -> TrainedWeight:
    own = getattr(request.rule, "additional_qt_config", None) or {}
    clip = not own.get("disable_gradient_clipping", False)
    if delayed is not None:
        how, remembered = delayed
        made = delayed_pair(value, how, remembered, clip=clip)
    elif scale is None:
        made = pair(value, request.how, clip=clip)
    else:
        made = learned_pair(value, scale, request.how, clip=clip)
    return TrainedWeight(made.quantized, path, request.rule, made.array)
