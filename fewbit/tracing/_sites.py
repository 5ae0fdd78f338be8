"""Trace: a model's jaxpr, with every Site found, named, numbered and led back to its parameter.

A pre-pass over the jaxpr builds a tree of `Node`s parallel to it. One inner jaxpr may be shared by
many calls (JAX caches traces), so a Site cannot be told by its equation alone; its place in the
Node tree tells it. The interpreter walks jaxpr and Nodes side by side and never numbers anything
itself.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from fewbit.tracing import _jaxprs as jaxprs
from fewbit.tracing._jaxprs import Eqn, Jaxpr, Where
from fewbit.tracing._origin import LAYOUT, Changed, Constant, Origin, Source, Written, sliced

# --- What an equation says of its Site: its work, its letters, whether it looks up rows -----------


def multiply_adds(eqn: Eqn) -> int:
    """Of one run of a product; a look-up has none."""
    name, p = eqn.primitive.name, eqn.params
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if name == "dot_general":
        (contracting, _), _ = p["dimension_numbers"]
        return prod(out) * prod(lhs[a] for a in contracting)
    if name == "conv_general_dilated":
        spec = p["dimension_numbers"].rhs_spec
        return prod(out) * prod(rhs) // max(rhs[spec[0]], 1)
    if name == "ragged_dot_general":
        numbers = p["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return prod(out) * prod(lhs[a] for a in numbers[0][0])
    return 0


def letters_of(eqn: Eqn) -> str:
    """A dot_general as an einsum string; nothing for other primitives."""
    if eqn.primitive.name != "dot_general":
        return ""
    return product_letters(eqn.params["dimension_numbers"], *(v.aval.ndim for v in eqn.invars))


def product_letters(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """A dot_general's dimension numbers as an einsum string over the same operands and result.

    >>> product_letters((((1,), (0,)), ((), ())), 2, 2)
    'ab,bc->ac'
    """
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    (lc, rc), (lb, rb) = dimension_numbers
    lhs = [next(letters) for _ in range(lhs_ndim)]
    shared = {r: lhs[left] for left, r in [*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)]}
    rhs = [shared[i] if i in shared else next(letters) for i in range(rhs_ndim)]
    out = [lhs[i] for i in lb]
    out += [lhs[i] for i in range(lhs_ndim) if i not in (*lc, *lb)]
    out += [rhs[i] for i in range(rhs_ndim) if i not in shared]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"


def is_row_lookup(eqn: Eqn) -> bool:
    """A gather that takes whole rows along one axis: `table[ids]`, `jnp.take(table, ids, axis)`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    axes = tuple(numbers.collapsed_slice_dims)
    return (
        len(axes) == 1
        and tuple(numbers.start_index_map) == axes
        and not numbers.operand_batching_dims
        and all(
            s == (1 if a in axes else n) for a, (s, n) in enumerate(zip(sizes, shape, strict=True))
        )
    )


# --- The trace: Sites found, named, numbered and led back to their parameters ---------------------


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype of an operand.

    >>> str(ArrayInfo((32, 64), "float32"))
    'float32[32,64]'
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(plain_size(size) for size in self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def plain_size(size: Any) -> Any:
    """A plain int; a symbolic size of `jax.export` stays what it is."""
    return int(size) if isinstance(size, int | np.integer) else size


@dataclass(frozen=True)
class Site:
    """One product or look-up in the traced model: where it stands and what it works on.

    `index` counts the ops of that name within the module, in call order. `macs` is multiply-adds,
    with loop trip counts multiplied in.

    >>> info = ArrayInfo((4, 4), "float32")
    >>> site = Site("mlp/up", "dot_general", 0, lhs=info, rhs=info, out=info, macs=64)
    >>> site.op_id, site.id
    ('dot_general0', 'mlp/up:dot_general0')
    """

    path: str
    op: str
    index: int
    method: str = "__call__"
    class_name: str = ""
    _: KW_ONLY
    lhs: ArrayInfo
    rhs: ArrayInfo
    out: ArrayInfo
    macs: int
    trips: int = 1
    weight: str | None = None
    weight_side: str | None = None
    spec: str = ""

    @property
    def op_id(self) -> str:
        """Op name and number: the name that statistics and static scales carry in checkpoints."""
        return f"{self.op}{self.index}"

    @property
    def id(self) -> str:
        """The Site's name, unique in a Plan; methods other than `__call__` come first."""
        prefix = "" if self.method == "__call__" else f"{self.method}."
        return f"{prefix}{self.path}:{self.op_id}"


@dataclass(frozen=True)
class TracedSite:
    """A Site with what only the trace knows: its equation and where each operand comes from."""

    site: Site
    eqn: Eqn
    sources: tuple[Source, ...]
    where: Where
    layers: tuple[int, ...] = ()  # lengths of the layer scans around it, outermost first
    in_rule: str | None = None  # the primitive around it whose author wrote the derivative
    in_shards: bool = False  # inside a shard_map, where arrays are one device's part


@dataclass(eq=False)
class Node:
    """A jaxpr, the Sites among its equations and the Nodes of their bodies, by equation index."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...] = ()
    sites: dict[int, TracedSite] = field(default_factory=dict)
    children: dict[int, tuple["Node", ...]] = field(default_factory=dict)
    per_layer: bool = False  # the body of a scan over stacked parameters, not over time

    def walk_equations(self):
        """All equations here and below."""
        for i, eqn in enumerate(self.jaxpr.eqns):
            yield eqn
            for child in self.children.get(i, ()):
                yield from child.walk_equations()

    def walk_sites(self):
        """All Sites below, in program order."""
        for i in range(len(self.jaxpr.eqns)):
            if i in self.sites:
                yield self.sites[i]
            for child in self.children.get(i, ()):
                yield from child.walk_sites()


@dataclass(frozen=True)
class Program:
    """A traced model: the Node tree, its Sites in order, and what the planner must mention."""

    root: Node
    sites: tuple[TracedSite, ...]
    opaque: tuple[str, ...]
    read: tuple[tuple[str, str], ...] = ()  # (leaf, primitive) where a weight is read as numbers
    in_kernels: tuple[str, ...] = ()  # modules that give weights to opaque kernels, those weights


def analyse(
    closed: Any,
    leaves: Sequence[tuple[str, Any] | Constant | None],
    *,
    method: str = "__call__",
    site_path: str = "module",
) -> Program:
    """Find the Sites of a closed jaxpr.

    `leaves[i]` is (parameter path, shape) when input i is a parameter, `Constant()` when it is a
    weight of somebody else's (stored quantized, but no parameter here), else None. `site_path` says
    how a Site with a weight is named: 'module' (the module scope around it, else the parameter's
    parent), 'owner' (the parameter's parent always) or 'leaf' (the parameter's own path, for plain
    functions).
    """
    walk = _Walk(method, site_path)
    sources: list[Source] = [
        Origin.of_leaf(*leaf) if isinstance(leaf, tuple) else leaf for leaf in leaves
    ]
    node, _ = walk.body(closed, sources, "", 1)
    read = tuple(dict.fromkeys(walk.read))
    kernels = tuple(dict.fromkeys(walk.in_kernels))
    return Program(node, tuple(node.walk_sites()), tuple(walk.opaque), read, kernels)


class _Walk:
    """One pass over a jaxpr and its bodies."""

    def __init__(self, method: str, site_path: str):
        self.method, self.site_path = method, site_path
        self.numbers: Counter[tuple[str, str]] = Counter()
        self.opaque: list[str] = []
        self.in_kernels: list[str] = []
        self.layers: tuple[int, ...] = ()
        self.read: list[tuple[str, str]] = []
        self.in_rule: str | None = None
        self.in_shards = False

    def body(
        self, closed: Any, sources: Sequence[Source], stack: str, trips: int
    ) -> tuple[Node, list[Source]]:
        jaxpr = jaxprs.open_jaxpr(closed)
        node = Node(jaxpr, jaxprs.constants(closed))
        env: dict[Any, Source] = dict(zip(jaxpr.invars, sources, strict=True))
        env.update((var, Constant()) for var in jaxpr.constvars)
        for i, eqn in enumerate(jaxpr.eqns):
            ins = [Written() if jaxprs.is_literal(v) else env.get(v) for v in eqn.invars]
            outs = self.equation(node, i, eqn, ins, jaxprs.join_stack(stack, eqn), trips)
            env.update(zip(eqn.outvars, outs, strict=True))
        return node, [Written() if jaxprs.is_literal(v) else env.get(v) for v in jaxpr.outvars]

    def equation(
        self, node: Node, i: int, eqn: Eqn, ins: list[Source], stack: str, trips: int
    ) -> Sequence[Source]:
        name = eqn.primitive.name
        if name in jaxprs.SITE_PRIMITIVES:
            site = self.site(eqn, ins, stack, trips)
            if site is not None:
                node.sites[i] = site
                return [None] * len(eqn.outvars)
        if jaxprs.is_opaque(eqn):
            self.note_opaque(eqn, ins, stack)
        bodies = jaxprs.bodies(eqn)
        if bodies:
            children, outs = self.with_bodies(eqn, bodies, ins, stack, trips)
            node.children[i] = children
            return outs
        if name in LAYOUT and isinstance(ins[0], Origin):
            moved = LAYOUT[name](eqn, ins)
            if moved is not None:
                return moved
        return self.changed(eqn, ins)

    def changed(self, eqn: Eqn, ins: list[Source]) -> Sequence[Source]:
        """An ordinary equation: its result is a changed weight if it reads nothing else."""
        data = [s for s in ins if not isinstance(s, Written)]
        if not data:
            return [Written()] * len(eqn.outvars)
        weights = [s for s in data if isinstance(s, Origin | Changed)]
        self.read += [(s.leaf, eqn.primitive.name) for s in weights if isinstance(s, Origin)]
        if weights and all(map(_is_stored, data)):
            floats = [
                s
                for v, s in zip(eqn.invars, ins, strict=True)
                if s in weights and jnp.issubdtype(v.aval.dtype, jnp.floating)
            ]  # a mask that is a parameter is no weight
            weights = floats or weights
            first = next((s for s in weights if isinstance(s, Origin)), weights[0])
            what = first.primitive if isinstance(first, Changed) else eqn.primitive.name
            return [Changed(first.leaf, what)] * len(eqn.outvars)
        return [None] * len(eqn.outvars)

    def note_opaque(self, eqn: Eqn, ins: list[Source], stack: str) -> None:
        from jax.extend import core as jex

        weights = sorted({s.leaf for s in ins if isinstance(s, Origin)})
        if eqn.primitive.name == "reduce" and not weights:
            return
        products = any(map(jaxprs.contains_product, jex.jaxprs_in_params(eqn.params)))
        path = jaxprs.where(stack).path
        place = path or "the model's top level"
        text = f"{jaxprs.kernel_name(eqn)} at {place} is opaque and runs as it is"
        if weights:
            text += f"; it reads {', '.join(weights)}"
            self.in_kernels += [path, *weights]
        if products:
            text += "; products inside it are not quantized"
        self.opaque.append(text)

    def with_bodies(
        self, eqn: Eqn, bodies: Sequence[Any], ins: list[Source], stack: str, trips: int
    ) -> tuple[tuple[Node, ...], Sequence[Source]]:
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, ins, stack, trips)
        if name == "while":
            p = jaxprs.while_params(eqn)
            nc, nb = p.num_cond_consts, p.num_body_consts
            carry = self.carried(p.body, ins[nc : nc + nb], ins[nc + nb :], [], name)
            cond, _ = self.body(p.cond, ins[:nc] + carry, stack, trips)
            body, _ = self.body(p.body, ins[nc : nc + nb] + carry, stack, trips)
            return (cond, body), carry
        if name == "cond":
            nodes, results = zip(
                *(self.body(branch, ins[1:], stack, trips) for branch in bodies), strict=True
            )
            return nodes, [_either(r, name) for r in zip(*results, strict=True)]
        if name == "shard_map":  # inside, shapes are one shard's; outside, they are whole again
            inner = jaxprs.open_jaxpr(bodies[0]).invars
            shards = [
                sliced(s, v.aval.shape, name) if isinstance(s, Origin) else s
                for s, v in zip(ins, inner, strict=True)
            ]
            around, self.in_shards = self.in_shards, True
            node, outs = self.body(bodies[0], shards, stack, trips)
            self.in_shards = around
            return (node,), [_changed(s, name) for s in outs]
        outside = self.in_rule
        if name in ("custom_jvp_call", "custom_vjp_call"):
            self.in_rule = outside or name
        node, outs = self.body(bodies[0], ins, stack, trips)
        self.in_rule = outside
        return (node,), outs

    def scan(
        self, eqn: Eqn, ins: list[Source], stack: str, trips: int
    ) -> tuple[tuple[Node, ...], Sequence[Source]]:
        p = jaxprs.scan_params(eqn)
        nc, nk = p.num_consts, p.num_carry
        depth = len(self.layers)
        layers = [_picked(s, depth) if isinstance(s, Origin) else s for s in ins[nc + nk :]]
        per_layer = any(isinstance(s, Origin | Changed) for s in layers)
        outside = self.layers
        self.layers += (p.length,) * per_layer
        carry = self.carried(p.body, ins[:nc], ins[nc : nc + nk], layers, "scan")
        node, outs = self.body(p.body, ins[:nc] + carry + layers, stack, trips * p.length)
        self.layers, node.per_layer = outside, per_layer
        through = zip(jaxprs.forwards(p.body)[nk:], outs[nk:], strict=True)
        stacked = [
            ins[k] if k is not None and k >= nc + nk else _changed(s, "scan") for k, s in through
        ]
        return (node,), carry + stacked

    def carried(
        self,
        body: Any,
        consts: Sequence[Source],
        inits: Sequence[Source],
        rest: Sequence[Source],
        name: str,
    ) -> list[Source]:
        """What a loop's carried values are, whichever trip it is.

        What the body hands on untouched is what it was, and a weight that is changed by nothing
        else than weights is a changed weight.
        """
        carry = _fixed_carry(body, len(consts), inits)
        guess = [
            s if s is not None or not isinstance(i, Origin | Changed) else _changed(i, name)
            for s, i in zip(carry, inits, strict=True)
        ]
        while guess != carry:
            # Looked at by itself: Sites inside are numbered once, when all is known.
            _, outs = _Walk(self.method, self.site_path).body(body, [*consts, *guess, *rest], "", 1)
            found = [
                s if fixed is not None or s is None else _changed(o, name)
                for s, o, fixed in zip(guess, outs, carry, strict=False)
            ]
            if [s is None for s in found] == [s is None for s in guess]:
                return found
            guess = found
        return carry

    def site(self, eqn: Eqn, ins: list[Source], stack: str, trips: int) -> TracedSite | None:
        op = jaxprs.SITE_PRIMITIVES[eqn.primitive.name]
        place = jaxprs.where(stack)
        if op == "take" and not (isinstance(ins[0], Origin) and is_row_lookup(eqn)):
            return None
        if op == "dot_general" and place.einsum:
            op = "einsum"
        sources = tuple(None if isinstance(s, Written) else s for s in ins[:2])
        side = next((k for k in (1, 0) if isinstance(sources[k], Origin)), None)
        weight = sources[side].leaf if side is not None else None  # type: ignore[union-attr]
        path = self.path_of(place, weight)
        index = self.numbers[path, op]
        self.numbers[path, op] += 1
        lhs, rhs, out = (_info(v) for v in (*eqn.invars[:2], eqn.outvars[0]))
        macs = multiply_adds(eqn) * trips
        site = Site(
            path=path,
            op=op,
            index=index,
            method=self.method,
            class_name=place.class_name,
            lhs=lhs,
            rhs=rhs,
            out=out,
            macs=macs,
            trips=trips,
            weight=weight,
            weight_side=None if side is None else ("lhs", "rhs")[side],
            spec=place.einsum or letters_of(eqn),
        )
        return TracedSite(site, eqn, sources, place, self.layers, self.in_rule, self.in_shards)

    def path_of(self, place: Where, weight: str | None) -> str:
        if self.site_path == "leaf":
            return weight if weight is not None else place.user_scope
        if weight is None or (place.in_module and self.site_path != "owner"):
            return place.path
        return weight.rpartition("/")[0]


def _is_stored(source: Source) -> bool:
    return isinstance(source, Origin | Changed | Constant)


def _changed(source: Source, name: str) -> Changed | None:
    """A weight that went through a body: changed by what is inside, or by the body itself."""
    if isinstance(source, Origin):
        return Changed(source.leaf, name)
    return source if isinstance(source, Changed) else None


def _either(sources: Sequence[Source], name: str) -> Source:
    """One of several values: what all of them are, or a weight that the choice changes."""
    if all(s == sources[0] for s in sources):
        return sources[0]
    known = all(_is_stored(s) or isinstance(s, Written) for s in sources)
    weights = [s for s in sources if isinstance(s, Origin | Changed)]
    return _changed(weights[0], name) if known and weights else None


def _picked(source: Origin, depth: int) -> Origin:
    """One entry of a stacked leaf, as the body of a scan sees it."""
    step = (depth, source.axes[0])
    return replace(source, axes=source.axes[1:], picked=(*source.picked, step))


def _fixed_carry(body: Any, first: int, sources: Sequence[Source]) -> list[Source]:
    """A carried value the body returns untouched is a constant of the loop; others may change."""
    through = jaxprs.forwards(body)
    return [s if through[k] == first + k else None for k, s in enumerate(sources)]


def _info(var: Any) -> ArrayInfo:
    return ArrayInfo(tuple(var.aval.shape), str(jnp.dtype(var.aval.dtype)))
