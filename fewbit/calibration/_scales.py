"""From collected statistics to static activation scales: what `quantize_params` does with them.

Linen and NNX keep a statistic at `<module>/<op_id>_lhs`, nested like the parameters; for a plain
function statistics are `{'<site id>': {'lhs': {...}}}`. A statistic is what
`SimpleMovingAverage` makes: `count`, `sum_of_<key>` and the extreme seen.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fewbit._util import nearest
from fewbit.calibration._statistics import SimpleMovingAverage
from fewbit.calibration._tails import EXTREMES, tell_tiny, tell_zeros
from fewbit.planning import (
    SIDES,
    QuantizedParams,
    ScalePlan,
    fits,
    insert,
    name_of_site,
    range_keys,
    scale_and_zero_point,
)
from fewbit.qarray import WithAux, check_finite, parse_method, range_from_histogram

_HISTOGRAM = "histogram"
_range_from_histogram = jax.jit(range_from_histogram, static_argnums=2)

_MSG_NOT_STATISTICS = (
    "quant_stats holds {found} at '{path}' where a statistic is expected: a mapping with 'count' "
    "and 'sum_of_absmax', or 'sum_of_min' and 'sum_of_max'."
)
_MSG_FUNCTION = (
    "quant_stats of a function is {{'<site id>': {{'lhs': statistic}}}}, but it has {found!r}. "
    "plan.scales lists the Sites and sides."
)
_MSG_UNKNOWN = (
    "quant_stats has '{name}', and {where} has no static scale of that name.{near} Statistics and "
    "plan must be of one model and one list of rules. Pass allow_extra_params=True to leave out "
    "what is not needed."
)
_MSG_MISSING = (
    "quant_stats has nothing for {count} of the plan's static scales: {names}. Collect statistics "
    "on inputs that reach every Site, or make a part of them: allow_missing_params=True, of "
    "quantize_checkpoint strict=False."
)
_MSG_COUNT = (
    "quant_stats is not initialized for {name}. Its count is 0: no batch has reached this Site "
    "while statistics were collected. Run calibration data through the model first, or use a "
    "dynamic range there: act_static_scale=None."
)
_MSG_SIGN = (
    "The statistic {name} has values in {key} that no range can have (a maximum below zero, or a "
    "minimum above it). Collect it with fewbit.calibration._statistics.SimpleMovingAverage."
)
_MSG_METHOD = (
    "The statistic {name} has {found}, but the method {method!r} of its rule needs {wanted}: it "
    "was collected with another act_calibration_method. Collect it again, or change the rule."
)
_MSG_NO_RANGE = (
    "The statistic {name} has no '{wanted}': it was collected by another library, which keeps "
    "averages only. Write act_static_reduction='mean' in the rule: {rule}."
)
_MSG_SHAPE = (
    "The statistic {name} has shape {found}, but the scale needs {wanted}. It was collected on "
    "inputs of another size, or averaged over other axes: give both rules the same act_batch_axes, "
    "with every axis that inputs differ in."
)


def add_scales(
    params: Any,
    scales: Mapping[str, ScalePlan],
    quant_stats: Any,
    *,
    by_site: bool,
    whole: bool,
    allow_extra: bool,
    present: Collection[str],
    known: Collection[str],
) -> Any:
    """Quantized parameters with the static scales that the statistics give.

    `present` are the parameters that were given, `known` all that the plan or template has: of a
    part of the model, only the scales of its modules are added. A `whole` plan wants all of them.
    """
    stats = _read_by_site(quant_stats, scales) if by_site else _read(quant_stats)
    where = "the plan" if whole else "the template"
    for name in stats if not allow_extra else ():
        if name not in scales and any(key.startswith("sum_of_") for key in stats[name]):
            near = nearest(name, scales, " The nearest are {}.", 3, 0.6, show=str)
            raise ValueError(_MSG_UNKNOWN.format(name=name, where=where, near=near))
    fixed = {name for name, scale in scales.items() if is_fixed(scale)}
    missing = [name for name in scales if name not in stats and name not in fixed]
    if missing and whole:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(_MSG_MISSING.format(count=len(missing), names=names))
    result = params
    act_scales: dict[str, dict[str, Any]] = {}
    for name, scale in scales.items():
        if name not in {*stats, *fixed} or not (by_site or belongs(name, present, known)):
            continue
        made = fixed_scale(scale) if name in fixed else static_scale(scale, stats[name])
        parts = {
            end: WithAux(part, scale.how.replace(rule=scale.rule)) for end, part in made.items()
        }
        if by_site:
            entries = act_scales.setdefault(scale.site, {})
            entries.update((scale.side + end, part) for end, part in parts.items())
            continue
        for end, part in parts.items():
            result = insert(result, name + end, part)
    return QuantizedParams(params, act_scales) if by_site and scales else result


def is_fixed(scale: ScalePlan) -> bool:
    """Whether the rule itself says the range, so that no data is needed."""
    return parse_method(scale.how.calibration_method).name == "fixed"


def fixed_scale(scale: ScalePlan) -> dict[str, Any]:
    """Scale and zero point of a range that the rule says.

    >>> from fewbit.qarray import HowToQuantize
    >>> how = HowToQuantize(qtype='int8', calibration_method='fixed,-255,255')
    >>> fixed_scale(ScalePlan('up/dot_general0_lhs', '', how, (1, 1), 'float32'))
    {'_scale': Array([[2.]], dtype=float32)}
    """
    method = parse_method(scale.how.calibration_method)
    low, high = (jnp.full(scale.shape, edge, jnp.float32) for edge in method.args)
    edges = {"min": low, "max": high} if method.asymmetric else {"absmax": high}
    made = scale_and_zero_point(edges, scale)
    tell_tiny(scale, edges, made, stacklevel=4)
    return made


def static_scale(scale: ScalePlan, stat: Mapping[str, Any]) -> dict[str, Any]:
    """Scale and, if the method is asymmetric, zero point, by the end of their names.

    >>> from fewbit.qarray import HowToQuantize
    >>> how = HowToQuantize(qtype='int8')
    >>> stat = {'count': jnp.array(2), 'sum_of_absmax': jnp.array([[300.0]]),
    ...         'max_of_absmax': jnp.array([[255.0]])}
    >>> static_scale(ScalePlan('up/dot_general0_lhs', '', how, (1, 1), 'float32'), stat)
    {'_scale': Array([[2.]], dtype=float32)}
    """
    keys, rule = range_keys(scale.how), scale.rule
    reduction = (rule.act_static_reduction if rule is not None else None) or "range"
    sums = [f"sum_of_{key}" for key in keys]
    if any(key not in stat for key in sums):
        found = ", ".join(sorted(k for k in stat if k != "count")) or "a count alone"
        method, wanted = scale.how.calibration_method, " and ".join(sums)
        raise ValueError(
            _MSG_METHOD.format(name=scale.name, found=found, method=method, wanted=wanted)
        )
    for key in keys:
        if reduction == "range" and EXTREMES[key] not in stat:
            wanted = EXTREMES[key]
            fixed = "its own" if rule is None else repr(rule.replace(act_static_reduction="mean"))
            raise ValueError(_MSG_NO_RANGE.format(name=scale.name, wanted=wanted, rule=fixed))
        found_shape = tuple(stat[f"sum_of_{key}"].shape)
        if not fits(found_shape, scale.shape, len(stat["count"].shape)):
            shapes = dict(found=found_shape, wanted=scale.shape)
            raise ValueError(_MSG_SHAPE.format(name=scale.name, **shapes))
    count = stat["count"]
    if isinstance(count, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda s: _static_scale(scale, s, reduction), dict(stat))
    # (A statistic that is still being collected goes to `scale_of`, which checks nothing.)
    used = ("count", *sums, *(EXTREMES[key] for key in keys), _HISTOGRAM)
    stat = {key: jnp.asarray(value) for key, value in stat.items() if key in used}
    if not isinstance(count, jax.core.Tracer) and bool((stat["count"] <= 0).any()):
        raise ValueError(_MSG_COUNT.format(name=scale.name))
    for key, value in stat.items():
        check_finite(value, f"quant_stats {scale.name} {key}")
        # A range holds zero, so none of its sums and extremes is on the wrong side of it.
        wrong = value > 0 if key.endswith("_min") else value < 0
        if not isinstance(value, jax.core.Tracer) and bool(wrong.any()):
            raise ValueError(_MSG_SIGN.format(name=scale.name, key=key))
    edges = _edges(scale, stat, reduction)
    tell_zeros(scale, edges, layers=stat["count"].ndim, stacklevel=4)
    made = scale_and_zero_point(edges, scale)
    tell_tiny(scale, edges, made, stacklevel=4)
    return _shaped(scale, made)


def _static_scale(scale: ScalePlan, stat: Mapping[str, Any], reduction: str) -> dict[str, Any]:
    return _shaped(scale, scale_and_zero_point(_edges(scale, stat, reduction), scale))


def _shaped(scale: ScalePlan, made: Mapping[str, Any]) -> dict[str, Any]:
    size = math.prod(scale.shape)
    # One number for all may have been seen at an operand of another rank.
    return {end: p.reshape(scale.shape) if p.size == size else p for end, p in made.items()}


def _edges(scale: ScalePlan, stat: Mapping[str, Any], reduction: str) -> dict[str, Any]:
    """The range that a statistic gives."""
    name = parse_method(scale.how.calibration_method).name
    if reduction == "range" and name in ("percentile", "mse") and _HISTOGRAM in stat:
        absmax = _range_from_histogram(stat[_HISTOGRAM], stat["max_of_absmax"], scale.how)
        return {"absmax": absmax}
    calibration = SimpleMovingAverage().get_calibration(stat, reduction=reduction)
    return {key: calibration[key] for key in range_keys(scale.how)}


def scale_of(scale: ScalePlan, stat: Mapping[str, Any]) -> dict[str, Any]:
    """As `static_scale`, of a statistic that a training step has at hand."""
    reduction = (scale.rule.act_static_reduction if scale.rule is not None else None) or "range"
    return _static_scale(scale, stat, reduction)


def _is_statistic(node: Any) -> bool:
    return isinstance(node, Mapping) and "count" in node and not isinstance(node["count"], Mapping)


def _read(quant_stats: Any) -> dict[str, Any]:
    """Statistics by name, from a nested mapping."""
    found: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        node = node.get_value() if hasattr(node, "get_value") else node
        if _is_statistic(node):
            found[path] = node
        elif isinstance(node, Mapping):
            for key, value in node.items():
                walk(value, f"{path}/{key}" if path else str(key))
        else:
            raise ValueError(_MSG_NOT_STATISTICS.format(found=type(node).__name__, path=path))

    walk(quant_stats, "")
    return found


def _read_by_site(quant_stats: Any, scales: Mapping[str, ScalePlan]) -> dict[str, Any]:
    """Statistics by name, from `{'<site id>': {'lhs': statistic}}`."""
    found: dict[str, Any] = {}
    if not isinstance(quant_stats, Mapping):
        raise ValueError(_MSG_FUNCTION.format(found=type(quant_stats).__name__))
    sites = list(dict.fromkeys(scale.site for scale in scales.values()))
    for site, sides in quant_stats.items():
        if ":" not in site and site not in sites:
            near = nearest(site, sites, " The Sites are {}.", 3, 0.3, or_first=True)
            raise ValueError(_MSG_FUNCTION.format(found=site) + near)
        if not isinstance(sides, Mapping) or not set(sides) <= set(SIDES):
            inside = list(sides) if isinstance(sides, Mapping) else type(sides).__name__
            raise ValueError(_MSG_FUNCTION.format(found={site: inside}))
        for side, stat in sides.items():
            if not _is_statistic(stat):
                kind = type(stat).__name__
                raise ValueError(_MSG_NOT_STATISTICS.format(found=kind, path=f"{site} {side}"))
            found[name_of_site(site, side)] = stat
    return found


def belongs(name: str, present: Collection[str], known: Collection[str]) -> bool:
    """Whether a scale's module is among the given parameters; one without parameters is in all."""
    module = name.rpartition("/")[0]

    def inside(paths: Collection[str]) -> bool:
        return any(not module or path.startswith(f"{module}/") for path in paths)

    return inside(present) or not inside(known)
