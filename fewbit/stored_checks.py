"""What a quantized model checks before it runs: are the parameters stored as its rules say?"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from fewbit._plan import Plan, SitePlan
from fewbit._plan_messages import unmatched_message
from fewbit.decisions import Decision, Request
from fewbit.layouts import would_be_faster
from fewbit.qarray import QArray, WithAux
from fewbit.trace import Program
from fewbit.weight import is_weight

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


def check_stored(
    program: Program,
    values: Sequence[Any],
    decisions: Mapping[str, Decision],
    requests: Mapping[str, Request],
    provider: Any,
) -> None:
    """Parameters must be stored as the rules say."""
    stored = {v.leaf: v for v in values if is_weight(v)}
    for leaf, wanted in requests.items():
        site = wanted.site.site.id
        if leaf not in stored:
            raise ValueError(_MSG_UNQUANTIZED.format(leaf=leaf, site=site, qtype=wanted.how.qtype))
        qtype = stored[leaf].array.qtype
        if qtype != wanted.how.qtype:
            raise ValueError(
                _MSG_OTHER_TYPE.format(leaf=leaf, stored=qtype, wanted=wanted.how.qtype, site=site)
            )
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
) -> None:
    """A model whose rules all miss would run in float without a word."""
    sites = [ts.site for ts in program.sites]
    if not (provider.strict and sites) or any(map(is_weight, values)):
        return
    active = [i for i, rule in enumerate(provider.rules) if not rule.switched_off]
    in_force = any(decision.rule is not None for decision in decisions.values())
    if not active or in_force or any(map(provider.asked_by_kernel, active)):
        return
    used = {decision.rule_index for decision in decisions.values()}
    missed = [provider.rules[i] for i in active if i not in used]
    why = f"At {sites[0].id}: {decisions[sites[0].id].reason}."
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
