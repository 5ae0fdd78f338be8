"""What a quantized model checks before it runs: are the parameters stored as its rules say?"""

import functools
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from fewbit._plan import Plan, SitePlan
from fewbit._plan_messages import unmatched_message
from fewbit.decisions import Decision, Request
from fewbit.layouts import would_be_faster
from fewbit.provenance import Changed, Constant, Origin
from fewbit.qarray import QArray, WithAux
from fewbit.rules import QuantizationRule
from fewbit.trace import Program, TracedSite
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
_MSG_CONSTANT_CALL = "Nothing in this call of {what} is stored quantized. {why}"
_MSG_ACT_ALONE = (
    "Rule {number} has act_qtype without weight_qtype, and so switches off what it matches. Write "
    "{fixed!r}."
)
_MSG_CONSTANTS = (
    "The weights at {sites} are constants of the function and no parameters, so none of them can "
    "be stored{anew}. {cure}"
)
_ANEW = ", and each would be quantized anew at every call"
_MSG_INPUTS = (
    "The first argument meets nothing but constants in products, so that it is an input, and would "
    "be stored quantized in place of the parameters. "
)
_IN_A_DICT = " If it is the parameters, pass it in a dict: f({'w': w}, *inputs)."
_MAKE_PARAMETERS = "Make them the first argument of the function: f(params, *inputs)."
_MSG_HOLDER = (
    "A {name} has its parameters in .params and its Linen module in .module. Pass the parameters: "
    "f = lambda params, *inputs: model(*inputs, params=params), then "
    "fewbit.plan(f, rules, model.params, *inputs); or quantize the module, "
    "fewbit.plan(model.module, rules, *inputs) and quantize_params(model.params, plan)."
)


def holder_cure(model: Any) -> str:
    """What to do with an object that holds a Linen module and its parameters; '' for any other.

    Hugging Face's Flax models are such: a call of one closes over its parameters.
    """
    module = getattr(model, "module", None)
    # Not asked for: Hugging Face's raise where there are none yet.
    has_params = inspect.getattr_static(model, "params", None) is not None
    is_holder = has_params and callable(getattr(module, "apply", None))
    return _MSG_HOLDER.format(name=type(model).__name__) if is_holder else ""


def why_nothing(
    provider: Any, sites: Sequence[tuple[TracedSite, Decision]], cure: str = ""
) -> str | None:
    """Why rules that ask for something do nothing to a model none of whose parameters is stored.

    None if they do, or ask for nothing. A product with a constant is not what they ask for: what
    looks like a weight would be quantized anew at every call. `cure` tells where such a model's
    parameters are.
    """
    asking, met = _met(provider, sites)
    if not met:
        return None
    constant = [ts.site.id for ts, _ in met if any(_constants(ts))]
    running = [ts.site.id for ts, decision in met if decision.rule is not None]
    held = bool(cure and constant)
    if set(running) - set(constant) and not held:
        return None
    matched = {decision.rule_index for _, decision in met}
    alone = next((i for i, rule in asking.items() if i in matched and rule.switched_off), None)
    if alone is not None:
        return act_alone(alone, asking[alone])
    if held or len(constant) == len(met):
        text = dict(sites=_some(constant), cure=cure or _MAKE_PARAMETERS)
        return _MSG_CONSTANTS.format(anew=_ANEW if running else "", **text)
    return f"At {_some([f'{ts.site.id}: {decision.reason}' for ts, decision in met], '; ')}."


def act_alone(number: int, rule: QuantizationRule) -> str:
    """What is said of a rule for activations that has nothing for weights."""
    fixed = rule.replace(weight_qtype=rule.act_qtype)
    return _MSG_ACT_ALONE.format(number=number, fixed=fixed)


def why_inputs(
    provider: Any, programs: Sequence[tuple[Program, Mapping[str, Decision]]], cure: str = ""
) -> str | None:
    """Why what stands in the place of the parameters are inputs; None if they are parameters.

    An object that holds its parameters closes over them, and its float input looks like a weight. A
    function of one bare array may do the same, but may as well be `w -> data @ w`: it does so if
    its constants stand where models have their weights, on the right of every product. A product
    without a constant may be of another argument, as in `x @ (w @ constant)`.
    """
    pairs = [(ts, d[ts.site.id]) for program, d in programs for ts in program.sites]
    asking, asked = _met(provider, pairs)
    met = [ts for ts, _ in asked]
    constant = [ts for ts in met if any(_constants(ts))]
    reading = [ts for ts in met if any(isinstance(s, Origin) for s in ts.sources)]
    if not (constant and reading and all(any(_constants(ts)) for ts in reading)):
        return None
    if not cure:
        sources = [source for ts in met for source in ts.sources]
        bare = all(s.leaf == "" for s in sources if isinstance(s, Origin | Changed))
        alone = all(len(program.root.jaxpr.invars) == 1 for program, _ in programs)
        on_the_right = all(_constants(ts)[1] for ts in constant)
        if not (bare and on_the_right and (alone or len(constant) == len(met))):
            return None
    text = dict(sites=_some([ts.site.id for ts in constant]), cure=cure or _MAKE_PARAMETERS)
    anew = any(rule.act_qtype is not None for rule in asking.values())
    why = _MSG_INPUTS + _MSG_CONSTANTS.format(anew=_ANEW if anew else "", **text)
    return why if cure else why + _IN_A_DICT


def _met(
    provider: Any, sites: Sequence[tuple[TracedSite, Decision]]
) -> tuple[dict[int, QuantizationRule], list[tuple[TracedSite, Decision]]]:
    """The rules that ask for something, and the Sites they meet: none if one asks for a kernel."""
    asking = {i: rule for i, rule in enumerate(provider.rules) if _asks(rule)}
    if any(map(provider.asked_by_kernel, asking)):
        return asking, []
    return asking, [(ts, decision) for ts, decision in sites if decision.rule_index in asking]


def _constants(ts: TracedSite) -> list[bool]:
    """Of each operand of a product, whether the function closes over it."""
    return [isinstance(source, Constant) for source in ts.sources]


def _asks(rule: QuantizationRule) -> bool:
    """Whether a rule wants something quantized, and is no opt-out."""
    return not rule.switched_off or rule.act_qtype is not None


def _some(texts: Sequence[str], joint: str = ", ") -> str:
    return joint.join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


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
    active = [i for i, rule in enumerate(provider.rules) if _asks(rule)]
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
