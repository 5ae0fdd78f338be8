"""Arguments in another order than `plan` and `quantize_model` take them, told before JAX trips.

What cannot be a model, rules or a provider is named at once. Whether an array is an input or a
parameter cannot be known, so a suspicion is spoken only when the call has failed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from fewbit._errors import describe, is_array_like
from fewbit._plan import Plan
from fewbit.engine import UntraceableModelError
from fewbit.modes.provider import QuantizationProvider
from fewbit.rules import QuantizationRule

_MSG_PLAN = (
    "fewbit.plan takes the model first, its rules second and the inputs after them; here the rules "
    "are argument {place}, and argument 2 is {found}. Write {fixed}."
)
_MSG_PROVIDER = "quantize_model takes a provider as its second argument, got {found}. {fix}"
_MSG_PARAMS_FIRST = (
    "The first input of a function is its parameters, here {first}; input {place} is {other}. If "
    "that one is the parameters, write {fixed}, with a function that takes them first (make one "
    "by lambda params, x: ...)."
)
_MSG_NO_PARAMS = (
    "{kind} brings its own parameters, and input {place} is {other}. If those are its parameters, "
    "leave them out: {fixed}."
)
_MSG_FAILED = "{what} could not be run on these inputs: {kind}: {error} {hint}"


def is_rules(value: Any) -> bool:
    """Whether a value can only be meant as rules: a rule, some rules, or a provider.

    >>> is_rules([QuantizationRule()]), is_rules([]), is_rules({'w': 1.0})
    (True, False, False)
    """
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, QuantizationRule) for item in value)
    return isinstance(value, QuantizationRule | QuantizationProvider)


def check_rules(model: Any, rules: Any, inputs: Sequence[Any]) -> None:
    """Raise if the rules stand somewhere else among the arguments of `plan`."""
    if is_rules(rules):
        return
    for place, value in ((1, model), *enumerate(inputs, start=3)):
        if is_rules(value):
            fixed = "fewbit.plan(model, rules, *inputs)"
            if place > 2 and _is_function(model):
                fixed = f"fewbit.plan({_name(model)}, rules, params, *inputs)"
            raise TypeError(_MSG_PLAN.format(place=place, found=describe(rules), fixed=fixed))


def check_provider(model: Any, provider: Any, inputs: Sequence[Any]) -> None:
    """Raise if the second argument of `quantize_model` is not a provider."""
    if isinstance(provider, QuantizationProvider):
        return
    fix = "Write quantize_model(model, PtqProvider(rules), ...)."
    if isinstance(model, QuantizationProvider):
        fix = "The model comes first: quantize_model(model, provider, ...)."
    elif is_rules(model):
        fix = f"The model comes first: {fix[6:]}"
    elif any(isinstance(value, QuantizationProvider) for value in inputs):
        fix = "The inputs come after it: quantize_model(model, provider, *inputs)."
    elif isinstance(provider, type) and issubclass(provider, QuantizationProvider):
        fix = f"Make one of it: quantize_model(model, {provider.__name__}(rules), ...)."
    elif isinstance(provider, Plan):
        fix = "Write quantize_model(model, PtqProvider(plan.rules), ...)."
    found = f"a {type(provider).__name__}" if is_rules(provider) else describe(provider)
    raise TypeError(_MSG_PROVIDER.format(found=found, fix=fix))


@contextmanager
def suspect_order(call: str, model: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Where a call fails on inputs that look exchanged, say so beside the error."""
    try:
        yield
    except Exception as error:
        hint = _hint(call, model, inputs)
        # What Python and JAX say to a wrong kind of value; any other error speaks for itself.
        bare = isinstance(error, TypeError | LookupError | AttributeError)
        if hint is None or not (bare or _is_function(model)):
            raise
        if isinstance(error, UntraceableModelError) or not (bare and _is_function(model)):
            error.add_note(hint)  # it may be caught by its type, which therefore stays
            raise
        first_line = str(error).strip().split("\n")[0][:200].rstrip(".") + "."
        text = _MSG_FAILED.format(
            what=_name(model), kind=type(error).__name__, error=first_line, hint=hint
        )
        raise TypeError(text) from error


def _hint(call: str, model: Any, inputs: Sequence[Any]) -> str | None:
    second = "rules" if call == "plan" else "provider"
    trees = [place for place, value in enumerate(inputs, start=1) if _is_tree_of_arrays(value)]
    if not trees:
        return None
    place = trees[0]
    other = describe(inputs[place - 1])
    if not _is_function(model):
        rest = "x" if call == "plan" or "nnx" in _framework(model) else ""
        fixed = f"fewbit.{call}(model, {second}{', ' * bool(rest)}{rest})"
        kind = f"{type(model).__name__} (a Flax module)"
        return _MSG_NO_PARAMS.format(kind=kind, place=place, other=other, fixed=fixed)
    if place == 1 or not is_array_like(inputs[0]):
        return None
    fixed = f"fewbit.{call}({_name(model)}, {second}, params, x)"
    first = describe(inputs[0])
    return _MSG_PARAMS_FIRST.format(first=first, place=place, other=other, fixed=fixed)


def _is_tree_of_arrays(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    leaves = jax.tree.leaves(value)
    return bool(leaves) and any(is_array_like(leaf) for leaf in leaves)


def _is_function(model: Any) -> bool:
    return callable(model) and not _framework(model)


def _framework(model: Any) -> str:
    """The module of Flax that a model's class comes from, if any; Flax is not imported here."""
    homes = (cls.__module__ for cls in type(model).__mro__)
    return next((home for home in homes if home.startswith("flax.")), "")


def _name(model: Any) -> str:
    name = getattr(model, "__name__", type(model).__name__)
    return "f" if name == "<lambda>" else name
