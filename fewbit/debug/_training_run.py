"""A model that trains and its float twin as functions of weights and of what is added at Sites.

Nothing is added: zeros, whose gradients are the cotangents at the Sites' results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import jaxprs
from fewbit._qarray_static import quantize_static
from fewbit.debug._probe import clipped_count
from fewbit.decisions import Decision, Request, activation_fields, operand_how, storage
from fewbit.engine import Traced
from fewbit.interpret import Interpreter
from fewbit.models.trained_runs import TrainedRun
from fewbit.numerics import should_quantize
from fewbit.qarray import quantize_with
from fewbit.sites import SiteRunner
from fewbit.static_run import StaticScales
from fewbit.taps import Readings, Taps
from fewbit.trace import TracedSite
from fewbit.trained import trained_values
from fewbit.weight import TrainedWeight, is_weight, plain

_ADDED = " added"  # no scale's name has spaces


@dataclass
class AddingSites(SiteRunner):
    """At a Site: its product, and what is to be added to it."""

    def __call__(self, ts: TracedSite, ins: Sequence[Any], *finish: Any) -> Any:
        return added_to(self.static, ts, super().__call__(ts, ins, *finish))

    def finishes(self, ts: TracedSite) -> bool:
        return False


def added_to(static: StaticScales, ts: TracedSite, out: Any) -> Any:
    """A Site's result plus what is given for it, of the layer that is being run."""
    more = static.of_layer(ts, ts.site.id + _ADDED)
    return out if more is None else out + more.astype(out.dtype)


@dataclass
class ClippingTap:
    """Reads at each Site how many numbers are clipped, and the scales of its weight."""

    sites: SiteRunner
    wanted: frozenset[str]

    def wants(self, site: TracedSite) -> bool:
        return site.site.id in self.wanted

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any:
        rule = self.sites.decisions[site.site.id].rule
        given = [v.array if is_weight(v) else v for v in operands[:2]]
        static = self.sites.scales(site, rule, given)
        seen: dict[str, Any] = {}
        for side, operand in enumerate(operands[:2]):
            if isinstance(operand, TrainedWeight):
                seen["weight"] = clipped_count(operand.twin, operand.array)
                seen["scale"] = operand.array.scale.astype(jnp.float32)
                continue
            fields = activation_fields(rule, side)  # type: ignore[arg-type]
            if is_weight(operand) or fields["qtype"] is None or not should_quantize(operand.dtype):
                continue
            how = operand_how(site, side, **fields)
            q = (
                quantize_static(operand, how, *static[side])
                if side in static
                else quantize_with(operand, how)
            )
            count = clipped_count(operand, q)
            seen["act"] = seen["act"] + count if "act" in seen else count
        return seen

    def combine(self, site_id: str, first: Any, second: Any) -> Any:
        return {
            name: second[name] if name == "scale" else first[name] + second[name] for name in first
        }


@dataclass
class TrainingRun:
    """One call of a model that trains, taken apart."""

    run: TrainedRun
    traced: Traced
    decisions: dict[str, Decision]
    requests: Mapping[str, Request]
    sites: tuple[TracedSite, ...]  # the quantized products

    @staticmethod
    def of(run: TrainedRun) -> "TrainingRun":
        traced, decisions = run.runner.ready(run.tree)
        requests = storage([traced.program], [decisions], lambda message: None)
        sites = tuple(
            ts
            for ts in traced.program.sites
            if decisions[ts.site.id].rule is not None and ts.site.op != "take"
        )
        return TrainingRun(run, traced, decisions, requests, sites)

    @property
    def weights(self) -> dict[str, Any]:
        """The float weights that are quantized, by path."""
        return {
            leaf.path: value
            for leaf, value in zip(self.traced.leaves, self.traced.values, strict=True)
            if leaf is not None and leaf.path in self.requests
        }

    def nothing(self) -> dict[str, Any]:
        """Zeros to add at each Site; where a derivative was written by hand none would come out."""
        avals = {ts.site.id: (ts, ts.eqn.outvars[0].aval) for ts in self.sites if not ts.in_rule}
        return {
            name + _ADDED: jnp.zeros((*ts.layers, *aval.shape), aval.dtype)
            for name, (ts, aval) in avals.items()
        }

    def quantized(self, weights: Mapping[str, Any], added: Mapping[str, Any]) -> Any:
        """The output of the model as it trains."""
        values = self._with(weights)
        values = trained_values(values, self.traced.leaves, self.requests, self.traced.learned)
        sites = AddingSites(
            self.run.runner.provider,
            self.decisions,
            static=StaticScales({**self.traced.scales, **added}),
        )
        return self._output(self._interpreter(sites).run(self.traced.program.root, values))

    def plain(self, weights: Mapping[str, Any], added: Mapping[str, Any]) -> Any:
        """The output of the float model."""
        static = StaticScales({**self.traced.scales, **added})

        def product(ts: TracedSite, ins: Sequence[Any]) -> Any:
            return added_to(static, ts, jaxprs.bind(ts.eqn, [plain(v) for v in ins])[0])

        names = {ts.site.id for ts in self.sites}
        interpreter = Interpreter(product, lambda ts: ts.site.id in names, static=static)
        values = self._with(weights)
        return self._output(interpreter.run(self.traced.program.root, values))

    def readings(self) -> Readings:
        """What is clipped at each Site, and the scales of its weight."""
        made = trained_values(
            self.traced.values, self.traced.leaves, self.requests, self.traced.learned
        )
        values = [  # to be held against their codes, weights stay what they were
            TrainedWeight(new.array, new.leaf, new.rule, old) if is_weight(new) else new
            for new, old in zip(made, self.traced.values, strict=True)
        ]
        static = StaticScales(dict(self.traced.scales))
        sites = AddingSites(self.run.runner.provider, self.decisions, static=static)
        interpreter = self._interpreter(sites)
        interpreter.taps = Taps(ClippingTap(sites, frozenset(ts.site.id for ts in self.sites)))
        return interpreter.run_tapped(self.traced.program.root, values)[1]

    def _interpreter(self, sites: AddingSites) -> Interpreter:
        return Interpreter(
            sites, lambda ts: self.decisions[ts.site.id].rule is not None, static=sites.static
        )

    def _with(self, weights: Mapping[str, Any]) -> list[Any]:
        return [
            weights.get(leaf.path, value) if leaf is not None else value
            for leaf, value in zip(self.traced.leaves, self.traced.values, strict=True)
        ]

    def _output(self, outs: list[Any]) -> Any:
        return self.run.output(self.traced, [plain(out) for out in outs])


Gradients = tuple[dict[str, Any], dict[str, Any]]  # of weights by path, of what Sites add


def gradients(
    run: TrainingRun, output: Callable[..., Any], loss: Callable[[Any], Any]
) -> Gradients:
    """The loss's gradients, through the model as it trains or through the float one."""
    by_path, added = jax.grad(lambda w, e: loss(output(w, e)), (0, 1))(run.weights, run.nothing())
    return by_path, {name.removesuffix(_ADDED): g for name, g in added.items()}
