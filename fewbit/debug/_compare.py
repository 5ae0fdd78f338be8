"""Compare: a float model and its quantized twin on one batch, Site by Site."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fewbit._util import Progress
from fewbit.debug._comparison import Comparison, LayerError, OutputError, SiteError, badness
from fewbit.debug._metrics import (
    Difference,
    Outlier,
    difference,
    distribution,
    from_parts,
    outliers_of,
    output_agreement,
    output_difference,
)
from fewbit.debug._mixed import Mixed, arguments, first_not_finite, mix, probe
from fewbit.interpreter import Reading, is_weight
from fewbit.models import pair
from fewbit.numerics import qtype_name
from fewbit.tracing import TracedSite

_NOTE_NOT_RUN = "did not run on this batch (a branch not taken): {sites}"
_NOTE_TWO_WAYS = (
    "took another branch in the quantized model than in the float one: {sites}; their accumulated "
    "error is of the runs they have in common"
)
_NOTE_SEVERAL_RUNS = (
    "ran more than once on this batch (a loop over time, the shards of a shard_map): {sites}; "
    "their accumulated error is of the last run alone, their other numbers are of all runs"
)
_NOTE_OTHERS = (
    "{count} parameters that are not quantized are other numbers in the two models ({names})"
)
_NOTE_REFERENCE = "the float model's own output is not finite on this batch{where}"


def compare(
    model: Any,
    quantized: Any,
    batch: Any,
    *,
    params: Any = None,
    qparams: Any = None,
    method: Any = None,
    rngs: Any = None,
    sweep: bool = True,
    memory: int = 2**30,
    progress: bool = True,
) -> Comparison:
    """What quantization does to `model` on a batch: errors per Site, worst first.

    `quantized` is what `quantize_model` made of `model`. Functions and Linen keep parameters
    outside: the float tree is `params`, the quantized one `qparams` (for Linen the parameters, or
    whole variables). `batch` is what the model is called with: one array, a tuple of arguments, or
    a dict of keyword arguments; `method` another method than `__call__`, `rngs` Linen's or the
    model's own.

    `sweep=False` leaves out the two runs per Site that measure its effect on the output. Results of
    Sites are held against each other in groups of at most `memory` bytes. Neither model is changed.

    >>> import fewbit, jax, jax.numpy as jnp
    >>> f = lambda params, x: jnp.tanh(x @ params['up']) @ params['down']
    >>> key = jax.random.key(0)
    >>> params = {'up': jax.random.normal(key, (16, 16)), 'down': jax.random.normal(key, (16, 4))}
    >>> x = jax.random.normal(key, (8, 16))
    >>> rules = [fewbit.QuantizationRule(weight_qtype='int4', act_qtype='int8')]
    >>> qparams = fewbit.quantize_params(params, fewbit.plan(f, rules, params, x))
    >>> qf = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
    >>> found = compare(f, qf, x, params=params, qparams=qparams)
    >>> len(found.sites), found.worst(1)[0].local.sqnr > 15, found.output.sqnr > 10
    (2, True, True)
    """
    trees = dict(params=params, qparams=qparams, method=method, rngs=rngs)
    mixed = mix(pair(model, quantized, *arguments(batch), **trees), batch)
    count = len(mixed.sites)
    with Progress("Comparing", 2 + 2 * count * sweep, show=progress) as bar:
        outputs = mixed.outputs([True] * count)
        bar.update(note="reading every Site")
        runs = (([False] * count, False), ([True] * count, True))
        readings = {ts.site.id: found for ts, found in probe(mixed, runs, memory)}
        bar.update(note="one Site at a time")
        effects = [_effects(mixed, k, bar) if sweep else (None, None) for k in range(count)]
    rows = [
        _row(mixed, ts, readings[ts.site.id], *effect)
        for ts, effect in zip(mixed.sites, effects, strict=True)
    ]
    broken = first_not_finite(mixed.traced.program, readings, 1)
    overall = output_difference(mixed.reference, outputs)
    same = output_agreement(mixed.reference, outputs)
    weights = {v.leaf: v for v in mixed.values if is_weight(v) and v.twin is not None}
    return Comparison(
        tuple(sorted(rows, key=badness)),
        OutputError(overall.sqnr, overall.cosine, overall.relative, same),
        mixed.pair.kind,
        broken,
        tuple(_notes(mixed, readings)),
        tuple(found for ts in mixed.sites for found in _channels(ts, readings[ts.site.id][0])),
        tuple(distribution(leaf, v.twin, v.array) for leaf, v in weights.items()),
    )


def _effects(mixed: Mixed, k: int, bar: Progress) -> tuple[float, float]:
    """SQNR of the output with only Site k quantized, and with only Site k float."""
    only = [j == k for j in range(len(mixed.sites))]
    levels = []
    for mask, rest in ((only, False), ([not on for on in only], True)):
        levels.append(output_difference(mixed.reference, mixed.outputs(mask, rest)).sqnr)
        bar.update(note=mixed.sites[k].site.id)
    return levels[0], levels[1]


def _row(
    mixed: Mixed,
    ts: TracedSite,
    readings: Sequence[Reading],
    only: float | None,
    restored: float | None,
) -> SiteError:
    exact, quantized = readings
    whole = _error((), exact, quantized)
    layers = [
        _error(index, *(_of_layer(reading, index) for reading in readings))
        for index in (np.ndindex(ts.layers) if ts.layers else ())
    ]
    if not np.any(exact.count):
        only = restored = None
    bad = np.asarray(quantized.value["not_finite"], np.float64)[..., 0]
    return SiteError(
        ts.site.id,
        _types(mixed, ts),
        ts.site.weight,
        int(ts.site.macs),
        whole.local,
        whole.accumulated,
        whole.weight,
        whole.clipped,
        only,
        restored,
        int(bad.sum()),
        tuple(layers),
    )


def _of_layer(reading: Reading, index: tuple[int, ...]) -> Reading:
    values = {name: value[index] for name, value in reading.value.items()}
    return Reading(np.asarray(reading.count)[index], values)


def _error(layer: tuple[int, ...], exact: Reading, quantized: Reading) -> LayerError:
    """The error of one layer, or of all that the readings are of."""
    return LayerError(
        layer,
        _together(exact, "local"),
        _accumulated(exact, quantized),
        _together(exact, "weight"),
        _share(quantized),
    )


def _together(reading: Reading, name: str) -> Difference | None:
    """The metrics of sums that were taken while running, over all layers that ran."""
    if name not in reading.value or not np.any(reading.count):
        return None
    return from_parts(reading.value[name])


def _accumulated(exact: Reading, quantized: Reading) -> Difference | None:
    """Of the results of both runs, over all layers that ran in both."""
    both = np.logical_and(np.asarray(exact.count) > 0, np.asarray(quantized.count) > 0)
    if not both.any():
        return None
    return difference(exact.value["out"][both], quantized.value["out"][both])


def _share(reading: Reading) -> float | None:
    """The share of clipped activation values."""
    if "clipped" not in reading.value or not np.any(reading.count):
        return None
    clipped, seen = np.asarray(reading.value["clipped"], np.float64).reshape(-1, 2).sum(0)
    return float(clipped / seen) if seen else None


def _types(mixed: Mixed, ts: TracedSite) -> str:
    rule = mixed.decisions[ts.site.id].rule
    stored = {v.leaf: v.array.qtype for v in mixed.values if is_weight(v)}
    weight = stored.get(ts.site.weight)
    text = "-" if weight is None else qtype_name(weight)
    if rule is None or rule.act_qtype is None or ts.site.op == "take":
        return f"{text} x -"
    return f"{text} x {qtype_name(rule.act_qtype)}{' static' * bool(rule.act_static_scale)}"


def _channels(ts: TracedSite, exact: Reading) -> list[Outlier]:
    prefix = "channels of "
    return [
        outlier
        for name, absmax in exact.value.items()
        if name.startswith(prefix)
        for outlier in outliers_of(ts.site.id, name.removeprefix(prefix), absmax, ts.layers)
    ]


def _notes(mixed: Mixed, readings: dict[str, list[Reading]]) -> list[str]:
    ran = {site: [np.asarray(r.count) > 0 for r in found] for site, found in readings.items()}
    idle = [site for site, (exact, _) in ran.items() if not exact.any()]
    two_ways = [site for site, (exact, quantized) in ran.items() if (exact != quantized).any()]
    several = [s for s, found in readings.items() if any(np.any(r.count > 1) for r in found)]
    notes = list(mixed.pair.notes)
    kinds = ((_NOTE_NOT_RUN, idle), (_NOTE_TWO_WAYS, two_ways), (_NOTE_SEVERAL_RUNS, several))
    notes += [text.format(sites=", ".join(sites)) for text, sites in kinds if sites]
    if mixed.others:
        paths = [
            leaf.path for k, leaf in enumerate(mixed.traced.leaves) if leaf and k in mixed.others
        ]
        names = ", ".join(paths[:3]) + ", ..." * (len(paths) > 3)
        notes.append(_NOTE_OTHERS.format(count=len(paths), names=names))
    if not all(np.isfinite(np.asarray(x, np.complex128)).all() for x in mixed.reference):
        where = first_not_finite(mixed.traced.program, readings, 0)
        notes.append(_NOTE_REFERENCE.format(where=f", first at {where}" if where else ""))
    return notes
