"""Decide: which rule governs a Site, and how that asks its parameter to be stored."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fewbit._plan_messages import Complaint, PlanError
from fewbit.calibration import history_length, parse_method
from fewbit.numerics import format_of, qtype_name, should_quantize
from fewbit.ops import granularity, panel_conv
from fewbit.provenance import (
    Changed,
    Constant,
    Origin,
    TileDoesNotFit,
    leaf_granularity,
    leaf_roles,
)
from fewbit.qarray import HowToQuantize
from fewbit.rules import QtRule, QuantizationRule
from fewbit.trace import Program, TracedSite
from fewbit.trace_shapes import product_letters

_MSG_FLOAT_WEIGHT = (
    "{site}: additional_qt_config[{name!r}] is None, which would leave the parameter '{leaf}' "
    "float. Write weight_qtype=None in a rule for this path instead, or leave {name!r} out: the "
    "weight then has the rule's weight_qtype."
)


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
    decisions = {
        ts.site.id: _decide(ts, *rule_for(ts)) for ts in program.sites if ts.site.op != "take"
    }
    in_product = {
        ts.site.weight
        for ts in program.sites
        if ts.site.op != "take" and ts.site.weight and decisions[ts.site.id].rule is not None
    }
    for ts in program.sites:
        if ts.site.op == "take":
            decisions[ts.site.id] = _decide_look_up(ts, *rule_for(ts), ts.site.weight in in_product)
    return decisions


def _decide(ts: TracedSite, index: int | None, rule: QuantizationRule | None) -> Decision:
    if rule is None:
        return Decision(None, None, "no rule matches")
    if rule.switched_off:
        unused = "" if rule.act_qtype is None else ": without weight_qtype its act_qtype is unused"
        return Decision(index, None, f"rule {index} switches it off{unused}")
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
    if rule is not None and rule.switched_off and "take" in rule.op_names:
        return Decision(index, None, f"rule {index} switches it off")
    if rule is not None and not rule.switched_off and "take" in rule.op_names:
        return Decision(index, rule)
    if in_product:
        return Decision(None if rule is None or rule.switched_off else index, rule, None)
    if rule is None or rule.switched_off:
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
    sides = (
        (1, 0)
        if ts.site.op in ("dot_general", "einsum")
        else (0,)
        if ts.site.op == "take"
        else (1,)
    )
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
    place = f"{ts.site.id} ({_shape(origin.leaf_shape)} parameter '{origin.leaf}')"
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
                    f"{_shape(shape)} cannot be tiled as {{{axis}: {size}}}. That axis has only "
                    f"{shape[axis]} elements."
                )
        channelwise, tiles = leaf_granularity(origin, local.channelwise_axes, tiled)
    except ValueError as error:
        raise PlanError(f"{place}: {error} The rule is {rule!r}. {_other_rule(rule)}") from error
    roles = _roles(ts, side, origin)
    how = HowToQuantize(channelwise_axes=channelwise, tiled_axes=tiles, roles=roles, **fields)
    return Request(origin.leaf, how, ts, rule)


def _roles(ts: TracedSite, side: int, origin: Origin) -> str | None:
    """What the product does with the parameter's axes, where that is a matrix product."""
    if ts.eqn.primitive.name == "conv_general_dilated":
        shape = ts.eqn.invars[side].aval.shape
        if not panel_conv.reads_panels(shape, ts.eqn.params):
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


_FORWARD = ("qtype", "calibration_method", "disable_channelwise_axes")


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
    if own is not None:  # tile_size cannot help: the format has one tile
        return (
            f"{qtype_name(rule.weight_qtype)} is always in tiles of {own}: give this path another "
            "format in a rule of its own before this one, or keep it float with "
            "QuantizationRule(module_path=...)."
        )
    return (
        "Give this path a rule of its own with a tile_size that fits (or None), before the general "
        "one."
    )


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
            if wanted is None:
                continue
            if ts.site.op == "take":
                look_ups.append(wanted)
                continue
            first = chosen.setdefault(wanted.leaf, wanted)
            if not _same_storage(first.how, wanted.how):
                complaint(_conflict(first, wanted))
    for wanted in look_ups:  # a product's granularity serves a look-up, not the other way round
        first = chosen.setdefault(wanted.leaf, wanted)
        if first.site.site.op == "take" and not _same_storage(first.how, wanted.how):
            complaint(_conflict(first, wanted))
    for leaf, ts in excluded.items():
        if leaf in chosen:
            complaint(
                f"Parameter '{leaf}' is wanted as {qtype_name(chosen[leaf].how.qtype)} by "
                f"{chosen[leaf].site.site.id} and kept float by {ts.site.id}, which a rule with "
                "weight_qtype=None matches. One parameter is stored once: let the exclusion cover "
                "both Sites, or drop it."
            )
    return chosen


def _same_storage(a: HowToQuantize, b: HowToQuantize) -> bool:
    fields = ["qtype", "calibration_method", "scale_dtype"]
    if not parse_method(a.calibration_method).per_tensor:  # one scale, whatever the axes are
        fields += ["channelwise_axes", "tiled_axes"]
    return all(getattr(a, f) == getattr(b, f) for f in fields)


def _conflict(a: Request, b: Request) -> str:
    def want(r: Request) -> str:
        return f"{r.site.site.id} wants {qtype_name(r.how.qtype)} with {granularity_text(r.how)}"

    return (
        f"Parameter '{a.leaf}' is used by two Sites that want it stored differently: {want(a)} "
        f"(scales on axes {a.how.channelwise_axes}, tiles {dict(a.how.tiled_axes)}); {want(b)} "
        f"(scales on axes {b.how.channelwise_axes}, tiles {dict(b.how.tiled_axes)}). A parameter "
        f"is stored once: keep it float with QuantizationRule(module_path={_either(a, b)!r}) "
        "before the other rules, or give both Sites the same type and the same contracted axis."
    )


def _either(a: Request, b: Request) -> str:
    return "|".join(dict.fromkeys(re.escape(r.site.site.path) for r in (a, b)))


def granularity_text(how: HowToQuantize | None) -> str:
    """How a weight's scales are laid out, for the table."""
    if how is None:
        return ""
    learned = ", learned" if parse_method(how.calibration_method).learned else ""
    if how.tiled_axes:
        return "tile " + "x".join(str(t) for t in how.tiled_axes.values()) + learned
    return ("per-channel" if how.channelwise_axes else "per-tensor") + learned


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
