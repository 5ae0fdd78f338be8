"""What the planner says when rules and a model do not meet: which rule, what is near, the cure."""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from fewbit._plan import Plan
from fewbit.rules import QuantizationRule

OP_NAMES = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "take")

Complaint = Callable[[str], None]

_MSG_OP_NAME = (
    "{rule!r}: no op is called {name!r}, and no kernel has asked for get_current_rule({name!r}). "
    "The nearest is {near!r}: write that, or drop the name."
)


class PlanError(ValueError):
    """A rule and a model do not fit; the message names the place and the cure."""


@contextmanager
def complaints(strict: bool) -> Iterator[Complaint]:
    """Strict: the first complaint is an error. Otherwise all of them end up in one warning."""
    heard: list[str] = []

    def complaint(message: str) -> None:
        if strict:
            raise PlanError(message + " Pass strict=False to turn this into a warning.")
        heard.append(message)

    yield complaint
    if len(heard) > 5:
        heard[5:] = [f"And {len(heard) - 5} more of this kind."]
    if heard:
        warnings.warn(" ".join(dict.fromkeys(heard)), stacklevel=4)


def unmatched_message(plan: Plan, rules: Sequence[QuantizationRule]) -> str:
    """Which rules matched nothing, and what comes nearest."""
    lines = [f"{rule!r} matches no Site of the model.{_why(plan, rule)}" for rule in rules]
    one = len(lines) == 1
    head = "A rule matches nothing: " if one else f"{len(lines)} rules match nothing: "
    return head + " ".join(lines) + f" Correct or drop {'it' if one else 'them'}."


def _why(plan: Plan, rule: QuantizationRule) -> str:
    sites = [row.site for row in plan.sites]
    paths = list(dict.fromkeys(site.path for site in sites))
    ops = list(dict.fromkeys(site.op for site in sites))
    if not sites:
        return " The model has no product and no table look-up at all."
    text = ""
    unknown = [name for name in rule.op_names if name not in ops]
    if unknown:
        others = [op for op in (*ops, *OP_NAMES) if op != unknown[0]]
        near = [] if unknown[0] in OP_NAMES else get_close_matches(unknown[0], others, 1, 0.3)
        hint = f" The nearest is {near[0]!r}." if near else ""
        text += f" No op is called {unknown[0]!r} here (there are: {', '.join(ops)}).{hint}"
    if not any(rule.matches(path, op) for path in paths for op in (rule.op_names or ops)):
        plain = rule.module_path.replace(".*", "").replace("\\", "").strip("/")
        near = get_close_matches(plain, paths, 3, 0.3) or paths[:3]
        return text + f" The nearest module paths are {', '.join(map(repr, near))}."
    matched = [site for site in sites if rule.matches(site.path, site.op)]
    first = _earlier(plan, rule, matched)
    if first is not None and plan.rules[first] == rule:
        return text + f" It repeats rule {first}."
    if first is not None:
        return text + (
            f" An earlier rule matches first wherever it would: rule {first}, "
            f"{plan.rules[first]!r}; the more particular rule comes first."
        )
    if any(site.op == "take" for site in matched):
        return text + (
            " It reaches only a table look-up; a table that feeds no product is quantized when the "
            "rule names it: op_names=('take',)."
        )
    return text


def _earlier(plan: Plan, rule: QuantizationRule, matched: Sequence[Any]) -> int | None:
    """The number of a rule before this one that takes all of its Sites, if one does."""
    last = len(plan.rules) - 1 - plan.rules[::-1].index(rule)  # of equal rules the first matches
    before = list(plan.rules[:last])
    taken = [next((r for r in before if r.matches(s.path, s.op)), None) for s in matched]
    return before.index(taken[0]) if matched and taken[0] and all(taken) else None


def op_name_faults(
    rules: Sequence[QuantizationRule], found: Collection[str], asked: Collection[str]
) -> tuple[list[str], list[str]]:
    """Op names that are nobody's: likely misspellings as complaints, others as notes for the plan.

    `found` are the ops of the model, `asked` the names by which kernels asked for a rule. Rules
    shared by several models may name a kernel that this one does not have: that is only a note.
    """
    wrong, notes = [], []
    for number, rule in enumerate(rules):
        for name in rule.op_names:
            if name in OP_NAMES or name in found or name in asked:
                continue
            near = get_close_matches(name, OP_NAMES, 1, 0.75)
            if near:
                wrong.append(_MSG_OP_NAME.format(rule=rule, name=name, near=near[0]))
            else:
                notes.append(f"rule {number} names the op '{name}', which the model does not have")
    return wrong, notes
