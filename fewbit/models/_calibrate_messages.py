"""What calibration says when batches, models, plans and observers do not fit together."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.calibration import CURE, CalibrationError, Operand
from fewbit.interpreter import UntraceableModelError, is_array
from fewbit.planning import Plan, PlanError, ScalePlan
from fewbit.qarray import parse_method

ARGUMENTS = (
    "fewbit.calibrate(model, rules_or_plan, params, batches) takes rules or a Plan as its second "
    "argument, got a {found}. For an NNX model leave params out: "
    "fewbit.calibrate(model, rules, batches)."
)
ONE_RULE = "calibrate takes a list of rules: write [{rule!r}]."
NO_BATCHES = (
    "There are no batches to calibrate with: `batches` is empty. Give an iterable of sample "
    "inputs, such as [x1, x2]; a generator that has been used up gives none."
)
MISSING = (
    "calibrate takes the parameters and the batches: fewbit.calibrate(model, rules, params, "
    "batches). Only an NNX model holds its parameters itself."
)
ONE_BATCH = (
    "`batches` is {found}, which would be taken apart along its first axis or its keys. Give a "
    "list of batches: [batch]; keyword arguments go into fewbit.Batch(*args, **kwargs)."
)
NOT_BATCHES = "`batches` is a {found}, not an iterable of batches. Write [batch] for one."
ABSTRACT = (
    "calibrate runs the model, so it needs real parameters and batches; batch {number} or the "
    "parameters are abstract (jax.ShapeDtypeStruct). Only fewbit.plan is content with those."
)
STORED = (
    "calibrate runs the float model, but the parameter '{leaf}' is stored quantized. Give it the "
    "float parameters, calibrate, and quantize them afterwards: "
    "quantize_params(params, plan, stats)."
)
_MSG_NOTHING = (
    "There is nothing to calibrate: no operand of the model is one that {observers} looks at. {why}"
)
_MSG_NO_STATIC = (
    "No rule has a static range. Write act_static_scale=True beside act_qtype in a rule, for "
    "example {rule}; dynamic ranges and weight-only rules need no calibration."
)
_MSG_ALL_FIXED = (
    "All static ranges are fixed by their rules: quantize_params(params, plan) needs no statistics."
)
_MSG_OTHER_PLAN = (
    "{site} has a static range, and the plan has no '{name}': the plan is of another model, of "
    "other rules or of another method (it has {methods}). Make it again: fewbit.plan(model, rules, "
    "...)."
)
_MSG_SHAPE = (
    "{site} needs ranges of shape {found} for its {side} {dtype}{shape}, but the plan has "
    "{wanted}. Ranges do not depend on an axis that is in act_batch_axes: write "
    "act_batch_axes={axes} in the rule, or calibrate on inputs like those of the plan."
)
_MSG_BATCH = "Batch {number} does not fit the model: {error} The batch is {batch}. {hint}"
_MSG_SPOILT = (
    "Batch {number} has NaN or Inf at {site} ({side} {dtype}{shape}){more}. {why} Nothing of this "
    "batch was counted."
)
_MSG_NO_NUMBERS = (
    "Batch {number} has no numbers at {site} ({side} {dtype}{shape}): the batch is {batch}. Leave "
    "out batches of no rows (the last one of a data set that was cut evenly, say). Nothing of this "
    "batch was counted."
)
_MSG_EMPTY = (
    "{count} of {total} observed operands saw no data in {batches}: {names}. {why} Give batches "
    "that reach them, or use dynamic ranges there (act_static_scale=None in a rule of their own)."
)
_MSG_ZERO = (
    "All values seen at {names} are zero, which is no range to quantize by. Calibrate on real "
    "inputs, or use a dynamic range there: act_static_scale=None in a rule of its own."
)
_MSG_TINY = (
    "All values seen at {names} are so small (at most {largest:.2g}) that their scale would be "
    "nothing, and all of them would become zeros, with a dynamic range too. Calibrate on real "
    "inputs. {cure}."
)


class NoNumbers(CalibrationError):
    """An operand of size zero, which has no range."""

    def __init__(self, operand: Operand):
        super().__init__(f"{operand.site.id} has no numbers")
        self.operand = operand

    def told(self, number: int, batch: Any) -> str:
        """Which batch, and which Site met nothing."""
        facts = dict(side=self.operand.side, dtype=self.operand.dtype)
        where = dict(site=self.operand.site.id, shape=list(self.operand.shape))
        return _MSG_NO_NUMBERS.format(number=number, batch=_shapes(batch), **facts, **where)


def nothing(plan: Plan, observers: Sequence[str]) -> str:
    """Why no operand is observed, and what to change."""
    names = " or ".join(f"the observer '{name}'" for name in observers)
    if plan.scales and all(
        parse_method(s.how.calibration_method).name == "fixed" for s in plan.scales
    ):
        why = _MSG_ALL_FIXED
    else:
        rule = next((r for r in plan.rules if r.act_qtype is not None), None)
        rule = rule or next((r for r in plan.rules if r.weight_qtype is not None), None)
        example = "QuantizationRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)"
        if rule is not None and rule.act_qtype is not None and not rule.act_static_scale:
            example = repr(rule.replace(act_static_scale=True))
        why = _MSG_NO_STATIC.format(rule=example)
    return _MSG_NOTHING.format(observers=names, why=why)


def check_planned(operand: Operand, planned: Mapping[str, ScalePlan]) -> None:
    """Raise if the plan has no such range, or one of another form."""
    if operand.scale_shape is None:
        return
    scale = planned.get(operand.name)
    where = dict(site=operand.site.id)
    if scale is None:
        have = ", ".join(list(planned)[:3]) + (", ..." if len(planned) > 3 else "")
        text = dict(name=operand.name, methods=have or "no static range at all")
        raise CalibrationError(_MSG_OTHER_PLAN.format(**where, **text))
    full = (*operand.layers, *operand.scale_shape)
    if full == scale.shape:
        return
    depth = len(operand.layers)
    pairs = zip(operand.scale_shape, scale.shape[depth:], strict=False)
    differ = {axis for axis, (n, m) in enumerate(pairs) if n != m}
    axes = tuple(sorted({*operand.rule.act_batch_axes, *differ}))
    facts = dict(found=full, side=operand.side, dtype=operand.dtype, wanted=scale.shape, axes=axes)
    raise CalibrationError(_MSG_SHAPE.format(**where, shape=list(operand.shape), **facts))


def wrapped(error: Exception, number: int, batch: Any) -> Exception:
    """An error in a batch's run, with the batch's number; one that says enough stays as it is."""
    if isinstance(error, PlanError | UntraceableModelError):
        return error
    if isinstance(error, CalibrationError):
        return CalibrationError(f"Batch {number}: {error}") if number > 1 else error
    hint = (
        "A tuple is taken as the positional arguments, anything else as the only one; "
        "fewbit.Batch(*args, **kwargs) says it all."
    )
    first = str(error).strip().split("\n")[0]
    text = dict(error=f"{type(error).__name__}: {first}", batch=_shapes(batch), hint=hint)
    return CalibrationError(_MSG_BATCH.format(number=number, **text))


def spoilt(operand: Operand, number: int, batch: Any, count: int) -> str:
    """Which batch, which Site, and whether the batch itself is to blame."""
    arrays = [x for x in jax.tree.leaves((batch.args, batch.kwargs)) if is_array(x)]
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if not all(bool(jnp.all(jnp.isfinite(x))) for x in floats):
        why = "The batch itself holds them: leave it out, or clean it."
    else:
        why = (
            "Its inputs are finite: they come from the model itself (a parameter that is not "
            "finite, an overflow, a division by zero)."
        )
    more = f" and {count - 1} more" if count > 1 else ""
    facts = dict(side=operand.side, dtype=operand.dtype, shape=list(operand.shape))
    return _MSG_SPOILT.format(number=number, site=operand.site.id, more=more, why=why, **facts)


def empty(operands: Mapping[str, Operand], counts: Mapping[str, Any], batches: int) -> str:
    """Operands whose Sites did not run."""

    def label(name: str) -> str:
        text, count = f"{operands[name].site.id} {operands[name].side}", counts[name]
        if count is not None and np.ndim(count):
            missed = ["/".join(map(str, index)) for index in np.argwhere(count == 0)]
            numbers = ", ".join(missed[:5]) + (", ..." if len(missed) > 5 else "")
            text += f" (layer {numbers})" if np.any(count > 0) else " (all layers)"
        return text

    names = [label(name) for name in counts]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    why = (
        "They stand in a branch (lax.cond, lax.switch) that no batch took, or in a loop that "
        "never ran."
    )
    if batches == 0:
        why = "No batch was counted."
    how_many = "1 batch" if batches == 1 else f"{batches} batches"
    return _MSG_EMPTY.format(
        count=len(counts), total=len(operands), batches=how_many, names=shown, why=why
    )


def all_zero(operands: Sequence[Operand]) -> str:
    """Operands that saw nothing but zeros."""
    return _MSG_ZERO.format(names=_places(operands))


def tiny(operands: Sequence[Operand], largest: float) -> str:
    """Operands whose numbers are too small for a scale."""
    return _MSG_TINY.format(names=_places(operands), largest=largest, cure=CURE)


def _places(operands: Sequence[Operand]) -> str:
    names = [f"{operand.site.id} {operand.side}" for operand in operands]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def describe_batches(batches: Any) -> str:
    """What somebody gave instead of a list of batches."""
    if is_array(batches):
        return f"one array of shape {tuple(batches.shape)}"
    return f"a {type(batches).__name__}"


def _shapes(batch: Any) -> str:
    def leaf(value: Any) -> str:
        return f"{value.dtype}{list(value.shape)}" if is_array(value) else repr(value)

    args = [str(jax.tree.map(leaf, a)).replace("'", "") for a in batch.args]
    named = [f"{k}={jax.tree.map(leaf, v)}".replace("'", "") for k, v in batch.kwargs.items()]
    return f"({', '.join([*args, *named])})"
