"""At a Site: unpack the equation, call the provider's op, report what ran it."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit.adapters import Adapters, add_to_rows
from fewbit.interpreter import _current as current
from fewbit.interpreter._beside import StaticScales
from fewbit.interpreter._taps import all_varying_axes
from fewbit.interpreter._weights import MOVES, TrainedWeight, Weight, is_weight, plain, with_twins
from fewbit.ops import Paired
from fewbit.planning import SIDES, Decision, PlanError, name_at, weight_operand
from fewbit.qarray import CannotMove
from fewbit.tracing import TracedSite, jaxprs, product_letters
from fewbit.training import GRADIENT, SUFFIX, scales_of_step

_TYPED = ("precision", "preferred_element_type")
# The parameters of an equation that the provider's method of each op takes by their names.
_KEYWORDS = {
    "dot_general": (*_TYPED, "out_sharding"),
    "einsum": (*_TYPED, "out_sharding"),
    "conv_general_dilated": (
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count", *_TYPED),
    ),
    "ragged_dot": (*_TYPED, "group_offset"),
}


@dataclass
class SiteRunner:
    """The interpreter's `at_site`: decisions by Site id, products by the provider."""

    provider: Any
    decisions: Mapping[str, Decision]
    report: Callable[[str, str], None] = lambda site_id, text: None
    static: StaticScales = field(default_factory=StaticScales)
    adapters: Adapters = field(default_factory=Adapters)
    collecting: bool = False  # whether the batch counts among what static scales are made from
    planning: bool = False  # an abstract run, to find out what happens

    def finishes(self, ts: TracedSite) -> bool:
        """Whether the provider's own method also does a bias and an activation."""
        if ts.site.op not in _KEYWORDS or self.decisions[ts.site.id].rule is None:
            return False
        return getattr(getattr(self.provider, ts.site.op), "finishes", False)

    def __call__(
        self, ts: TracedSite, ins: Sequence[Any], finish: tuple[Any, str | None] = (None, None)
    ) -> Any:
        site, rule = ts.site, self.decisions[ts.site.id].rule
        if site.op == "take":
            return self.look_up(ts, ins)
        if rule is None:
            return jaxprs.bind(ts.eqn, [plain(v) for v in ins])[0]
        stored = weight_operand(ts)
        both = site.op in ("dot_general", "einsum")
        operands = [
            _operand(v) if is_weight(v) and (both or k == stored) else plain(v)
            for k, v in enumerate(ins)
        ]
        method = getattr(self.provider, site.op)
        trained: dict[int, Paired] = {}
        if not _is_ours(method):  # it may do anything with a weight that one does with an array
            trained = {k: x for k, x in enumerate(operands) if isinstance(x, Paired)}
            operands = [x.array if isinstance(x, Paired) else x for x in operands]
        here = current.CurrentSite(
            site,
            rule,
            self.reporter(site.id, method),
            self.scales(ts, rule, operands),
            finish,
            noise_key(self.static.noise, site.id, operands[:2]),
            self.planning,
            stored,
            self.adapters.at(ts),
            self.delayed(ts) if self.provider.delays else {},
            trained,
        )
        with current.at_site(here), jax.named_scope(site.path or site.op):
            try:
                return _product(method, ts, operands)
            except ValueError as error:
                raise PlanError(f"{site.id}: {error} The rule is {rule!r}.") from error

    def scales(
        self, ts: TracedSite, rule: Any, operands: Sequence[Any]
    ) -> dict[int, tuple[Any, Any]]:
        """Stored scales of activations; while training, those of what was seen so far."""
        if self.provider.quantizes_params:
            return self.static.of(ts, rule)
        if self.provider.trains and rule.act_static_scale:
            decision = self.decisions[ts.site.id]
            return scales_of_step(self.static, ts, decision, operands, self.collecting)
        return {}

    def delayed(self, ts: TracedSite) -> dict[str, Any]:
        """The ranges of the steps before, of the layer that is being run."""
        names = {s: name_at(ts.site.path, ts.site.op_id, s) + SUFFIX for s in (*SIDES, GRADIENT)}
        found = {side: self.static.of_layer(ts, name) for side, name in names.items()}
        stored = weight_operand(ts)
        return {
            side: value
            for side, value in found.items()
            if value is not None and (stored is None or side != SIDES[stored])
        }

    def reporter(self, site_id: str, method: Callable[..., Any]) -> Callable[[str], None]:
        """Where the op says what ran it; a user's own method is named with it."""
        if _is_ours(method):
            return lambda text: self.report(site_id, text)
        name = f"{type(self.provider).__name__}.{method.__name__}"
        self.report(site_id, name)
        return lambda text: self.report(site_id, f"{name} ({text})")

    def look_up(self, ts: TracedSite, ins: Sequence[Any]) -> Any:
        rows, adapter = self.rows(ts, ins), self.adapters.at(ts)
        return rows if adapter is None else add_to_rows(adapter, ts.eqn, ins[1], rows)

    def rows(self, ts: TracedSite, ins: Sequence[Any]) -> Any:
        self.report(ts.site.id, "gather")
        if not is_weight(ins[0]):
            return jaxprs.bind(ts.eqn, ins)[0]
        try:
            rows = MOVES["gather"](ts.eqn, list(ins))
        except CannotMove:
            self.report(ts.site.id, "dequantize + gather")
            return jaxprs.bind(ts.eqn, [plain(v) for v in ins])[0]
        return plain(with_twins(ts.eqn, ins, rows)[0])


def _is_ours(method: Callable[..., Any]) -> bool:
    return method.__module__.startswith("fewbit.")


def _operand(weight: Weight) -> Any:
    """A weight as an op takes it: its codes; in training with the floats that get the gradient."""
    is_trained = isinstance(weight, TrainedWeight)
    return Paired(weight.twin, weight.array) if is_trained else weight.array


def noise_key(key: Any, site_id: str, operands: Sequence[Any]) -> Any:
    """A key of the Site's own: another one for each Site, and for each shard that differs."""
    if key is None:
        return None
    key = jax.random.fold_in(key, zlib.crc32(site_id.encode()))
    for axis in sorted(all_varying_axes(list(operands))):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def _product(method: Callable[..., Any], ts: TracedSite, operands: Sequence[Any]) -> Any:
    """What the provider's method makes of the operands and the parameters of the equation."""
    p = ts.eqn.params
    keywords = {name: p[name] for name in _KEYWORDS[ts.site.op]}
    if ts.site.op == "einsum":
        ndims = (v.aval.ndim for v in ts.eqn.invars[:2])
        return method(product_letters(p["dimension_numbers"], *ndims), *operands, **keywords)
    if ts.site.op == "dot_general":
        return method(*operands, p["dimension_numbers"], **keywords)
    return method(*operands, **keywords)
