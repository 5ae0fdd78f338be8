"""Which parameters get a low-rank adapter, and in what shape: LoRA rules meet the traced Sites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from fewbit.planning._decide import Decision, shape_text, weight_operand
from fewbit.planning._messages import Complaint, PlanError
from fewbit.planning._rows import AdapterPlan, Groups
from fewbit.qarray import Atom
from fewbit.rules import LoraRule
from fewbit.tracing import Origin, Program, TracedSite

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
_OF_ADAPTERS = ("rank", "alpha", "lora_a_initializer", "lora_b_initializer")  # fields of a rule
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
    adapted = [
        (ts, rule)
        for ts, rule in uses
        if isinstance(rule, LoraRule) and weight_operand(ts) is not None
    ]
    for ts, rule in sorted(adapted, key=lambda use: use[0].site.op == "take"):
        leaf = str(ts.site.weight)
        if ts.site.op == "take" and (leaf in found or "take" not in rule.op_names):
            continue  # a table of its own is named in the rule
        new = shaped(ts, rule, dtypes.get(leaf, "float32")).plan
        old = found.setdefault(leaf, new)
        if any(getattr(old.rule, name) != getattr(new.rule, name) for name in _OF_ADAPTERS):
            both = dict(first=old.site, second=new.site, a=old.rule, b=new.rule)
            complaint(_MSG_CONFLICT.format(leaf=leaf, **both))
    for ts, other in uses:
        leaf = ts.site.weight or ""
        if leaf in found and ts.site.op != "take" and not isinstance(other, LoraRule):
            first = found[leaf].site
            path = f"{first.rpartition(':')[0].rpartition('.')[2]}|{ts.site.path}"
            text = dict(leaf=leaf, first=first, second=ts.site.id, path=path)
            complaint(_MSG_WITHOUT.format(**text))
    return found


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
        text = dict(site=ts.site.id, leaf=origin.leaf, path=ts.site.path, rule=rule)
        shape = shape_text(origin.leaf_shape)
        return PlanError(_MSG_CANNOT.format(why=why, fix=fix, shape=shape, **text))

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
        # Each stride is the product of the sizes below it: no piece is missing, none overlaps.
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
    among = lambda places: tuple(g for k, g in enumerate(axes) if k in places)  # noqa: E731
    rest = tuple(g for k, g in enumerate(axes) if k not in (*contracting, *batch))
    if ts.site.op == "einsum":
        return (), among((*contracting, *batch)), rest
    return among(batch), (sum(among(contracting), ()),), (sum(rest, ()),)


def abstract_adapters(plans: Mapping[str, AdapterPlan]) -> dict[str, jax.ShapeDtypeStruct]:
    """Every factor, by its full name, as an abstract array."""
    return {
        name: jax.ShapeDtypeStruct(shape, plan.dtype)
        for plan in plans.values()
        for name, shape in plan.shapes.items()
    }
