"""What a trace of a model is made of: a tree's leaves as values, and what is checked of them."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit.interpreter._weights import Weight, is_weight, without_gradient
from fewbit.kernels import would_be_faster
from fewbit.planning import (
    Decision,
    Leaf,
    Plan,
    Request,
    SitePlan,
    asks,
    unmatched_message,
    why_inputs,
    why_nothing,
)
from fewbit.qarray import QArray, WithAux
from fewbit.tracing import Program

LeafPath = Callable[[tuple[Any, ...]], str | None]

_MSG_UNTRACEABLE = """{where} cannot be traced: its Python code asks for the value of an array.
  {error}
fewbit reads a model the way jax.jit does. Two cures:
  1. Pass what the code branches on as a plain Python value (a bool, int or string is never traced).
  2. Quantize the submodules that can be traced on their own, and leave this one in float."""


class UntraceableModelError(TypeError):
    """A model whose Python code depends on array values."""


def untraceable(what: str, failed: Sequence[str], error: Exception) -> UntraceableModelError:
    """The error for `what`, of which the module at path `failed[0]` asked for a value."""
    where = f"Module '{failed[0]}' of {what}" if failed and failed[0] else what
    first_line = str(error).strip().split("\n")[0]
    return UntraceableModelError(_MSG_UNTRACEABLE.format(where=where, error=first_line))


def float_view(value: Any) -> Any:
    """The abstract float array that a leaf, quantized or not, stands for."""
    q = value.array if isinstance(value, WithAux) else value
    if not isinstance(q, QArray):
        return q if isinstance(q, jax.ShapeDtypeStruct) else jax.typeof(q)
    # Packed codes are unpacked to be looked at: here only on paper.
    codes = q.qvalue if q.layout == "plain" else jax.eval_shape(lambda q: q.qvalue, q)
    return float_view(codes).update(dtype=q.dtype)


def as_value(value: Any, leaf: str | None) -> Any:
    """A tree leaf as a value of the interpreter."""
    q, rule = (value.array, value.how.rule) if isinstance(value, WithAux) else (value, None)
    if not isinstance(q, QArray):
        return q
    return Weight(without_gradient(q, leaf or ""), leaf or "", rule)


@dataclass
class Traced:
    """One trace of a runner's function on one set of inputs."""

    program: Program
    values: list[Any]
    out_tree: Any
    forwarded: Sequence[int | None]  # output k is input forwarded[k], untouched
    leaves: list[Leaf | None]  # aligned with values; None for an input that is no parameter
    scales: dict[str, Any] = field(default_factory=dict)  # static scales among the inputs
    learned: dict[str, Any] = field(default_factory=dict)  # scales that training fits


# --- Before a quantized model runs: are the parameters stored as its rules say? -------------------

_MSG_UNQUANTIZED = (
    "It seems you're feeding an unquantized param to a quantized model. Parameter '{leaf}' is "
    "float, but {site} wants it as {qtype}. Quantize the tree first: "
    "quantize_params(params, plan), or for Linen "
    "quantize_params(params, jax.eval_shape(model.init, key, x)['params'])."
)
_MSG_OTHER_TYPE = (
    "Parameter '{leaf}' is stored as {stored}, but the rule for {site} says {wanted}. Quantize the "
    "float parameters with these rules, or run the model with the rules they were quantized by."
)
_MSG_NO_RULE = (
    "Parameter '{leaf}' is stored as {stored}, but no rule of this provider matches {site}, so it "
    "would be read dequantized. Run the model with the rules its parameters were quantized by "
    "(this one by {was!r}), or make the provider with strict=False."
)
_MSG_KEPT_FLOAT = (
    "Parameter '{leaf}' is stored as {stored}, but {rule!r} keeps {site} float. Run the model with "
    "the rules its parameters were quantized by, or give it the float parameter: "
    "fewbit.dequantize(...)."
)
_MSG_NOTHING = (
    "Nothing in this call is quantized: no parameter of {what} is stored quantized, and no rule is "
    "in force at {count} of it. {why} fewbit.plan(model, rules, ...) shows which rule meets "
    "which Site; make the provider with strict=False to run the model in float."
)
_MSG_CONSTANT_CALL = "Nothing in this call of {what} is stored quantized. {why}"


def check_stored(
    program: Program,
    values: Sequence[Any],
    decisions: Mapping[str, Decision],
    requests: Mapping[str, Request],
    provider: Any,
    what: str,
    cure: str = "",
) -> None:
    """Parameters must be stored as the rules say."""
    stored = {v.leaf: v for v in values if is_weight(v)}
    why = why_inputs(provider, [(program, decisions)], cure) if requests and not stored else None
    if why is not None:
        raise ValueError(_MSG_CONSTANT_CALL.format(what=what, why=why))
    for leaf, wanted in requests.items():
        site = wanted.site.site.id
        if leaf not in stored:
            raise ValueError(_MSG_UNQUANTIZED.format(leaf=leaf, site=site, qtype=wanted.how.qtype))
        types = dict(stored=stored[leaf].array.qtype, wanted=wanted.how.qtype)
        if types["stored"] != types["wanted"]:
            raise ValueError(_MSG_OTHER_TYPE.format(leaf=leaf, site=site, **types))
    for ts in program.sites if provider.strict else ():
        read, index = ts.site.weight, decisions[ts.site.id].rule_index
        if read is None or read not in stored or read in requests or ts.site.op == "take":
            continue  # a table stored for another method's logits is read as it is
        rule = None if index is None else provider.rules[index]
        if rule is not None and rule.weight_qtype is not None:
            continue
        message, weight = _MSG_NO_RULE if rule is None else _MSG_KEPT_FLOAT, stored[read]
        kept = dict(leaf=read, stored=weight.array.qtype, site=ts.site.id)
        raise ValueError(message.format(**kept, rule=rule, was=weight.rule))


def check_something(
    program: Program,
    values: Sequence[Any],
    decisions: Mapping[str, Decision],
    provider: Any,
    what: str,
    cure: str = "",
) -> None:
    """A model whose rules all miss would run in float without a word."""
    sites = [ts.site for ts in program.sites]
    if not (provider.strict and sites) or any(map(is_weight, values)):
        return
    why = why_inputs(provider, [(program, decisions)], cure) if provider.trains else None
    pairs = [(ts, decisions[ts.site.id]) for ts in program.sites]
    why = why or why_nothing(provider, pairs, cure)
    if any(decision.rule is not None for decision in decisions.values()):
        if why is not None:
            raise ValueError(_MSG_CONSTANT_CALL.format(what=what, why=why))
        return
    active = [i for i, rule in enumerate(provider.rules) if asks(rule)]
    if not active or any(map(provider.asked_by_kernel, active)):
        return
    used = {decision.rule_index for decision in decisions.values()}
    missed = [provider.rules[i] for i in active if i not in used]
    if missed:
        rows = (SitePlan(s, None, None, None, None, "", "float", "float") for s in sites)
        why = unmatched_message(Plan(provider.rules, tuple(rows), ()), missed)
    count = "the one Site" if len(sites) == 1 else f"any of the {len(sites)} Sites"
    raise ValueError(_MSG_NOTHING.format(what=what, count=count, why=why))


@functools.cache
def _say_unpacked() -> None:
    logging.getLogger("fewbit").warning(
        "Quantized parameters with one code per element run through XLA, which is slow for them on "
        "a CPU. fewbit.pack(params), or quantize_params(params, plan) with a plan, stores them for "
        "the native kernels."
    )


def say_once_if_unpacked(leaves: Iterable[Any]) -> None:
    """A plain tree runs everywhere; on a CPU with kernels that is not what people want."""
    for leaf in leaves:
        if isinstance(leaf, WithAux) and isinstance(leaf.array, QArray):
            if jax.default_backend() == "cpu" and would_be_faster(leaf.array, leaf.how):
                return _say_unpacked()
