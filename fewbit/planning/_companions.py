"""What lies beside the weights in a parameter tree: static activation scales, adapters, the like.

Under a rule with `act_static_scale=True` an activation is not measured; its scale is stored among
the parameters as `<module>/<op_id>_lhs_scale` (with `_zero_point` beside it if the method is
asymmetric). What belongs to one weight `<w>` is called `<w>` and an ending of its kind.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp

from fewbit._util import key_name
from fewbit.numerics import should_quantize
from fewbit.planning._decide import Decision, activation_fields, activation_how
from fewbit.planning._messages import Complaint
from fewbit.planning._rows import LORA_A, LORA_B, ScalePlan
from fewbit.qarray import (
    HowToQuantize,
    QArray,
    WithAux,
    compute_scale_zero_point,
    get_scale_shape,
    is_leaf,
    parse_method,
    scale_type,
)
from fewbit.rules import QuantizationRule
from fewbit.tracing import Program, Site, TracedSite

SIDES = ("lhs", "rhs")
SCALE, ZERO_POINT = "_scale", "_zero_point"

_MSG_CONFLICT = (
    "{name} is the static scale of {first} and of {second}, which need it in different forms "
    "({a}; {b}). Methods of one module share a scale by its name: plan one method at a time, let "
    "batches differ in more axes (act_batch_axes), or use dynamic ranges for this module."
)


class ScaleName(str):
    """The name by which a front end hands the runner a static scale instead of a parameter."""

    __slots__ = ()


NOISE = ScaleName("key of stochastic rounding")  # it rides among the scales; none has spaces
STREAM = "stochastic_rounding"  # what frameworks' users call it


class _Beside:
    """A pytree of parameters and a mapping of what lies beside them."""

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        (first, params), (second, beside) = vars(self).items()
        key = jax.tree_util.GetAttrKey
        return ((key(first), params), (key(second), dict(beside))), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> Self:
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class QuantizedParams(_Beside):
    """Parameters of a plain function with the static activation scales of its Sites.

    It takes the place of the parameters: `qf(quantized_params, x)`. A pytree like any other.

    >>> import fewbit, jax.numpy as jnp
    >>> from fewbit.calibration import SimpleMovingAverage
    >>> rule = fewbit.QuantizationRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
    >>> f, x = lambda params, x: x @ params['w'], jnp.ones((2, 3))
    >>> plan = fewbit.plan(f, [rule], {'w': jnp.eye(3)}, x)
    >>> average, seen = SimpleMovingAverage(), {'absmax': jnp.array([[1.0]])}
    >>> stats = {'w:dot_general0': {'lhs': average.update(average.init(seen), seen)}}
    >>> qparams = fewbit.quantize_params({'w': jnp.eye(3)}, plan, stats)
    >>> qparams.act_scales['w:dot_general0']['lhs_scale'].shape
    (1, 1)
    >>> print(fewbit.quantize_model(f, fewbit.PtqProvider([rule]))(qparams, x).shape)
    (2, 3)
    """

    params: Any
    act_scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def is_static_scale(name: Any, value: Any) -> bool:
    """Whether a parameter tree's entry of this name is a static scale or its zero point."""
    own = isinstance(value, WithAux) and not isinstance(value.array, QArray)
    return own and str(name).endswith((SCALE, ZERO_POINT))


# --- which operands, and what their scales look like ----------------------------------------------


def scale_name(site: Site, side: int) -> str:
    """'<module>/<op_id>_lhs': what statistics and scales of an operand are called."""
    return name_at(site.path, site.op_id, SIDES[side])


def name_at(path: str, op_id: str, side: str) -> str:
    """The same from its parts.

    >>> name_at('mlp/up', 'dot_general0', 'lhs'), name_at('', 'einsum1', 'rhs')
    ('mlp/up/dot_general0_lhs', 'einsum1_rhs')
    """
    return f"{path}/{op_id}_{side}" if path else f"{op_id}_{side}"


def name_of_site(site_id: str, side: str) -> str:
    """The same from a Site's id."""
    path, _, op_id = site_id.rpartition(":")
    return name_at(path, op_id, side)


def static_sides(ts: TracedSite, rule: QuantizationRule | None) -> list[int]:
    """The operands that have a stored scale: activations, under a rule that says so.

    What is made of parameters alone is the same in every batch, so it is measured as it is.
    """
    if rule is None or not rule.act_static_scale or rule.switched_off or ts.site.op == "take":
        return []
    infos = (ts.site.lhs, ts.site.rhs)
    return [
        k
        for k in (0, 1)
        if ts.sources[k] is None
        and should_quantize(infos[k].dtype)
        and activation_fields(rule, k)["qtype"] is not None
    ]


def scale_plan(ts: TracedSite, side: int, rule: QuantizationRule) -> ScalePlan:
    """The scale of one operand. `how` is the one that a dynamic range would use."""
    info = (ts.site.lhs, ts.site.rhs)[side]
    how = activation_how(ts, side, rule)
    assert how is not None  # `static_sides` has asked
    shape, rank = list(get_scale_shape(info.shape, how)), len(info.shape)
    for axis in rule.act_batch_axes:
        if -rank <= axis < rank:  # one rule serves operands of many ranks
            shape[axis] = 1
    full = (*ts.layers, *shape)
    return ScalePlan(scale_name(ts.site, side), ts.site.id, how, full, info.dtype, rule)


def planned_scales(
    programs: Sequence[Program],
    decisions: Sequence[Mapping[str, Decision]],
    complaint: Complaint = lambda message: None,
) -> tuple[ScalePlan, ...]:
    """All static scales of a model; two Sites that share a name must mean the same."""
    found: dict[str, ScalePlan] = {}
    for program, decided in zip(programs, decisions, strict=True):
        for ts in program.sites:
            rule = decided[ts.site.id].rule
            for side in static_sides(ts, rule):
                new = scale_plan(ts, side, rule)  # type: ignore[arg-type]
                old = found.setdefault(new.name, new)
                if not _same(old, new, len(ts.layers)):
                    a, b = (f"{s.dtype}{list(s.shape)}" for s in (old, new))
                    both = dict(first=old.site, second=new.site, a=a, b=b)
                    complaint(_MSG_CONFLICT.format(name=old.name, **both))
    return tuple(found.values())


def _same(old: ScalePlan, new: ScalePlan, layers: int) -> bool:
    """Whether two Sites may share a scale: of one form, or one number for all of an operand."""
    if is_one_number(old.shape, layers) and is_one_number(new.shape, layers):
        fields = ("qtype", "calibration_method", "scale_dtype", "noise_fn", "rule")
        same = all(getattr(old.how, name) == getattr(new.how, name) for name in fields)
        return same and old.shape[:layers] == new.shape[:layers] and old.dtype == new.dtype
    return (old.how, old.shape, old.dtype) == (new.how, new.shape, new.dtype)


def is_one_number(shape: Sequence[int], layers: int = 0) -> bool:
    """Whether a scale is one for the whole operand (of each layer), whatever the operand's rank.

    >>> is_one_number((1, 1)), is_one_number((12, 1, 1), layers=1), is_one_number((1, 4))
    (True, True, False)
    """
    return all(n == 1 for n in shape[layers:])


def scale_and_zero_point(calibration: Mapping[str, Any], scale: ScalePlan) -> dict[str, Any]:
    """The entries that a range becomes, by the end of their names."""
    dtype = scale_type(scale.dtype, scale.how.scale_dtype)
    parts = compute_scale_zero_point(calibration, scale.how.qtype, dtype)
    named = zip((SCALE, ZERO_POINT), parts, strict=True)
    return {suffix: part for suffix, part in named if part is not None}


def range_keys(how: HowToQuantize) -> tuple[str, ...]:
    """What a calibration of this method consists of."""
    return ("min", "max") if parse_method(how.calibration_method).asymmetric else ("absmax",)


def abstract_scales(scales: Sequence[ScalePlan]) -> dict[str, jax.ShapeDtypeStruct]:
    """Every entry, by its full name, as an abstract array."""
    entries: dict[str, jax.ShapeDtypeStruct] = {}
    for scale in scales:
        edge = jax.ShapeDtypeStruct(scale.shape, jnp.float32)
        calibration = {key: edge for key in range_keys(scale.how)}
        parts = jax.eval_shape(lambda c, s=scale: scale_and_zero_point(c, s), calibration)
        entries |= {scale.name + suffix: part for suffix, part in parts.items()}
    return entries


def empty_scales(scales: Sequence[ScalePlan], abstract: bool = False) -> dict[str, WithAux]:
    """Entries that wait for calibration: NaN, which no result survives."""
    hows = {s.name + end: s.how.replace(rule=s.rule) for s in scales for end in (SCALE, ZERO_POINT)}

    def fill(part):
        is_float = jnp.issubdtype(part.dtype, jnp.floating)
        return jnp.full(part.shape, jnp.nan if is_float else 0, part.dtype)

    parts = abstract_scales(scales)
    return {k: WithAux(v if abstract else fill(v), hows[k]) for k, v in parts.items()}


# --- in parameter trees ---------------------------------------------------------------------------


def split_scales(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A nested mapping without its static scales, and these by full name."""
    found: dict[str, Any] = {}

    def without(node: Mapping[Any, Any], path: str) -> Any:
        kept = {}
        for key, value in node.items():
            name = f"{path}{key}"
            if is_static_scale(key, value):
                found[name] = value
                continue
            new = without(value, f"{name}/") if isinstance(value, Mapping) else value
            if new is value or new or not value:  # a module that had scales alone goes away
                kept[key] = new
        return _renewed(node, kept)

    rest = without(tree, "") if isinstance(tree, Mapping) else tree
    return rest, found


def _renewed(node: Any, new: Any) -> Any:
    """The mapping or sequence itself where nothing in it is new, else another of its kind."""
    keys = node if isinstance(node, Mapping) else range(len(node))
    same = len(new) == len(node) and all(new[key] is node[key] for key in keys)
    return node if same else type(node)(new)


def insert(tree: Any, name: str, value: Any) -> Any:
    """A nested mapping with one more entry; modules without parameters get a place of their own.

    >>> insert({'up': {'kernel': 1}}, 'up/dot_general0_lhs_scale', 2)
    {'up': {'kernel': 1, 'dot_general0_lhs_scale': 2}}
    """
    part, _, rest = name.partition("/")
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"There is no place for the static scale '{name}': the parameters hold "
            f"a {type(tree).__name__} where a mapping of modules is expected."
        )
    numbered = bool(tree) and all(isinstance(key, int) for key in tree)
    key = next((k for k in tree if str(k) == part), int(part) if numbered else part)
    new = insert(tree.get(key, {}), rest, value) if rest else value
    return type(tree)({**tree, key: new})  # type: ignore[call-arg]


def fits(found: Sequence[int], wanted: Sequence[int], layers: int = 0) -> bool:
    """Whether a scale serves: as wanted, or shared (1) on axes after those of the layers.

    One number for all has no rank: it serves operands of every rank.

    >>> fits((1, 1), (1, 1, 1)), fits((1, 8), (1, 1, 8)), fits((1, 1), (1, 8))
    (True, False, True)
    """
    if is_one_number(found, layers) and is_one_number(wanted, layers):
        return tuple(found[:layers]) == tuple(wanted[:layers])
    same_rank = len(found) == len(wanted)
    return same_rank and all(
        n == m or (n == 1 and axis >= layers)
        for axis, (n, m) in enumerate(zip(found, wanted, strict=True))
    )


# --- Parameters with adapters beside them, for trees that have no room for them -------------------


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class LoraParams(_Beside):
    """Parameters of a plain function with the adapters that their tree has no room for.

    It takes the place of the parameters: `lora_function(LoraParams(params, adapters), x)`.
    `adapters` maps full names such as `'0_lora_a'` to arrays.

    >>> import jax.numpy as jnp
    >>> LoraParams([jnp.ones((4, 4))], {'0_lora_a': jnp.ones((4, 2))}).adapters['0_lora_a'].shape
    (4, 2)
    """

    params: Any
    adapters: Mapping[str, Any] = field(default_factory=dict)


# --- What lies beside weights in a parameter tree, known by how its name ends ---------------------


def owner_of(name: str, suffixes: Sequence[str]) -> str | None:
    """The parameter that has something of this name beside it; None for another name.

    >>> owner_of('up/kernel_qscale', ('_qscale',)), owner_of('up/kernel', ('_qscale',))
    ('up/kernel', None)
    """
    ending = next((end for end in suffixes if name.endswith(end)), None)
    return None if ending is None else name.removesuffix(ending)


def split_beside(tree: Any, suffixes: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """A tree without what lies beside its weights, and this by full name.

    >>> split_beside({'up': {'w': 1, 'w_qscale': 2}}, ('_qscale',))
    ({'up': {'w': 1}}, {'up/w_qscale': 2})
    """
    if isinstance(tree, LoraParams):
        rest, found = split_beside(tree.params, suffixes)
        own = {n: v for n, v in tree.adapters.items() if owner_of(n, suffixes) is not None}
        kept = {n: v for n, v in tree.adapters.items() if n not in own}
        return LoraParams(rest, kept) if kept else rest, {**found, **own}
    found = {}

    def without(node: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        kept = {}
        for key, value in node.items():
            own = owner_of(str(key), suffixes)
            if own is not None and any(str(k) == own for k in node):
                found[f"{path}{key}"] = value
            else:
                kept[key] = _with_mappings(without, value, f"{path}{key}/")
        return kept

    return _with_mappings(without, tree, ""), found


def put_beside(tree: Any, entries: Mapping[str, Any], suffixes: Sequence[str]) -> Any:
    """A tree with these entries in it, in the place of those of the same names.

    >>> put_beside({'up': {'w': 1}}, {'up/w_qscale': 2}, ('_qscale',))
    {'up': {'w': 1, 'w_qscale': 2}}
    """
    if not entries:
        return tree
    if isinstance(tree, LoraParams):
        return LoraParams(tree.params, {**tree.adapters, **entries})
    placed: set[str] = set()

    def place(node: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        new = {k: _with_mappings(place, value, f"{path}{k}/") for k, value in node.items()}
        for key in node:
            for end in suffixes if isinstance(key, str) else ():
                name = f"{path}{key}{end}"
                if name in entries:
                    new[f"{key}{end}"] = entries[name]
                    placed.add(name)
        return new

    made = _with_mappings(place, tree, "")
    left = {name: value for name, value in entries.items() if name not in placed}
    return LoraParams(made, left) if left else made


def _with_mappings(
    change: Callable[[Mapping[Any, Any], str], dict[Any, Any]], node: Any, path: str
) -> Any:
    """A tree with `change(mapping, path)` for each of its mappings that is not within another."""
    if is_leaf(node):
        return node
    if isinstance(node, Mapping):
        return _renewed(node, change(node, path))
    if type(node) in (list, tuple):
        items = [_with_mappings(change, value, f"{path}{k}/") for k, value in enumerate(node)]
        return _renewed(node, items)
    return node


# --- Adapters in parameter trees: `<w>_lora_a` and `<w>_lora_b` beside the weight `<w>` -----------

SUFFIXES = (LORA_A, LORA_B)


def weight_of(name: str) -> str | None:
    """The parameter whose adapter has this name; None for a name that is no adapter's.

    >>> weight_of('up/kernel_lora_a'), weight_of('up/kernel')
    ('up/kernel', None)
    """
    return owner_of(name, SUFFIXES)


def split_adapters(tree: Any) -> tuple[Any, dict[str, Any]]:
    """A tree without its adapters, and these by full name.

    >>> split_adapters({'up': {'w': 1, 'w_lora_a': 2, 'w_lora_b': 3}})
    ({'up': {'w': 1}}, {'up/w_lora_a': 2, 'up/w_lora_b': 3})
    """
    if isinstance(tree, LoraParams) and isinstance(tree.params, QuantizedParams):
        rest, found = split_adapters(tree.params)
        return split_beside(LoraParams(rest, {**tree.adapters, **found}), SUFFIXES)
    if isinstance(tree, QuantizedParams):
        rest, found = split_adapters(tree.params)
        return QuantizedParams(rest, tree.act_scales), found
    return split_beside(tree, SUFFIXES)


def put_adapters(tree: Any, adapters: Mapping[str, Any]) -> Any:
    """A tree with these adapters in it, in the place of those of the same names.

    >>> put_adapters({'up': {'w': 1}}, {'up/w_lora_a': 2})
    {'up': {'w': 1, 'w_lora_a': 2}}
    """
    if isinstance(tree, QuantizedParams) and adapters:
        inner = put_adapters(tree.params, adapters)
        if isinstance(inner, LoraParams):
            return LoraParams(QuantizedParams(inner.params, tree.act_scales), inner.adapters)
        return QuantizedParams(inner, tree.act_scales)
    return put_beside(tree, adapters, SUFFIXES)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Every leaf of a tree by its path; a quantized or boxed one is one leaf."""
    while isinstance(tree, LoraParams | QuantizedParams):
        tree = tree.params
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {key_name(key): value for key, value in flat}


def map_leaves(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """A tree with `function(path, leaf)` for each leaf."""
    if isinstance(tree, LoraParams):
        return LoraParams(map_leaves(function, tree.params), tree.adapters)
    if isinstance(tree, QuantizedParams):
        return QuantizedParams(map_leaves(function, tree.params), tree.act_scales)
    return jax.tree_util.tree_map_with_path(
        lambda key, value: function(key_name(key), value), tree, is_leaf=is_leaf
    )


def adapter_names(paths: Iterable[str]) -> set[str]:
    """Those of some paths that are adapters of a weight that is there too."""
    there = set(paths)
    return {path for path in there if weight_of(path) in there}
