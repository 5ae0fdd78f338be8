"""Products for a single NNX layer that keep what they need: amax histories, a stream of keys."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from fewbit.models.nnx._calls import AmaxHistory
from fewbit.planning import STREAM
from fewbit.training import DotGeneral, Einsum, check_drop_in, rule_histories, two_uses


class _Holding(nnx.Module):
    """A module without parameters: a config or rule, and what it remembers."""

    def __init__(self, config_or_rule: Any, *, rngs: nnx.Rngs | None = None):
        name = type(self).__name__
        check_drop_in(name, config_or_rule, has_key=rngs is not None, has_histories=True)
        self.config_or_rule = config_or_rule
        draws = getattr(config_or_rule, "bwd_stochastic_rounding", None) is not None
        self.rngs = rngs if draws else None
        self.remembers = bool(getattr(config_or_rule, "delays", False))
        for name, value in (rule_histories(config_or_rule) if self.remembers else {}).items():
            setattr(self, name, AmaxHistory(value))

    def _made(self, kind: Any) -> Any:
        key = None if self.rngs is None else self.rngs[STREAM]()
        if not self.remembers:
            return kind(self.config_or_rule, key)
        histories = {
            name: _used(getattr(self, name)) for name in rule_histories(self.config_or_rule)
        }
        return kind(self.config_or_rule, key, histories)


def _used(variable: AmaxHistory) -> Any:
    """A history for one call; another call in the same step works from what is left in it."""
    value = variable.get_value()
    if isinstance(value, jax.core.Tracer):  # or there is no gradient, so no step
        value, rest = two_uses(value)
        with contextlib.suppress(TraceContextError):  # inside jax.checkpoint: one call alone
            variable.set_value(rest)
    return value


class NnxQtDotGeneral(_Holding):
    """The product of one layer: `nnx.Linear(8, 4, dot_general=NnxQtDotGeneral(rule), rngs=rngs)`.

    For rules with 'delayed' scales, whose histories are `fewbit.AmaxHistory` Variables of it: they
    are differentiated with the parameters. `rngs` are for stochastic rounding.

    >>> import fewbit, jax.numpy as jnp
    >>> rule = fewbit.QtRule(weight_qtype='int8', act_qtype='int8',
    ...                      act_calibration_method='delayed,16')
    >>> layer = nnx.Linear(4, 3, dot_general=NnxQtDotGeneral(rule), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 4))).shape, layer.dot_general.lhs_amax_history.shape
    ((2, 3), (16,))
    """

    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kw: Any) -> Any:
        return self._made(DotGeneral)(lhs, rhs, dimension_numbers, *args, **kw)


class NnxQtEinsum(_Holding):
    """The einsum twin, for `nnx.Einsum(..., einsum_op=NnxQtEinsum(rule))`.

    >>> import fewbit, jax.numpy as jnp
    >>> rule = fewbit.QtRule(weight_qtype='int8', act_qtype='int8')
    >>> NnxQtEinsum(rule)('ab,bc->ac', jnp.ones((2, 4)), jnp.ones((4, 3))).shape
    (2, 3)
    """

    def __call__(self, einsum_str: str, *operands: Any, **kw: Any) -> Any:
        return self._made(Einsum)(einsum_str, *operands, **kw)
