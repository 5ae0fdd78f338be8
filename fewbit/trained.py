"""The parameters of a training run: floats that get gradients, with the codes that products see.

Each leaf is quantized once, as its storage after training will be, so the forward pass is the one
that serves later, a weight used twice is rounded once, and what moves between devices are codes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.decisions import Leaf, Request
from fewbit.training.paired import pair
from fewbit.weight import TrainedWeight


def trained_values(
    values: Sequence[Any], leaves: Sequence[Leaf | None], requests: Mapping[str, Request]
) -> list[Any]:
    """The inputs of a run, each requested float leaf with its codes."""
    return [
        _trained(value, leaf.path, requests[leaf.path])
        if leaf is not None and leaf.path in requests
        else value
        for value, leaf in zip(values, leaves, strict=True)
    ]


def _trained(value: Any, path: str, request: Request) -> TrainedWeight:
    own = getattr(request.rule, "additional_qt_config", None) or {}
    made = pair(value, request.how, clip=not own.get("disable_gradient_clipping", False))
    return TrainedWeight(made.quantized, path, request.rule, made.array)
