"""Adapters, made beside their weights; and while a model runs found, checked, picked, multiplied.

The factors ride beside the parameters, as static scales do (`StaticScales`), so that every body of
the program can reach them and gradients come back through every body.
"""

import functools
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fewbit._util import describe, nearest
from fewbit.interpreter import StaticScales
from fewbit.ops import as_float
from fewbit.planning import (
    LORA_A,
    LORA_B,
    AdapterPlan,
    Plan,
    Shaped,
    leaves_by_path,
    put_adapters,
    shaped,
    weight_operand,
)
from fewbit.qarray import QArray, WithAux, is_box
from fewbit.tracing import Origin, TracedSite

DROPOUT = "dropout key of the adapters"  # no parameter has such a name

_MSG_MISSING = (
    "The adapter '{name}' of {site} is missing from the parameters{more}. Make fresh adapters with "
    "params = fewbit.lora.init(plan, params, key), or read trained ones with "
    "fewbit.lora.load_adapters(path, params, plan).{near} Without adapters, run the model with "
    "PtqProvider(fewbit.lora.base_rules(rules))."
)
_NEAR = " There is {}, which no Site here has."
_MSG_SHAPE = (
    "The adapter '{name}' has shape {found}, but {site} needs {wanted} (rank {rank}): {why}"
)
_MSG_RANK = (
    "it was made for rank {found}. Write rank={found} in {rule!r}, or make adapters of rank {rank} "
    "with fewbit.lora.init(plan, params, key)."
)
_MSG_OTHER = (
    "it was made for another model or another op. Make it again with a plan of this model: "
    "fewbit.lora.init(plan, params, key)."
)
_MSG_UNUSED = (
    "The parameters hold the adapter '{name}', but no LoraRule makes one for '{leaf}', so it would "
    "not be used. Let a rule match it, take it out with fewbit.lora.without_adapters(params), or "
    "make the provider with strict=False."
)


@dataclass(frozen=True)
class SiteAdapter:
    """The adapter of the weight at one Site: the factors of the layer being run, and what to do."""

    plan: AdapterPlan
    here: Shaped  # as this Site would shape it
    side: int
    a: Any
    b: Any
    key: Any = None  # for dropout; None: deterministic

    @property
    def fits(self) -> bool:
        """Whether this Site can use the factors as they are."""
        return self.plan.geometry == self.here.plan.geometry

    def factors(self, dtype: Any) -> tuple[Any, Any]:
        return self.a.astype(dtype), self.b.astype(dtype)

    def scaled(self, out: Any) -> Any:
        return out * jnp.asarray(self.plan.scale, out.dtype)

    def dropped(self, x: Any) -> Any:
        """The product's other operand, some of it left out while training."""
        rate = self.plan.rule.dropout
        if self.key is None or not rate:
            return x
        kept = jax.random.bernoulli(self.key, 1 - rate, x.shape)
        return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))

    def update(self, dtype: Any) -> Any:
        """A B as the operand of this Site, for uses that the factors do not fit."""
        whole = self.plan.product(*self.factors(dtype), one_layer=True)
        here = self.here.plan
        gone = set(chain(*here.stack))
        order = [i for i in range(len(here.split)) if i not in gone]
        atoms = whole.reshape([here.split[i] for i in order])
        seen = chain(*self.here.axes)
        return atoms.transpose([order.index(i) for i in seen]).reshape(self.here.shape)


@dataclass
class Adapters:
    """The adapters of a run, by parameter path."""

    plans: Mapping[str, AdapterPlan] = field(default_factory=dict)
    static: StaticScales = field(default_factory=StaticScales)

    def at(self, ts: TracedSite) -> SiteAdapter | None:
        """The adapter of the Site's weight, for the layer that is being run."""
        plan = self.plans.get(ts.site.weight or "")
        side = weight_operand(ts)
        if plan is None or side is None:
            return None
        origin: Origin = ts.sources[side]  # type: ignore[assignment]
        values, layers = self.static.state

        def factor(name: str) -> Any:
            value = values[name]
            for depth, _ in origin.picked:
                value = lax.dynamic_index_in_dim(value, layers[depth], 0, keepdims=False)
            return value

        a, b = map(factor, plan.names)
        here = shaped(ts, plan.rule, plan.dtype)
        return SiteAdapter(plan, here, side, a, b, self.key(ts))

    def key(self, ts: TracedSite) -> Any:
        """Randomness of its own for each Site and layer."""
        values, layers = self.static.state
        key = values.get(DROPOUT)
        numbers = (zlib.crc32(ts.site.id.encode()), *layers[: len(ts.layers)])
        return None if key is None else functools.reduce(jax.random.fold_in, numbers, key)


def check_adapters(
    plans: Mapping[str, AdapterPlan],
    values: Mapping[str, Any],
    strict: bool,
    used: Collection[str | None] | None = None,
) -> None:
    """Every planned adapter is there, in its shape; strictly, none is there without a plan.

    `used` are the parameters of the program: the adapters of others (another method's) may wait.
    """
    wanted = {name: plan for plan in plans.values() for name in plan.names}
    missing = [name for name in wanted if name not in values]
    extra = [name for name in values if name.endswith((LORA_A, LORA_B)) and name not in wanted]
    if missing:
        raise ValueError(
            _MSG_MISSING.format(
                name=missing[0],
                site=wanted[missing[0]].site,
                more=f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "",
                near=nearest(missing[0], extra, _NEAR, cutoff=0.6),
            )
        )
    for name, plan in wanted.items():
        check_shape(name, tuple(values[name].shape), plan)
    for name in extra if strict else ():
        leaf = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if used is None or leaf in used:
            raise ValueError(_MSG_UNUSED.format(name=name, leaf=leaf))


def check_shape(name: str, found: tuple[int, ...], plan: AdapterPlan) -> None:
    """A factor has the shape that the plan says; if only the rank differs, that is said."""
    wanted = plan.shapes[name]
    if found == wanted:
        return
    axis = len(wanted) - 1 if name.endswith(LORA_A) else len(plan.stack + plan.batch)
    others = [shape[:axis] + shape[axis + 1 :] for shape in (found, wanted)]
    why = _MSG_OTHER
    if len(found) == len(wanted) and others[0] == others[1]:
        why = _MSG_RANK.format(found=found[axis], rank=plan.rank, rule=plan.rule)
    text = dict(name=name, found=found, wanted=wanted, site=plan.site, rank=plan.rank)
    raise ValueError(_MSG_SHAPE.format(**text, why=why))


# --- What an adapter adds to the result of each op: `(alpha / rank) * x A B` ----------------------


def add_to_product(
    adapter: SiteAdapter,
    letters: str,
    operands: Sequence[Any],
    out: Any,
    precision: Any,
    out_sharding: Any = None,
) -> Any:
    """`out + scale * x A B` for a product written as an einsum of its two operands."""
    inputs, _, result = letters.partition("->")
    words = inputs.split(",")
    w, x_word = words[adapter.side], words[1 - adapter.side]
    x = adapter.dropped(as_float(operands[1 - adapter.side]))
    sizes = dict(zip(w, operands[adapter.side].shape, strict=True))
    options = dict(precision=precision, preferred_element_type=out.dtype, out_sharding=out_sharding)
    if not adapter.fits:
        update = adapter.update(x.dtype)
        pair = (x, update) if adapter.side == 1 else (update, x)
        return out + adapter.scaled(jnp.einsum(letters, *pair, **options))
    a, b = adapter.factors(x.dtype)
    batch = [c for c in w if c in x_word and c in result] if adapter.plan.batch else []
    inner = [c for c in w if c in x_word and c not in batch]
    outer = [c for c in w if c not in x_word]
    r = next(c for c in "rstuvwxyzRSTUVWXYZ" + letters.upper() if c not in letters)
    rank, lead = adapter.plan.rank, [sizes[c] for c in batch]
    a = a.reshape(*lead, *(sizes[c] for c in inner), rank)
    b = b.reshape(*lead, rank, *(sizes[c] for c in outer))
    kept = "".join(c for c in x_word if c in result) + r
    low_spec = f"{x_word},{''.join([*batch, *inner])}{r}->{kept}"
    low = jnp.einsum(low_spec, x, a, precision=precision, out_sharding=_kept_axes(x, x_word, kept))
    spec = f"{kept},{''.join(batch)}{r}{''.join(outer)}->{result}"
    return out + adapter.scaled(jnp.einsum(spec, low, b, **options))


def _kept_axes(x: Any, word: str, kept: str) -> Any:
    """On an explicit mesh a sum over a split axis has to say how its result lies: as `x` does."""
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.axis_names or not sharding.mesh.are_all_axes_explicit:
        return None
    axes = dict(zip(word, sharding.spec, strict=False))
    return NamedSharding(sharding.mesh, PartitionSpec(*(axes.get(letter) for letter in kept)))


def add_to_conv(
    adapter: SiteAdapter, x: Any, out: Any, numbers: Any, settings: Mapping[str, Any]
) -> Any:
    """`out + scale * conv(x, A) B`; a grouped convolution meets A B itself."""
    x = adapter.dropped(as_float(x))
    a, b = adapter.factors(x.dtype)
    grouped = settings["feature_group_count"] != 1 or settings["batch_group_count"] != 1
    if grouped or not adapter.fits:
        kernel = adapter.update(x.dtype)
        update = lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **settings)
        return out + adapter.scaled(update.astype(out.dtype))
    n = len(numbers.rhs_spec)
    axes = (n - 1, n - 2, *range(n - 2))  # A is (*spatial, in, rank)
    low_numbers = lax.ConvDimensionNumbers(numbers.lhs_spec, axes, numbers.out_spec)
    low = lax.conv_general_dilated(x, a, dimension_numbers=low_numbers, **settings)
    feature = numbers.out_spec[1]
    low, b = low.astype(x.dtype), b.reshape(adapter.plan.rank, -1)
    contracted = (((feature,), (0,)), ((), ()))
    update = lax.dot_general(low, b, contracted, preferred_element_type=out.dtype)
    return out + adapter.scaled(jnp.moveaxis(update, -1, feature))


def add_to_ragged(
    adapter: SiteAdapter, x: Any, out: Any, group_sizes: Any, settings: Mapping[str, Any]
) -> Any:
    """`out + scale * x A B`, each group of rows with its own factors."""
    x = adapter.dropped(as_float(x))
    a, b = adapter.factors(x.dtype)
    if not adapter.fits:
        update = lax.ragged_dot(x, adapter.update(x.dtype), group_sizes, **settings)
        return out + adapter.scaled(update.astype(out.dtype))
    low = lax.ragged_dot(x, a, group_sizes, **settings)
    update = lax.ragged_dot(low.astype(x.dtype), b, group_sizes, **settings)
    return out + adapter.scaled(update.astype(out.dtype))


def add_to_rows(adapter: SiteAdapter, eqn: Any, indices: Any, out: Any) -> Any:
    """Looked-up rows of a table plus the same rows of its update, which is not made as a whole."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    (axis,) = numbers.collapsed_slice_dims
    ids, plan, here = indices[..., 0], adapter.plan, adapter.here
    a, b = adapter.factors(jnp.promote_types(out.dtype, jnp.float32))
    # Out of bounds, the base's row says it (NaN, or the last one): the update adds nothing to NaN.
    clip = mode == lax.GatherScatterMode.CLIP
    take: dict[str, Any] = dict(mode="clip" if clip else "fill", fill_value=None if clip else 0)
    rows = here.axes[axis]
    left, right = [g for g in plan.inner if g != rows], [g for g in plan.outer if g != rows]
    flat = ids.reshape(-1)
    names = "abcdefghijklmopqs"  # 'n' rows, 'r' rank
    lw, rw = names[: len(left)], names[len(left) : len(left) + len(right)]
    if not plan.batch and rows in plan.inner:
        place = plan.inner.index(rows)
        low = jnp.moveaxis(jnp.take(a, flat, place, **take), place, 0)
        found = jnp.einsum(f"n{lw}r,r{rw}->n{lw}{rw}", low, b)
    elif not plan.batch and rows in plan.outer:
        place = 1 + plan.outer.index(rows)
        high = jnp.moveaxis(jnp.take(b, flat, place, **take), place, 0)
        found = jnp.einsum(f"{lw}r,nr{rw}->n{lw}{rw}", a, high)
    else:
        table = adapter.update(a.dtype)
        found = jnp.moveaxis(jnp.take(table, flat, axis, **take), axis, 0)
        left, right = [g for k, g in enumerate(here.axes) if k != axis], []
    atoms = [i for group in (*left, *right) for i in group]
    seen = [i for k, group in enumerate(here.axes) if k != axis for i in group]
    found = found.reshape(flat.shape[0], *(plan.split[i] for i in atoms))
    found = found.transpose(0, *(1 + atoms.index(i) for i in seen))
    found = found.reshape(*ids.shape, *(n for k, n in enumerate(here.shape) if k != axis))
    found = jnp.moveaxis(found, range(ids.ndim, found.ndim), numbers.offset_dims)
    return out + adapter.scaled(found).astype(out.dtype)


# --- Fresh adapters: their values, and where they lie (boxes and shardings like their weight's) ---

_MSG_PLAN = (
    "fewbit.lora.{name} takes a plan with adapters, got {found}. Make one with a LoraProvider: "
    "plan = fewbit.plan(model, fewbit.LoraProvider(rank=8, alpha=16.0), *inputs)."
)
_MSG_LEAF = (
    "The plan has an adapter for '{leaf}', and the parameters have no such leaf.{near} Give the "
    "parameters of the model that was planned."
)


def init(plan: Plan, params: Any, key: jax.Array) -> Any:
    """The parameters with fresh adapters beside their weights; any old ones are replaced.

    A is drawn as its rule's `lora_a_initializer` says, each layer and each expert from its own
    key, B as `lora_b_initializer`: with zeros, the default, the model starts as its base. Boxes and
    shardings follow the weight's.

    >>> import fewbit, jax.numpy as jnp
    >>> f = lambda params, x: x @ params['w']
    >>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
    >>> plan = fewbit.plan(f, fewbit.LoraProvider(rank=2, alpha=4.0), params, x)
    >>> {name: value.shape for name, value in init(plan, params, jax.random.key(0)).items()}
    {'w': (4, 4), 'w_lora_a': (4, 2), 'w_lora_b': (2, 4)}
    """
    check_plan("init", plan)
    leaves = leaves_by_path(params)
    made: dict[str, Any] = {}
    for adapter in plan.adapters:
        check_leaf(adapter, leaves)
        for name, value in fresh(adapter, key).items():
            made[name] = place(value, name, adapter, leaves[adapter.leaf])
    return put_adapters(params, made)


def check_plan(name: str, plan: Any) -> None:
    """A plan of a model with adapters."""
    if not isinstance(plan, Plan) or not plan.adapters:
        found = "a plan without any" if isinstance(plan, Plan) else describe(plan)
        raise TypeError(_MSG_PLAN.format(name=name, found=found))


def check_leaf(adapter: AdapterPlan, leaves: Mapping[str, Any]) -> None:
    """The weight of an adapter is there."""
    if adapter.leaf not in leaves:
        near = nearest(adapter.leaf, leaves, " The nearest are {}.", 2, 0.6, show=str)
        raise ValueError(_MSG_LEAF.format(leaf=adapter.leaf, near=near))


def fresh(adapter: AdapterPlan, key: jax.Array) -> dict[str, jax.Array]:
    """The two factors, by name. Each name has its own randomness."""
    rule, made = adapter.rule, {}
    many = len(adapter.stack + adapter.batch)
    for name, shape in adapter.shapes.items():
        draw = rule.lora_a_initializer if name.endswith(LORA_A) else rule.lora_b_initializer
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        lead, one = shape[:many], shape[many:]
        if not lead:
            made[name] = draw(own, one, adapter.dtype)  # type: ignore[operator]
            continue
        keys = jax.random.split(own, prod(lead))
        each = jax.vmap(lambda k, one=one, draw=draw: draw(k, one, adapter.dtype))(keys)
        made[name] = each.reshape(shape)
    return made


def factor_names(names: Sequence[Any], name: str, adapter: AdapterPlan) -> tuple[Any, ...]:
    """The mesh axes of a factor, given those of its weight: each axis like the first it is made of.

    >>> from fewbit.rules import LoraRule
    >>> adapter = AdapterPlan('w', 'w:dot_general0', 'dot_general', (4, 2, 6), (4, 2, 6), (), (),
    ...                       ((0, 1),), ((2,),), 'float32', LoraRule(rank=2, alpha=4.0))
    >>> factor_names(('data', None, 'model'), 'w_lora_a', adapter)
    ('data', None)
    """
    full = (*names, *[None] * (len(adapter.shape) - len(names)))

    def of(groups):
        return [full[adapter.leaf_axes(g)[0]] if g else None for g in groups]

    front = of(adapter.stack + adapter.batch)
    if name.endswith(LORA_A):
        return (*front, *of(adapter.inner), None)
    return (*front, None, *of(adapter.outer))


def place(value: Any, name: str, adapter: AdapterPlan, weight: Any) -> Any:
    """A factor in a box like its weight's, or on the devices that its weight is on."""
    array = weight.array if isinstance(weight, WithAux) else weight
    codes = array.data if isinstance(array, QArray) else array
    if is_box(codes):
        names = getattr(codes, "names", None)
        box = codes.replace_boxed(value)
        return box if names is None else box.replace(names=factor_names(names, name, adapter))
    lies_nowhere = isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)
    sharding = None if isinstance(codes, jax.core.Tracer) else getattr(codes, "sharding", None)
    if lies_nowhere or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return value
    whole = tuple(codes.shape) == adapter.shape
    spec = factor_names(tuple(sharding.spec), name, adapter) if whole else ()
    return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
