"""What is read at every Site while a pair of models runs: sums, channels, clipping, results.

Sums are taken where the arrays are; only results leave whole, to be held against those of another
run. In a loop over time a Site's result is that of the last trip, sums are of all trips.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit._qarray_static import quantize_static
from fewbit._scales import units
from fewbit.debug._channels import channel_absmax, kept_axes, summed_axes
from fewbit.debug._mixed import Mixed, MixedSites, exactly, full_mask
from fewbit.decisions import activation_fields, operand_how
from fewbit.numerics import format_of, should_quantize
from fewbit.qarray import QArray, quantize_with
from fewbit.taps import Reading, Taps
from fewbit.trace import TracedSite
from fewbit.weight import is_weight, plain

_ADDED = ("local", "weight", "clipped", "not_finite")
_ROUNDING = 0.5 + 1e-3  # a code away from the edge is rounding, not clipping


@dataclass
class Probe:
    """A tap on the Sites of a mixed run."""

    runner: MixedSites
    wanted: frozenset[str]
    results: bool = True  # all there is to read, or the local error alone

    def wants(self, site: TracedSite) -> bool:
        return site.site.id in self.wanted

    def observe(self, site: TracedSite, operands: Sequence[Any], result: Any) -> Any:
        assert self.runner.both is not None
        local = sums(*self.runner.both)
        if not self.results:
            return {"local": local}
        sides = [k for k in (0, 1) if k == 0 or site.site.op != "take"]
        weights = [v for v in operands if is_weight(v)]
        parts = ([result], [v for v in operands if not is_weight(v)], weights)
        seen = {
            "out": result,
            "local": local,
            "not_finite": jnp.stack([_not_finite(part) for part in parts]),
        }
        clipped = []
        for k in sides:
            operand = operands[k]
            if is_weight(operand):
                exact = exactly(operand)
                seen["weight"] = sums(exact, plain(operand))
                if exact.size:
                    seen["channels of weight"] = channel_absmax(exact, summed_axes(site, k))
                    kept = kept_axes(site, k)
                    if kept:
                        seen["channels of weight output"] = channel_absmax(exact, kept)
            elif should_quantize(operand.dtype) and operand.size and site.sources[k] is None:
                name = "channels of activation" + " (rhs)" * (k == 1)
                seen[name] = channel_absmax(operand, summed_axes(site, k))
                quantized = self._activation(site, k, operand)
                if quantized is not None:
                    clipped.append(clipped_count(operand, quantized))
        if clipped:
            seen["clipped"] = jnp.sum(jnp.stack(clipped), axis=0)
        return seen

    def _activation(self, ts: TracedSite, side: int, operand: Any) -> QArray | None:
        rule = self.runner.decisions[ts.site.id].rule
        if rule is None or ts.site.op == "take":
            return None
        fields = activation_fields(rule, side)
        if fields["qtype"] is None:
            return None
        how = operand_how(ts, side, **fields)
        static = self.runner.static.of(ts, rule)
        if side in static:
            return quantize_static(operand, how, *static[side])
        return quantize_with(operand, how)

    def combine(self, site_id: str, first: Any, second: Any) -> Any:
        return {
            name: first[name] + second[name]
            if name in _ADDED
            else jnp.maximum(first[name], second[name])
            if name.startswith("channels")
            else second[name]
            for name in first
        }


def sums(exact: Any, quantized: Any) -> Any:
    """Signal, noise, dot and power, as `_metrics.sums`, where the arrays are."""
    f, q = (x.astype(jnp.float32) for x in (exact, quantized))
    noise = jnp.where(f == q, jnp.float32(0), q - f)
    return jnp.stack([jnp.sum(x) for x in (f * f, noise * noise, f * q, q * q)])


def clipped_count(array: Any, q: QArray) -> Any:
    """How many numbers lie outside the range of their scale, and how many there are.

    >>> import fewbit
    >>> q = fewbit.quantize(jnp.array([1.0, -2.0, 100.0]), 'int8', calibration_method='fixed,-4,4')
    >>> clipped_count(jnp.array([1.0, -2.0, 100.0]), q)
    Array([1., 3.], dtype=float32)
    """
    row = format_of(q.qtype)
    in_units = units(array, q.scale, q.zero_point, q.tensor_scale, q.tile_shape)
    in_units = in_units.astype(jnp.float32)
    if row.kind == "sign":
        return jnp.array([0, array.size], jnp.float32)
    if row.kind == "int":
        low, high = row.asymmetric or (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
        low, high = low - _ROUNDING, high + _ROUNDING
    else:
        high = (1.0 if row.kind == "table" else float(jnp.finfo(row.storage).max)) * 1.001
        low = -high
    outside = (in_units > jnp.float32(high)) | (in_units < jnp.float32(low))
    count = jnp.sum(outside.astype(jnp.float32))
    return jnp.stack([count, jnp.float32(array.size)])


def _not_finite(values: Sequence[Any]) -> Any:
    counts = [
        jnp.sum((~jnp.isfinite(plain(v))).astype(jnp.float32))
        for v in values
        if is_weight(v) or jnp.issubdtype(v.dtype, jnp.inexact)
    ]
    return jnp.sum(jnp.stack(counts)) if counts else jnp.float32(0)


def probe(
    mixed: Mixed,
    masks: Sequence[tuple[Sequence[bool], bool]],
    memory: int = 2**30,
    results: bool = True,
) -> Iterator[tuple[TracedSite, list[Reading]]]:
    """For every Site its readings under each mask. At most `memory` bytes of results at once."""
    for group in _groups(mixed.sites, memory, len(masks)) if results else [mixed.sites]:
        wanted = frozenset(ts.site.id for ts in group)

        def program(mask, values, others, scales, wanted=wanted):
            interpreter = mixed.interpreter(mask, scales)
            interpreter.taps = Taps(Probe(interpreter.runner, wanted, results))
            inputs = mixed.inputs(mask, values, others)
            return interpreter.run_tapped(mixed.traced.program.root, inputs)[1]

        run = jax.jit(program)
        arguments = (mixed.values, mixed.others, mixed.traced.scales)
        found = [
            jax.tree.map(np.asarray, run(full_mask(mask, rest), *arguments)) for mask, rest in masks
        ]
        for ts in group:
            yield ts, [readings.get(ts.site.id) for readings in found]


def _groups(
    sites: Sequence[TracedSite], memory: int, runs: int
) -> Iterator[tuple[TracedSite, ...]]:
    """Sites in order, in groups whose results fit; a Site that does not fit is its own group."""
    group: list[TracedSite] = []
    used = 0
    for ts in sites:
        aval = ts.eqn.outvars[0].aval
        size = prod((*ts.layers, *aval.shape)) * aval.dtype.itemsize * runs
        if group and used + size > memory:
            yield tuple(group)
            group, used = [], 0
        group.append(ts)
        used += size
    if group:
        yield tuple(group)
