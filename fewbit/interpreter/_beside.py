"""What rides beside the parameters while a model runs, by name: static scales, keys, statistics.

All of it is one explicit value. Loops and branches close over it; bodies
that JAX does not let close over traced values (custom derivatives, `shard_map`) take it as an
operand.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from fewbit._util import nearest
from fewbit.planning import (
    NOISE,
    SCALE,
    SIDES,
    ZERO_POINT,
    Decision,
    ScalePlan,
    abstract_scales,
    fits,
    planned_scales,
    scale_name,
    static_sides,
)
from fewbit.qarray import WithAux
from fewbit.rules import QuantizationRule
from fewbit.tracing import Program, TracedSite

_MSG_NO_SCALE = (
    "{site} has act_static_scale=True, but there is no '{leaf}' for it{more}. Make the scales from "
    "collected statistics: quantize_params(params, plan, quant_stats); or measure the range of "
    "each batch: act_static_scale=None in {rule!r}.{near}"
)
_MSG_EMPTY = (
    "'{name}' is empty{more}: the rules of {what} ask for a static range (act_static_scale=True), "
    "and no statistics have filled it. Collect them, stats = fewbit.calibrate(model, rules, ...), "
    "and pass them: quantize_model(model, provider, *inputs, quant_stats=stats) for NNX, "
    "quantize_params(params, plan, stats) for Linen and functions. Or measure the range of each "
    "batch: act_static_scale=None."
)
_MSG_SHAPE = (
    "'{leaf}' has shape {found}, but {site} needs {wanted} for its {side} {operand}. Scales do not "
    "depend on an axis that is in act_batch_axes: write act_batch_axes={axes} in the rule and make "
    "the scales again, or run on inputs like those of the calibration."
)
_MSG_LAYERS = (
    "'{leaf}' has shape {found}, but {site} is inside a scan over {layers} layers and needs a "
    "scale for each: {wanted}. Make the scales with a plan of this model."
)
_MSG_DYNAMIC = (
    "'{leaf}' is a static scale, but the rule for {site} does not say act_static_scale=True, so it "
    "would not be used: {rule!r}. Run the model with the rules its parameters were quantized by, "
    "or make the provider with strict=False."
)


@dataclass
class StaticScales:
    """The scales of a run, by full name, and the layer numbers of the scans around the equation.

    A key for stochastic rounding rides among them; every trip of a loop has another one.
    """

    values: dict[str, Any] = field(default_factory=dict)
    layers: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def state(self) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Everything traced, for a body that must not close over it."""
        return self.values, self.layers

    @property
    def noise(self) -> Any:
        """The key that noise is made from, or None."""
        return self.values.get(NOISE)

    def in_trip(self, i: Any, is_layer: bool) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The state inside trip `i` of a scan."""
        values = self.values
        if self.noise is not None:
            values = {**values, NOISE: jax.random.fold_in(self.noise, i)}
        return values, (*self.layers, i) if is_layer else self.layers

    @contextmanager
    def using(self, state: tuple[dict[str, Any], tuple[Any, ...]]) -> Iterator[None]:
        """While a body runs that got the state as an operand."""
        before = self.state
        self.values, self.layers = state
        try:
            yield
        finally:
            self.values, self.layers = before

    def of(self, ts: TracedSite, rule: QuantizationRule) -> dict[int, tuple[Any, Any]]:
        """(scale, zero point) for each operand that has one, of the layer that is being run."""

        def part(side: int, ending: str) -> Any:
            value = self.of_layer(ts, scale_name(ts.site, side) + ending)
            rank = len((ts.site.lhs, ts.site.rhs)[side].shape)
            return value if value is None or value.ndim == rank else value.reshape((1,) * rank)

        return {k: (part(k, SCALE), part(k, ZERO_POINT)) for k in static_sides(ts, rule)}

    def of_layer(self, ts: TracedSite, name: str) -> Any:
        """The entry of this name for the layer that is being run; None if there is none."""
        value = self.values.get(name)
        for i in self.layers[: len(ts.layers)] if value is not None else ():
            value = lax.dynamic_index_in_dim(value, i, 0, keepdims=False)
        return value


def check_scales(
    program: Program, decisions: Mapping[str, Decision], values: Mapping[str, Any], strict: bool
) -> None:
    """Every static Site has its scale, of a shape that serves the operand."""
    wanted = {
        scale_name(ts.site, side): (ts, side)
        for ts in program.sites
        for side in static_sides(ts, decisions[ts.site.id].rule)
    }
    entries = {s.name: s for s in planned_scales([program], [decisions])}
    names = list(abstract_scales(tuple(entries.values())))
    missing = [name for name in names if name not in values]
    if missing:
        ts, _ = wanted[_base(missing[0])]
        others = [name for name in values if name not in names]
        raise ValueError(
            _MSG_NO_SCALE.format(
                site=ts.site.id,
                leaf=missing[0],
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                rule=decisions[ts.site.id].rule,
                near=nearest(missing[0], others, " There is {}, which no Site here has.", 1, 0.6),
            )
        )
    for name in names:
        _check_shape(name, values[name].shape, *wanted[_base(name)], entries[_base(name)])
    for ts in program.sites if strict else ():
        rule = decisions[ts.site.id].rule
        is_dynamic = rule is not None and not rule.act_static_scale
        for name in (scale_name(ts.site, side) + SCALE for side in (0, 1)):
            if is_dynamic and name in values:
                raise ValueError(_MSG_DYNAMIC.format(leaf=name, site=ts.site.id, rule=rule))


class Filled:
    """Whether static scales hold numbers: asked once of the same arrays, which it does not keep."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []

    def check(self, scales: Mapping[str, Any], what: str) -> None:
        """Raise if a scale still is as `empty_scales` made it. Traced ones cannot be looked at."""
        arrays = {name: v.array if isinstance(v, WithAux) else v for name, v in scales.items()}
        known = {name: v for name, v in arrays.items() if _is_known(v)}
        pairs = zip(self._seen, known.values(), strict=False)
        if len(known) == len(self._seen) and all(ref() is array for ref, array in pairs):
            return
        empty = [name for name, v in known.items() if np.isnan(np.asarray(v, np.float32)).any()]
        if empty:
            more = f" (and {len(empty) - 1} more are)" if len(empty) > 1 else ""
            raise ValueError(_MSG_EMPTY.format(name=empty[0], more=more, what=what))
        self._seen = [weakref.ref(array) for array in known.values()]


def _is_known(value: Any) -> bool:
    is_whole = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return isinstance(value, np.ndarray) or (is_whole and value.is_fully_addressable)


def _base(name: str) -> str:
    return name.removesuffix(SCALE).removesuffix(ZERO_POINT)


def _check_shape(
    leaf: str, found: Sequence[int], ts: TracedSite, side: int, scale: ScalePlan
) -> None:
    depth = len(ts.layers)
    if fits(found, scale.shape, depth):
        return
    text = dict(leaf=leaf, found=tuple(found), site=ts.site.id, wanted=scale.shape)
    if tuple(found[:depth]) != ts.layers:
        layers = " x ".join(map(str, ts.layers))
        raise ValueError(_MSG_LAYERS.format(**text, layers=layers))
    pairs = zip(found[depth:], scale.shape[depth:], strict=False)
    differ = {axis for axis, (n, m) in enumerate(pairs) if n != m}
    axes = tuple(sorted({*(scale.rule.act_batch_axes if scale.rule else ()), *differ}))
    operand = (ts.site.lhs, ts.site.rhs)[side]
    raise ValueError(_MSG_SHAPE.format(**text, side=SIDES[side], operand=operand, axes=axes))
