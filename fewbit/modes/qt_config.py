"""From a rule for training to the config of its three products at one Site."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from fewbit.current import current_site
from fewbit.decisions import activation_fields
from fewbit.rules import QtRule
from fewbit.training import Paired, get_noise_fn

Config = TypeVar("Config")

_MSG_NO_KEY = (
    "{where} rounds its gradients stochastically (bwd_stochastic_rounding={method!r}), which needs "
    "a key. Linen: model.apply(variables, x, rngs={{'stochastic_rounding': key}}); NNX: "
    "model.set_attributes(qwix_rngs=nnx.Rngs(stochastic_rounding=0)); a function: "
    "f(params, x, stochastic_rounding=key). Pass another key at every step."
)


def qt_config(kind: type[Config], rule: Any, operands: Sequence[Any]) -> Config:
    """The config of a Site: what its rule says of each operand of each product."""
    fields: dict[str, Any] = {}
    here = current_site()
    if here is not None and "grad" in here.delayed:
        fields["grad_delayed_range"] = here.delayed["grad"]
    for side, (name, operand) in enumerate(zip(("lhs", "rhs"), operands, strict=True)):
        if not isinstance(operand, Paired):  # a weight comes with its codes
            own = activation_fields(rule, side)
            fields[f"{name}_qtype"] = own["qtype"]
            fields[f"{name}_calibration_method"] = own["calibration_method"]
            fields[f"{name}_disable_channelwise_axes"] = own.get("disable_channelwise_axes", False)
        gradient = f"d{name}"
        fields[f"{gradient}_grad_qtype"] = rule.bwd_qtype
        fields[f"{gradient}_grad_calibration_method"] = rule.bwd_calibration_method
        fields[f"{gradient}_grad_disable_channelwise_axes"] = rule.disable_channelwise_axes
        is_weight = isinstance(operand, Paired) and (here is None or here.weight == side)
        if is_weight and rule.bwd_qtype is not None:
            fields[f"{gradient}_tile_size"] = rule.bwd_weight_grad_tile_size
    fields["tile_size"] = rule.tile_size
    fields |= _noise(rule)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    fields |= dict(rule.additional_qt_config or {})
    if "tile_size" not in known:  # a convolution, whose rule was refused if it has one
        fields.pop("tile_size")
    return kind(**fields)


class _NoKey:
    """In place of noise: a gradient that asks for it is told what is missing."""

    def __init__(self, message: str):
        self.message = message

    def __call__(self, shape: Any) -> Any:
        raise ValueError(self.message)


def _noise(rule: QtRule) -> dict[str, Any]:
    """One function for each gradient: their noise is independent."""
    if rule.bwd_stochastic_rounding is None or not rule.quantizes_gradients:
        return {}
    here = current_site()
    key = None if here is None else jax.random.key(0) if here.planning else here.noise
    if key is None:  # evaluating needs no key; only gradients do
        where = "This product" if here is None else here.site.id
        missing = _NoKey(_MSG_NO_KEY.format(where=where, method=rule.bwd_stochastic_rounding))
        return {f"{side}_stochastic_rounding_noise_fn": missing for side in ("dlhs", "drhs")}
    keys = jax.random.split(key)
    return {
        f"{side}_stochastic_rounding_noise_fn": get_noise_fn(
            rule.bwd_stochastic_rounding, keys[k], rule.channelwise_noise_axes
        )
        for k, side in enumerate(("dlhs", "drhs"))
    }
