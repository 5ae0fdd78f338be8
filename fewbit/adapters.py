"""Which parameters get a low-rank adapter, and in what shape: LoRA rules meet the traced Sites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from fewbit._plan_adapter import AdapterPlan, Groups
from fewbit._plan_messages import Complaint, PlanError
from fewbit.decisions import Decision, weight_operand
from fewbit.provenance import Atom, Origin
from fewbit.rules import LoraRule
from fewbit.trace import Program, TracedSite

_MSG_CANNOT = (
    "{site}: parameter '{leaf}' {shape} cannot take an adapter: {why}. Leave it out with "
    "QuantizationRule(module_path={path!r}) before the other rules{fix}. The rule is {rule!r}."
)
_MSG_CONFLICT = (
    "Parameter '{leaf}' is used by two Sites whose rules want different adapters: {first} wants "
    "{a!r}, {second} wants {b!r}. A parameter has one adapter: give both Sites the same rule."
)
_MSG_WITHOUT = (
    "Parameter '{leaf}' gets an adapter at {first}, but {second} reads it too and no LoraRule "
    "matches there, so it would see the weight without its adapter. Let the rule match both Sites "
    "(module_path={path!r}), or neither."
)
_PARTED = {
    "rev": "the product sees it reversed",
    "shard_map": "it is split over a mesh by shard_map, inside which a shard has no factors",
}
_FIXES = {
    "shard_map": ", or let JAX split the product: jax.jit with shardings instead of shard_map",
}
_UNROLLED = ", or store the parts as parameters of their own (layers in a lax.scan may be stacked)"


def planned_adapters(
    programs: Sequence[Program],
    decisions: Sequence[Mapping[str, Decision]],
    dtypes: Mapping[str, Any] = {},
    complaint: Complaint = lambda message: None,
) -> dict[str, AdapterPlan]:
    """The adapter of each parameter that has one, by the parameter's path.

    A product shapes it; a look-up does so only if no product uses the table.
    """
    found: dict[str, AdapterPlan] = {}
    uses = [
        (ts, decided[ts.site.id].rule)
        for program, decided in zip(programs, decisions, strict=True)
        for ts in program.sites
    ]
    for look_up in (False, True):
        for ts, rule in uses:
            if (ts.site.op == "take") is not look_up or not _adapts(ts, rule):
                continue
            leaf = str(ts.site.weight)
            if look_up and leaf in found:
                continue
            if look_up and "take" not in rule.op_names:  # type: ignore[union-attr]
                continue  # a table of its own is named in the rule
            new = shaped(ts, rule, dtypes.get(leaf, "float32")).plan  # type: ignore[arg-type]
            old = found.setdefault(leaf, new)
            if not _same_rule(old.rule, new.rule):
                both = dict(first=old.site, second=new.site, a=old.rule, b=new.rule)
                complaint(_MSG_CONFLICT.format(leaf=leaf, **both))
    for ts, rule in uses:
        leaf = ts.site.weight or ""
        if leaf in found and ts.site.op != "take" and not isinstance(rule, LoraRule):
            first = found[leaf].site
            path = f"{first.rpartition(':')[0].rpartition('.')[2]}|{ts.site.path}"
            text = dict(leaf=leaf, first=first, second=ts.site.id, path=path)
            complaint(_MSG_WITHOUT.format(**text))
    return found


def _adapts(ts: TracedSite, rule: Any) -> bool:
    return isinstance(rule, LoraRule) and weight_operand(ts) is not None


def _same_rule(a: LoraRule, b: LoraRule) -> bool:
    fields = ("rank", "alpha", "lora_a_initializer", "lora_b_initializer")
    return all(getattr(a, name) == getattr(b, name) for name in fields)


@dataclass(frozen=True)
class Shaped:
    """An adapter as one Site would shape it, and the axes of the weight that its product sees."""

    plan: AdapterPlan
    axes: Groups
    shape: tuple[int, ...]


def shaped(ts: TracedSite, rule: LoraRule, dtype: Any = "float32") -> Shaped:
    """The adapter as one Site would shape it; an error where the weight cannot have one.

    `dtype` is the parameter's, whatever the product casts it to.
    """
    side = weight_operand(ts)
    assert side is not None
    origin: Origin = ts.sources[side]  # type: ignore[assignment]

    def refuse(why: str, fix: str = "") -> PlanError:
        shape = "(" + ", ".join(map(str, origin.leaf_shape)) + ")"
        text = dict(site=ts.site.id, leaf=origin.leaf, shape=shape, path=ts.site.path, rule=rule)
        return PlanError(_MSG_CANNOT.format(why=why, fix=fix, **text))

    if origin.parted is not None:
        why = f"the product sees only a part of it ({origin.parted})"
        fix = _FIXES.get(origin.parted, "" if origin.parted in _PARTED else _UNROLLED)
        raise refuse(_PARTED.get(origin.parted, why), fix)
    if ts.in_rule is not None:
        raise refuse(
            f"it stands inside a {ts.in_rule.removesuffix('_call')}, whose own derivative knows of "
            "no adapter, so the adapter would get no gradient"
        )
    numbers = _numbered(origin)
    if numbers is None:
        raise refuse("the product sees it broadcast, or only some of its elements")
    group = lambda atoms: tuple(numbers[a] for a in atoms if a.size != 1)  # noqa: E731
    axes: Groups = tuple(map(group, origin.axes))
    batch, inner, outer = _roles(ts, side, axes)
    stack = tuple(group(atoms) for _, atoms in origin.picked)
    split = tuple(atom.size for atom in sorted(numbers, key=numbers.__getitem__))
    geometry = (origin.leaf_shape, split, stack, batch, inner, outer)
    made = AdapterPlan(origin.leaf, ts.site.id, ts.site.op, *geometry, str(dtype), rule)
    return Shaped(made, axes, tuple(ts.eqn.invars[side].aval.shape))


def _numbered(origin: Origin) -> dict[Atom, int] | None:
    """The leaf's atoms in the order of its axes; None unless they are all of the leaf, once."""
    groups = [*(atoms for _, atoms in origin.picked), *origin.axes]
    atoms = [atom for atoms in groups for atom in atoms if atom.size != 1]
    if any(atom.axis is None for atom in atoms) or len(set(atoms)) != len(atoms):
        return None
    for axis, size in enumerate(origin.leaf_shape):
        own = sorted((a for a in atoms if a.axis == axis), key=lambda a: a.stride)
        steps = [prod(a.size for a in own[:k]) for k in range(len(own))]
        if steps != [a.stride for a in own] or prod(a.size for a in own) != size:
            return None
    ordered = sorted(atoms, key=lambda a: (a.axis, -a.stride))
    return {atom: number for number, atom in enumerate(ordered)}


def _roles(ts: TracedSite, side: int, axes: Groups) -> tuple[Groups, Groups, Groups]:
    """The axes of the two factors: what both have, what A has, what B has."""
    params = ts.eqn.params
    if ts.site.op == "conv_general_dilated":
        out, channel, *spatial = params["dimension_numbers"].rhs_spec
        return (), (*(axes[k] for k in sorted(spatial)), axes[channel]), (axes[out],)
    if ts.site.op == "ragged_dot":
        return (axes[0],), (axes[1],), (axes[2],)
    if ts.site.op == "take":
        (axis,) = params["dimension_numbers"].collapsed_slice_dims
        return (), (axes[axis],), tuple(g for k, g in enumerate(axes) if k != axis)
    contracting, batch = (pair[side] for pair in params["dimension_numbers"])
    rest = tuple(g for k, g in enumerate(axes) if k not in (*contracting, *batch))
    if ts.site.op == "einsum":
        kept = tuple(g for k, g in enumerate(axes) if k in (*contracting, *batch))
        return (), kept, rest
    summed = tuple(g for k, g in enumerate(axes) if k in contracting)
    both = tuple(g for k, g in enumerate(axes) if k in batch)
    return both, (sum(summed, ()),), (sum(rest, ()),)


def abstract_adapters(plans: Mapping[str, AdapterPlan]) -> dict[str, jax.ShapeDtypeStruct]:
    """Every factor, by its full name, as an abstract array."""
    return {
        name: jax.ShapeDtypeStruct(shape, plan.dtype)
        for plan in plans.values()
        for name, shape in plan.shapes.items()
    }
