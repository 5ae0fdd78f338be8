"""Learned scales of NNX models: `nnx.Param` attributes beside the weight, on its own module."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from fewbit._plan_messages import PlanError
from fewbit.boxes import kept_names
from fewbit.decisions import Request
from fewbit.learned_scales import is_learned, started
from fewbit.models.nnx_scopes import modules
from fewbit.training.learned import QSCALE

_AXES = ("out_sharding", "sharding_names", "sharding")  # metadata that names mesh axes
_MSG_NO_MODULE = (
    "The learned scale of '{leaf}' belongs beside it, and '{path}' is no module of the model. Keep "
    "the parameter as an attribute of a module, or give it another weight_calibration_method in a "
    "rule before this one."
)


class LearnedScale(nnx.Param):
    """The scale of the weight beside it, which training fits."""


def add_scales(
    model: nnx.Module, requests: Mapping[str, Request], *, replace: bool = False
) -> nnx.Module:
    """A scale beside each weight that is to learn it; those that are there stay, unless told."""
    places = dict(modules(model))
    for leaf, request in requests.items():
        if not is_learned(request.how):
            continue
        path, _, name = leaf.rpartition("/")
        if path not in places:
            raise PlanError(_MSG_NO_MODULE.format(leaf=leaf, path=path))
        module = places[path]
        old = getattr(module, name + QSCALE, None)
        if isinstance(old, LearnedScale) and not replace:
            continue
        fresh = _fresh(getattr(module, name), request.how)
        if isinstance(old, LearnedScale):
            old.set_value(fresh.get_value())
        else:
            setattr(module, name + QSCALE, fresh)
    return model


def _fresh(weight: nnx.Variable, how: Any) -> LearnedScale:
    value = weight.get_value()
    scale = started(value, how)
    variable = LearnedScale(scale)
    metadata = weight.get_metadata()
    for axes in _AXES:
        if metadata.get(axes) is not None:
            names = kept_names(tuple(metadata[axes]), scale.shape, value.shape)
            variable.set_metadata(**{axes: names})
    return variable


def take_scales(model: nnx.Module) -> dict[str, Any]:
    """The learned scales of a model by name, taken out of it."""
    found = {}
    for path, module in modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, LearnedScale):
                found[f"{path}/{name}" if path else name] = value.get_value()
                delattr(module, name)
    return found
