"""Observers: what calibration collects at the operands of Sites.

An observer is four functions over an explicit state, a flat dict of arrays: `init` an empty one,
`observe` one array, `merge` two states (trips of a loop, shards, batches, processes), `finalize` to
the entries of a statistic. None of them sees the layers of a scan: they are mapped over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from fewbit.numerics import should_quantize
from fewbit.planning import SIDES, Decision, scale_name, scale_plan, static_sides, weight_operand
from fewbit.qarray import HowToQuantize, parse_method
from fewbit.rules import QuantizationRule
from fewbit.tracing import Site, TracedSite, jaxprs

State = dict[str, jax.Array]


class CalibrationError(ValueError):
    """Calibration that cannot be done; the message names the place and the fix."""


@dataclass(frozen=True)
class Operand:
    """An activation that a Site multiplies, as observers see it.

    `how` and `scale_shape` (without layers) are those of its static scale, None if it has none.
    `contracting` are the axes that the product sums over, in the weight's order, and `grouped`
    those that it goes through side by side; `by_weight` tells whether the other side is a stored
    weight.
    """

    name: str
    site: Site
    side: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...]
    rule: QuantizationRule
    how: HowToQuantize | None
    scale_shape: tuple[int, ...] | None
    contracting: tuple[int, ...]
    grouped: tuple[int, ...]
    by_weight: bool

    @property
    def averages(self) -> bool:
        """Whether the rule makes the scale from an average over batches."""
        return self.rule.act_static_reduction == "mean"

    @property
    def range_method(self) -> str | None:
        """How the range of each batch is taken: where a histogram tells, all of it."""
        if self.how is None:
            return None
        return "absmax" if self.needs_histogram else self.how.calibration_method

    @property
    def needs_histogram(self) -> bool:
        """Whether its range can only be told from all batches together."""
        if self.how is None or self.averages:
            return False
        return parse_method(self.how.calibration_method).name in ("percentile", "mse")


@runtime_checkable
class Observer(Protocol):
    """What calibration collects. See the module's text; `wants` chooses the operands.

    >>> import jax.numpy as jnp
    >>> class Largest:
    ...     name = 'largest'
    ...     def wants(self, operand): return operand.by_weight
    ...     def init(self, operand): return {'largest': jnp.zeros(())}
    ...     def observe(self, operand, state, array):
    ...         return self.merge(state, {'largest': jnp.max(jnp.abs(array)).astype('float32')})
    ...     def merge(self, first, second):
    ...         return {'largest': jnp.maximum(first['largest'], second['largest'])}
    ...     def finalize(self, state): return state
    >>> import fewbit
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int8')]
    >>> f = lambda params, x: x @ params['w']
    >>> batches = [jnp.full((2, 3), v) for v in (1.0, -4.0, 2.0)]
    >>> stats = fewbit.calibrate(f, rules, {'w': jnp.eye(3)}, batches, observers=[Largest()])
    >>> stats['w:dot_general0']['lhs']['largest']
    array(4., dtype=float32)
    """

    name: str

    def wants(self, operand: Operand) -> bool: ...

    def init(self, operand: Operand) -> State: ...

    def observe(self, operand: Operand, state: State, array: jax.Array) -> State: ...

    def merge(self, first: State, second: State) -> State: ...

    def finalize(self, state: State) -> Mapping[str, Any]: ...


def operands_of(ts: TracedSite, decision: Decision) -> list[Operand]:
    """The activations of a Site that a rule is in force at."""
    rule = decision.rule
    if rule is None or ts.site.op == "take":
        return []
    static, weight = static_sides(ts, rule), weight_operand(ts)
    infos = (ts.site.lhs, ts.site.rhs)
    found = []
    for side in (0, 1):
        if ts.sources[side] is not None or not should_quantize(infos[side].dtype):
            continue
        scale = scale_plan(ts, side, rule) if side in static else None
        contracting, grouped = jaxprs.product_axes(ts.eqn, side)
        found.append(
            Operand(
                name=scale_name(ts.site, side),
                site=ts.site,
                side=SIDES[side],
                shape=infos[side].shape,
                dtype=infos[side].dtype,
                layers=ts.layers,
                rule=rule,
                how=scale.how if scale else None,
                scale_shape=scale.shape[len(ts.layers) :] if scale else None,
                contracting=contracting,
                grouped=grouped,
                by_weight=weight == 1 - side,
            )
        )
    return found
