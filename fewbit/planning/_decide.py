"""Decide: which rule governs a Site, and how that asks its parameter to be stored."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fewbit.numerics import format_of, qtype_name, should_quantize
from fewbit.ops import granularity, reads_panels
from fewbit.planning._messages import Complaint, PlanError
from fewbit.qarray import HowToQuantize, get_scale_shape, history_length, parse_method
from fewbit.rules import QtRule, QuantizationRule
from fewbit.tracing import (
    Changed,
    Constant,
    Origin,
    Program,
    TileDoesNotFit,
    TracedSite,
    leaf_granularity,
    leaf_roles,
    product_letters,
)

_MSG_FLOAT_WEIGHT = (
    "{site}: additional_qt_config[{name!r}] is None, which would leave the parameter '{leaf}' "
    "float. Write weight_qtype=None in a rule for this path instead, or leave {name!r} out: the "
    "weight then has the rule's weight_qtype."
)
_MSG_CONFLICT = (
    "Parameter '{leaf}' is used by two Sites that want it stored differently: {a}; {b}. A "
    "parameter is stored once: keep it float with QuantizationRule(module_path={either!r}) before "
    "the other rules, or give both Sites the same type and the same contracted axis."
)
_MSG_EXCLUDED = (
    "Parameter '{leaf}' is wanted as {qtype} by {site} and kept float by {other}, which a rule "
    "with weight_qtype=None matches. One parameter is stored once: let the exclusion cover both "
    "Sites, or drop it."
)
_MSG_TILE = (
    "Give this path a rule of its own with a tile_size that fits (or None), before the general one."
)
_MSG_ONE_TILE = (
    "{name} is always in tiles of {own}: give this path another format in a rule of its own before "
    "this one, or keep it float with QuantizationRule(module_path=...)."
)
_MSG_FLAT = (
    "{site} reads parameter '{leaf}' {stored} as {used}. Its scales vary along an axis that the "
    "product sums over, as the parameter is stored: there would be one for every {few}, which is "
    "no smaller than float. Store the parameter in the shape it is used in, {used}, and leave the "
    "reshape out (in NNX nnx.Param(w.reshape(...)), in Linen self.param('{name}', init, {used}); a "
    "checkpoint's array is reshaped once, when it is read), or keep it float with "
    "QuantizationRule(module_path={path!r}) before the other rules. The rule is {rule!r}."
)
_FEW = 8  # values to a scale that nobody asked for: int8 with a float32 scale is no smaller then
_FORWARD = ("qtype", "calibration_method", "disable_channelwise_axes")


@dataclass(frozen=True)
class Decision:
    """What happens at one Site: the rule in force (None: float), or why it is left alone."""

    rule_index: int | None
    rule: QuantizationRule | None
    reason: str | None = None


@dataclass(frozen=True)
class Request:
    """The storage one Site asks of a parameter leaf."""

    leaf: str
    how: HowToQuantize
    site: TracedSite
    rule: QuantizationRule


@dataclass(frozen=True)
class Leaf:
    """A parameter as the front end knows it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any


RuleFor = Callable[[TracedSite], tuple[int | None, QuantizationRule | None]]


def decide(program: Program, rule_for: RuleFor) -> dict[str, Decision]:
    """The decision for each Site, by Site id."""
    products = [ts for ts in program.sites if ts.site.op != "take"]
    decisions = {ts.site.id: _decide(ts, *rule_for(ts)) for ts in products}
    in_product = {
        ts.site.weight
        for ts in products
        if ts.site.weight and decisions[ts.site.id].rule is not None
    }
    for ts in program.sites:
        if ts.site.op == "take":
            decisions[ts.site.id] = _decide_look_up(ts, *rule_for(ts), ts.site.weight in in_product)
    return decisions


def _decide(ts: TracedSite, index: int | None, rule: QuantizationRule | None) -> Decision:
    if ts.where.left_float:
        return Decision(None, None, "the program asks to leave it float")
    if rule is None:
        return Decision(None, None, "no rule matches")
    if rule.switched_off:
        unused = "" if rule.act_qtype is None else ": without weight_qtype its act_qtype is unused"
        return _switched_off(index, unused)
    if ts.where.backward:
        return Decision(index, None, f"backward of {ts.site.path or 'the model'}: stays float")
    if not all(should_quantize(info.dtype) for info in (ts.site.lhs, ts.site.rhs)):
        return Decision(index, None, f"operands are {ts.site.lhs.dtype} and {ts.site.rhs.dtype}")
    if ts.site.op == "ragged_dot" and not is_plain_ragged(ts.eqn):
        return Decision(index, None, "ragged product of another form than rows by groups")
    if weight_operand(ts) is None and rule.act_qtype is None:
        reason = why_no_weight(ts) or "product of two activations; the rule is weight-only"
        return Decision(index, None, reason)
    return Decision(index, rule)


def _switched_off(index: int | None, unused: str = "") -> Decision:
    return Decision(index, None, f"rule {index} switches it off{unused}")


def why_no_weight(ts: TracedSite) -> str | None:
    """Why what looks like a weight is none that could be stored; None if both are activations."""
    for source in reversed(ts.sources):
        if isinstance(source, Changed):
            return f"weight {source.leaf} is changed by {source.primitive} before the product"
    if any(isinstance(s, Constant) for s in ts.sources):
        return "weight is a constant of the function; pass it as a parameter"
    return None


def _decide_look_up(
    ts: TracedSite, index: int | None, rule: QuantizationRule | None, in_product: bool
) -> Decision:
    """A table look-up follows the product its table feeds; a table of its own must be named."""
    if ts.where.left_float and not in_product:
        return _decide(ts, index, rule)
    is_on = rule is not None and not rule.switched_off
    if rule is not None and "take" in rule.op_names:
        return Decision(index, rule) if is_on else _switched_off(index)
    if in_product:
        return Decision(index if is_on else None, rule)
    if not is_on:
        return _decide(ts, index, rule)
    # The rule does nothing here, so this does not count as a match of it.
    return Decision(None, None, "table of its own: name 'take' in op_names to quantize it")


def is_plain_ragged(eqn: Any) -> bool:
    """lhs (M, K), rhs (G, K, N), groups along M: what `lax.ragged_dot` makes."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((lc, rc), (lb, rb)) = numbers.dot_dimension_numbers
    parts = (lc, rc, lb, rb, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    return tuple(map(tuple, parts)) == ((1,), (1,), (), (), (0,), (0,))


def weight_operand(ts: TracedSite) -> int | None:
    """Which operand is the stored weight: either of a product, only rhs of a conv or ragged_dot."""
    sides = {"dot_general": (1, 0), "einsum": (1, 0), "take": (0,)}.get(ts.site.op, (1,))
    return next((k for k in sides if isinstance(ts.sources[k], Origin)), None)


def request(ts: TracedSite, rule: QuantizationRule, per_tensor: bool = False) -> Request | None:
    """How the Site's weight would be stored, in the axes of its parameter.

    `per_tensor` shares the scale within each layer.
    """
    side = weight_operand(ts)
    if side is None or rule.weight_qtype is None:
        return None
    origin: Origin = ts.sources[side]  # type: ignore[assignment]
    fields = dict(
        qtype=rule.weight_qtype,
        calibration_method=_measured(rule.weight_calibration_method),
        scale_dtype=rule.scale_dtype,
    )
    fields |= forward_changes(rule, side)
    if fields["qtype"] is None:
        name = ("lhs", "rhs")[side] + "_qtype"
        raise PlanError(_MSG_FLOAT_WEIGHT.format(site=ts.site.id, name=name, leaf=origin.leaf))
    shared = fields.pop("disable_channelwise_axes", False) or per_tensor
    tile = fields.pop("tile_size", rule.tile_size)
    try:
        if ts.site.op == "conv_general_dilated" and tile is not None:
            raise ValueError("subchannel is not supported for conv_general_dilated.")
        local = operand_how(ts, side, tile_size=tile, disable_channelwise_axes=shared, **fields)
        shape = ts.eqn.invars[side].aval.shape
        tiled = {
            a % len(shape): (t if isinstance(t, int) else max(round(shape[a] * t), 1))
            for a, t in local.tiled_axes.items()
        }
        for axis, size in tiled.items():
            if size > shape[axis]:
                raise TileDoesNotFit(
                    f"{shape_text(shape)} cannot be tiled as {{{axis}: {size}}}. That axis has "
                    f"only {shape[axis]} elements."
                )
        channelwise, tiles = leaf_granularity(origin, local.channelwise_axes, tiled)
    except ValueError as error:
        place = f"{ts.site.id} ({shape_text(origin.leaf_shape)} parameter '{origin.leaf}')"
        raise PlanError(f"{place}: {error} The rule is {rule!r}. {_other_rule(rule)}") from error
    roles = _roles(ts, side, origin)
    how = HowToQuantize(channelwise_axes=channelwise, tiled_axes=tiles, roles=roles, **fields)
    _refuse_flat(ts, rule, origin, how, local.replace(tiled_axes=tiled), shape)
    return Request(origin.leaf, how, ts, rule)


def _refuse_flat(
    ts: TracedSite,
    rule: QuantizationRule,
    origin: Origin,
    how: HowToQuantize,
    local: HowToQuantize,
    shape: Sequence[int],
) -> None:
    """Raise for a parameter stored in another shape than it is used in, if that costs its scales.

    An axis that is summed over in part, its minor part kept, has a scale for each of its values.
    """
    values, scales = prod(origin.leaf_shape), prod(get_scale_shape(origin.leaf_shape, how))
    asked = prod(get_scale_shape(shape, local)) / max(prod(shape), 1)
    if not values or scales * _FEW <= values or scales / values <= asked * 1.001:
        return
    each = values // scales
    raise PlanError(
        _MSG_FLAT.format(
            site=ts.site.id,
            leaf=origin.leaf,
            stored=shape_text(origin.leaf_shape),
            used=shape_text(shape),
            few="value" if each == 1 else f"{each} values",
            name=origin.leaf.rpartition("/")[2],
            path=re.escape(ts.site.path),
            rule=rule,
        )
    )


def _roles(ts: TracedSite, side: int, origin: Origin) -> str | None:
    """What the product does with the parameter's axes, where that is a matrix product."""
    if ts.eqn.primitive.name == "conv_general_dilated":
        shape = ts.eqn.invars[side].aval.shape
        if not reads_panels(shape, ts.eqn.params):
            return None
        _, channel, *spatial = ts.eqn.params["dimension_numbers"].rhs_spec
        return leaf_roles(origin, spatial, (channel,))
    if ts.site.op == "ragged_dot":
        numbers = ts.eqn.params["ragged_dot_dimension_numbers"]
        (_, summed), batch = numbers.dot_dimension_numbers
        ragged = tuple(numbers.lhs_ragged_dimensions) == (0,) and not batch[0] and side == 1
        groups = numbers.rhs_group_dimensions
        return leaf_roles(origin, summed, stacked=groups) if ragged else None
    if ts.eqn.primitive.name != "dot_general":
        return None
    summed, batch = ts.eqn.params["dimension_numbers"]
    return leaf_roles(origin, summed[side], stacked=batch[side])


def operand_how(ts: TracedSite, side: int, *, tile_size: Any, **fields: Any) -> HowToQuantize:
    """How an operand of a Site is quantized, in the axes the product sees."""
    params, ndims = ts.eqn.params, tuple(v.aval.ndim for v in ts.eqn.invars[:2])
    if ts.site.op == "take":
        (axis,) = params["dimension_numbers"].collapsed_slice_dims
        return granularity.take_how(ndims[0], axis=axis, tile_size=tile_size, **fields)
    if ts.site.op == "conv_general_dilated":  # a tile is refused where the weight's is decided
        numbers = params["dimension_numbers"]
        return granularity.conv_how(dimension_numbers=numbers, for_lhs=side == 0, **fields)
    if ts.site.op == "ragged_dot":
        return granularity.ragged_dot_how(for_lhs=side == 0, tile_size=tile_size, **fields)
    numbers = params["dimension_numbers"]
    common = dict(ndims=ndims, for_lhs=side == 0, tile_size=tile_size, **fields)
    if ts.site.op == "dot_general":
        return granularity.dot_how(dimension_numbers=numbers, **common)
    return granularity.einsum_how(einsum_str=product_letters(numbers, *ndims), **common)


def activation_fields(rule: QuantizationRule, side: int) -> dict[str, Any]:
    """What a rule says of an activation, in the words of the granularity functions."""
    fields = dict(
        qtype=rule.act_qtype,
        tile_size=rule.tile_size,
        calibration_method=_measured(rule.act_calibration_method or "absmax"),
    )
    return fields | forward_changes(rule, side)


def activation_how(ts: TracedSite, side: int, rule: QuantizationRule) -> HowToQuantize | None:
    """How a Site quantizes an operand that is no weight; None where it stays as it is."""
    fields, weight = activation_fields(rule, side), weight_operand(ts)
    if fields["qtype"] is None:
        return None
    ndim = None if weight is None else ts.eqn.invars[weight].aval.ndim
    axes = _summed_axes(ts)
    tiles = granularity.beside(
        fields["tile_size"], ndim, axes[side], axes[1 - side], fields["qtype"]
    )
    return operand_how(ts, side, **{**fields, "tile_size": tiles})


def _summed_axes(ts: TracedSite) -> tuple[Sequence[int], Sequence[int]]:
    params = ts.eqn.params
    if ts.site.op == "ragged_dot":
        return params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    return params["dimension_numbers"][0] if ts.eqn.primitive.name == "dot_general" else ((), ())


def _measured(method: str) -> str:
    """The method by which an array itself is measured: what is delayed is its largest value."""
    return "absmax" if history_length(method) is not None else method


def remembered(rule: QuantizationRule, side: int | None, is_weight: bool = False) -> int | None:
    """The history length of one operand of a Site, or of its gradient (side None), if it has one.

    What `additional_qt_config` says of an operand goes before the rule's own method.
    """
    if not isinstance(rule, QtRule):
        return None
    if side is None:
        return history_length(rule.bwd_calibration_method) if rule.bwd_qtype is not None else None
    fields = forward_changes(rule, side)
    qtype = fields.get("qtype", rule.weight_qtype if is_weight else rule.act_qtype)
    if qtype is None or "calibration_method" in fields:
        return None
    method = rule.weight_calibration_method if is_weight else rule.act_calibration_method
    return history_length(method)


def forward_changes(rule: QuantizationRule, side: int) -> dict[str, Any]:
    """What a rule for training says of one operand of the forward product in particular."""
    if not isinstance(rule, QtRule):
        return {}
    own, prefix = rule.additional_qt_config or {}, ("lhs_", "rhs_")[side]
    fields = {name: own[prefix + name] for name in _FORWARD if prefix + name in own}
    if rule.disable_channelwise_axes:
        fields.setdefault("disable_channelwise_axes", True)
    return fields | ({"tile_size": own["tile_size"]} if "tile_size" in own else {})


def _other_rule(rule: QuantizationRule) -> str:
    own = format_of(rule.weight_qtype).tile
    if own is None:
        return _MSG_TILE
    # tile_size cannot help: the format has one tile
    return _MSG_ONE_TILE.format(name=qtype_name(rule.weight_qtype), own=own)


def storage(
    programs: Sequence[Program], decisions: Sequence[dict[str, Decision]], complaint: Complaint
) -> dict[str, Request]:
    """One request per leaf. Two Sites that want a leaf stored differently are an error naming both.

    Where `complaint` lets it pass, the first Site's storage stands and the other reads it
    dequantized.
    """
    chosen: dict[str, Request] = {}
    look_ups: list[Request] = []
    excluded: dict[str, TracedSite] = {}

    def choose(wanted: Request) -> None:
        first = chosen.setdefault(wanted.leaf, wanted)
        # A product's granularity serves a look-up, not the other way round.
        served = wanted.site.site.op == "take" and first.site.site.op != "take"
        if not served and not _same_storage(first.how, wanted.how):
            complaint(_conflict(first, wanted))

    for program, decided in zip(programs, decisions, strict=True):
        for ts in program.sites:
            decision = decided[ts.site.id]
            if decision.rule is None:
                switched = decision.reason is not None and "switches it off" in decision.reason
                if switched and ts.site.weight and weight_operand(ts) is not None:
                    excluded.setdefault(ts.site.weight, ts)
                continue
            if ts.site.op == "take" and "take" not in decision.rule.op_names:
                continue  # it reads the table as the product stores it
            wanted = request(ts, decision.rule)
            if wanted is not None and ts.site.op == "take":
                look_ups.append(wanted)
            elif wanted is not None:
                choose(wanted)
    for wanted in look_ups:
        choose(wanted)
    for leaf, ts in excluded.items():
        if leaf in chosen:
            qtype, site = qtype_name(chosen[leaf].how.qtype), chosen[leaf].site.site.id
            complaint(_MSG_EXCLUDED.format(leaf=leaf, qtype=qtype, site=site, other=ts.site.id))
    return chosen


def _same_storage(a: HowToQuantize, b: HowToQuantize) -> bool:
    fields = ["qtype", "calibration_method", "scale_dtype"]
    if not parse_method(a.calibration_method).per_tensor:  # one scale, whatever the axes are
        fields += ["channelwise_axes", "tiled_axes"]
    return all(getattr(a, f) == getattr(b, f) for f in fields)


def _conflict(a: Request, b: Request) -> str:
    def want(r: Request) -> str:
        return (
            f"{r.site.site.id} wants {qtype_name(r.how.qtype)} with {granularity_text(r.how)} "
            f"(scales on axes {r.how.channelwise_axes}, tiles {dict(r.how.tiled_axes)})"
        )

    either = "|".join(dict.fromkeys(re.escape(r.site.site.path) for r in (a, b)))
    return _MSG_CONFLICT.format(leaf=a.leaf, a=want(a), b=want(b), either=either)


def granularity_text(how: HowToQuantize) -> str:
    """How a weight's scales are laid out, for the table."""
    learned = ", learned" if parse_method(how.calibration_method).learned else ""
    if how.tiled_axes:
        return "tile " + "x".join(str(t) for t in how.tiled_axes.values()) + learned
    return ("per-channel" if how.channelwise_axes else "per-tensor") + learned


def shape_text(shape: Sequence[int]) -> str:
    """A shape as messages write it: `(8)` where Python has a comma."""
    return "(" + ", ".join(map(str, shape)) + ")"
