"""What the planner says when rules and a model do not meet: which rule, what is near, the cure."""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fewbit._util import nearest
from fewbit.planning._plan import Plan
from fewbit.rules import QuantizationRule

OP_NAMES = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "take")

Complaint = Callable[[str], None]

_MSG_OP_NAME = (
    "{rule!r}: no op is called {name!r}, and no kernel has asked for get_current_rule({name!r}). "
    "The nearest is {near}: write that, or drop the name."
)
_MSG_IN_KERNEL = (
    "{rule!r} reaches weights of opaque kernels alone ({places}): they stay as they are. What the "
    "kernel is to read in their place is yours to put there."
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


def tell_of_kernels(
    plan: Plan, rules: Sequence[QuantizationRule], places: Collection[str]
) -> list[QuantizationRule]:
    """Warns of the rules that reach nothing but weights of opaque kernels, and gives the others.

    Such a rule is no slip: those of a checkpoint name every module that it has in few bits, and so
    the ones whose kernel takes such weights as they are.
    """
    sites, others = [row.site for row in plan.sites], []
    for rule in rules:
        reached = [path for path in dict.fromkeys(places) if rule.matches(path, "")]
        if not reached or any(rule.matches(site.path, site.op) for site in sites):
            others.append(rule)
        elif not rule.switched_off:
            text = _MSG_IN_KERNEL.format(rule=rule, places=", ".join(map(repr, reached)))
            warnings.warn(text, stacklevel=4)
    return others


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
        text += f" No op is called {unknown[0]!r} here (there are: {', '.join(ops)})."
        if unknown[0] not in OP_NAMES:
            text += nearest(unknown[0], others, " The nearest is {}.", cutoff=0.3)
    if not any(rule.matches(path, op) for path in paths for op in (rule.op_names or ops)):
        plain = rule.module_path.replace(".*", "").replace("\\", "").strip("/")
        return text + nearest(
            plain, paths, " The nearest module paths are {}.", 3, 0.3, or_first=True
        )
    matched = [site for site in sites if rule.matches(site.path, site.op)]
    first = _earlier(plan, rule, matched)
    if first is not None:
        if plan.rules[first] == rule:
            return text + f" It repeats rule {first}."
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
            if name in {*OP_NAMES, *found, *asked}:
                continue
            near = nearest(name, OP_NAMES, "{}", cutoff=0.75)
            if near:
                wrong.append(_MSG_OP_NAME.format(rule=rule, name=name, near=near))
            else:
                notes.append(f"rule {number} names the op '{name}', which the model does not have")
    return wrong, notes
