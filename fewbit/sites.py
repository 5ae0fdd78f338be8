"""At a Site: unpack the equation, call the provider's op, report what ran it."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit import adapter_products, current, jaxprs
from fewbit._plan_messages import PlanError
from fewbit.adapter_run import Adapters
from fewbit.decisions import Decision, weight_operand
from fewbit.moves import CannotMove
from fewbit.static_run import StaticScales
from fewbit.static_scales import SIDES, name_at
from fewbit.trace import TracedSite
from fewbit.trace_shapes import product_letters
from fewbit.trained_histories import GRADIENT
from fewbit.trained_statistics import scales_of_step
from fewbit.training.delayed import SUFFIX
from fewbit.training.paired import Paired
from fewbit.weight import TrainedWeight, Weight, is_weight, plain
from fewbit.weight_moves import MOVES, with_twins

_METHODS = {
    "dot_general": "dot_general",
    "einsum": "einsum",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot": "ragged_dot",
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
        if ts.site.op not in _METHODS or self.decisions[ts.site.id].rule is None:
            return False
        return getattr(getattr(self.provider, _METHODS[ts.site.op]), "finishes", False)

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
        method = getattr(self.provider, _METHODS[site.op])
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
        )
        with current.at_site(here), jax.named_scope(site.path or site.op):
            try:
                return _CALLS[site.op](method, ts.eqn, operands)
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
        if method.__module__.startswith("fewbit."):
            return lambda text: self.report(site_id, text)
        name = f"{type(self.provider).__name__}.{method.__name__}"
        self.report(site_id, name)
        return lambda text: self.report(site_id, f"{name} ({text})")

    def look_up(self, ts: TracedSite, ins: Sequence[Any]) -> Any:
        rows, adapter = self.rows(ts, ins), self.adapters.at(ts)
        if adapter is None:
            return rows
        return adapter_products.add_to_rows(adapter, ts.eqn, ins[1], rows)

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


def _operand(weight: Weight) -> Any:
    """A weight as an op takes it: its codes; in training with the floats that get the gradient."""
    if isinstance(weight, TrainedWeight):
        return Paired(weight.twin, weight.array)
    return weight.array


def noise_key(key: Any, site_id: str, operands: Sequence[Any]) -> Any:
    """A key of the Site's own: another one for each Site, and for each shard that differs."""
    if key is None:
        return None
    key = jax.random.fold_in(key, zlib.crc32(site_id.encode()))
    arrays = jax.tree.leaves(list(operands))
    axes = frozenset[str]().union(*map(jaxprs.varying_axes, arrays))
    for axis in sorted(axes):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def _dot_general(method: Callable[..., Any], eqn: Any, operands: Sequence[Any]) -> Any:
    p = eqn.params
    return method(
        *operands,
        p["dimension_numbers"],
        precision=p["precision"],
        preferred_element_type=p["preferred_element_type"],
        out_sharding=p["out_sharding"],
    )


def _einsum(method: Callable[..., Any], eqn: Any, operands: Sequence[Any]) -> Any:
    p = eqn.params
    letters = product_letters(p["dimension_numbers"], *(v.aval.ndim for v in eqn.invars[:2]))
    return method(
        letters,
        *operands,
        precision=p["precision"],
        preferred_element_type=p["preferred_element_type"],
        out_sharding=p["out_sharding"],
    )


def _conv(method: Callable[..., Any], eqn: Any, operands: Sequence[Any]) -> Any:
    p = eqn.params
    names = (
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "dimension_numbers",
        "feature_group_count",
        "batch_group_count",
        "precision",
        "preferred_element_type",
    )
    return method(*operands, **{name: p[name] for name in names})


def _ragged_dot(method: Callable[..., Any], eqn: Any, operands: Sequence[Any]) -> Any:
    p = eqn.params
    return method(
        *operands,
        precision=p["precision"],
        preferred_element_type=p["preferred_element_type"],
        group_offset=p["group_offset"],
    )


_CALLS = {
    "dot_general": _dot_general,
    "einsum": _einsum,
    "conv_general_dilated": _conv,
    "ragged_dot": _ragged_dot,
}
