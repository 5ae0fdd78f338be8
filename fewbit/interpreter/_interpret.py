"""Run: evaluate a traced model with each planned Site replaced by the quantized op.

The interpreter is ordinary JAX code, so `jit`, `grad`, `vmap`, `scan` and sharding compose around
it. Quantized weights flow through it as values (`Weight`): layout primitives move them, Sites
consume them, any other primitive reads them dequantized. With nothing quantized the result is
bit-equal to the model.
"""

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fewbit.interpreter._beside import StaticScales
from fewbit.interpreter._control_flow import REBUILD
from fewbit.interpreter._taps import Readings, Taps
from fewbit.interpreter._weights import MOVES, is_weight, plain, with_twins
from fewbit.kernels import ACTIVATIONS
from fewbit.ops import argmax
from fewbit.qarray import CannotMove, PanelArray
from fewbit.tracing import Eqn, Jaxpr, Node, TracedSite, jaxprs

# --- What follows a product in a jaxpr: a bias over its columns, and a known activation -----------

# The same functions as people also write them.
_SPELLINGS: tuple[tuple[str, Callable[[jax.Array], jax.Array]], ...] = (
    *ACTIVATIONS.items(),
    ("relu", lambda x: jnp.maximum(x, 0)),
    ("silu", lambda x: x * jax.nn.sigmoid(x)),
    ("silu", lambda x: jax.nn.sigmoid(x) * x),
)
_PRODUCTS = ("dot_general", "ragged_dot_general")


@dataclass(frozen=True)
class Chain:
    """A product and the equations after it that the kernel can do, by number."""

    product: int
    rest: tuple[int, ...]  # the last one makes the result
    bias: Any  # the variable, or None
    activation: str | None

    @property
    def last(self) -> int:
        return self.rest[-1]


class _Uses:
    """Which equations read a variable, and which makes it; a result of the jaxpr is read at -1."""

    def __init__(self, jaxpr: Jaxpr):
        self.eqns = jaxpr.eqns
        self.readers: dict[Any, list[int]] = defaultdict(list)
        self.maker: dict[Any, Eqn] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for var in dict.fromkeys(filter(_is_var, eqn.invars)):
                self.readers[var].append(i)
            self.maker.update((var, eqn) for var in eqn.outvars)
        for var in filter(_is_var, jaxpr.outvars):
            self.readers[var].append(-1)

    def of(self, var: Any) -> list[int]:
        return self.readers.get(var, [])


def _is_var(value: Any) -> bool:
    return not jaxprs.is_literal(value)


_chains: weakref.WeakKeyDictionary[Any, dict[int, Chain]] = weakref.WeakKeyDictionary()


def find_chains(jaxpr: Jaxpr) -> dict[int, Chain]:
    """The chains of a jaxpr by their product's number; looked for once per jaxpr."""
    if jaxpr not in _chains:
        products = [i for i, e in enumerate(jaxpr.eqns) if e.primitive.name in _PRODUCTS]
        found = map(functools.partial(_chain, _Uses(jaxpr)), products) if products else ()
        _chains[jaxpr] = {chain.product: chain for chain in found if chain is not None}
    return _chains[jaxpr]


def _chain(uses: _Uses, product: int) -> Chain | None:
    (out,) = uses.eqns[product].outvars
    bias, rest = _bias(uses, out)
    value = uses.eqns[rest[0]].outvars[0] if rest else out
    name, after = _activation(uses, value)
    rest = (*rest, *after)
    return Chain(product, rest, bias, name) if rest else None


def _bias(uses: _Uses, value: Any) -> tuple[Any, tuple[int, ...]]:
    """The vector that is added to `value` over its columns, and the equation that does it."""
    none = None, ()
    if len(uses.of(value)) != 1 or uses.of(value) == [-1]:
        return none
    (at,) = uses.of(value)
    eqn = uses.eqns[at]
    if eqn.primitive.name != "add" or not _alike(eqn.outvars[0], value):
        return none
    others = [v for v in eqn.invars if v is not value]
    if len(others) != 1 or not _is_var(others[0]) or others[0] not in uses.maker:
        return none
    bias = jaxprs.repeated_over_rows(uses.maker[others[0]], value.aval.shape)
    is_one = bias is not None and bias.aval.dtype == value.aval.dtype
    return (bias, (at,)) if is_one else none


def _activation(uses: _Uses, value: Any) -> tuple[str | None, tuple[int, ...]]:
    openers = {uses.eqns[i].primitive.name for i in uses.of(value) if i >= 0}
    for number, (name, _) in enumerate(_SPELLINGS):
        if _opener(number) not in openers:
            continue
        found = _match(uses, value, _pattern(number, value.aval.shape, value.aval.dtype.name))
        if found is not None:
            return name, found
    return None, ()


@functools.cache
def _opener(number: int) -> str:
    """The first primitive of a spelling, to look no further for most equations."""
    return _pattern(number, (1,), "float32").eqns[0].primitive.name


@functools.lru_cache(maxsize=256)
def _pattern(number: int, shape: tuple[int, ...], dtype: str) -> Jaxpr:
    function = _SPELLINGS[number][1]
    return jaxprs.open_jaxpr(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype)))


def _match(uses: _Uses, value: Any, pattern: Jaxpr) -> tuple[int, ...] | None:
    """The equations that compute `pattern` of `value`, if nothing else reads what lies between."""
    stands_for: dict[Any, Any] = {pattern.invars[0]: value}
    taken: list[int] = []
    for wanted in pattern.eqns:
        first = next(filter(_is_var, wanted.invars))
        at = next(
            (
                i
                for i in uses.of(stands_for[first])
                if i >= 0
                and i not in taken
                and jaxprs.same_equation(uses.eqns[i], wanted)
                and _same_operands(uses.eqns[i].invars, wanted.invars, stands_for)
            ),
            None,
        )
        if at is None:
            return None
        taken.append(at)
        stands_for.update(zip(wanted.outvars, uses.eqns[at].outvars, strict=True))
    result = stands_for[pattern.outvars[0]]
    between = [v for v in stands_for.values() if v is not result]
    if not _alike(result, value) or any(set(uses.of(v)) - set(taken) for v in between):
        return None
    return tuple(sorted(taken))


def _same_operands(found: Sequence[Any], wanted: Sequence[Any], stands_for: dict) -> bool:
    def same(a, b):
        if jaxprs.is_literal(a) or jaxprs.is_literal(b):
            return jaxprs.same_literal(a, b)
        return stands_for[b] is a

    return len(found) == len(wanted) and all(map(same, found, wanted))


def _alike(a: Any, b: Any) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype


# --- Such a chain runs as one op; its equations are differentiated one by one ---------------------


def run_chain(run: "Interpreter", node: Node, chain: Chain, read: Callable[[Any], Any]) -> Any:
    """The value of the chain's last equation.

    Where a derivative is taken, the equations run as they were traced, so it is theirs.
    """
    site, eqns = node.sites[chain.product], node.jaxpr.eqns
    inside = {v for k in (chain.product, *chain.rest) for v in eqns[k].outvars}
    read_there = [v for k in chain.rest for v in eqns[k].invars if _is_var(v)]
    outside = [v for v in dict.fromkeys(read_there) if v not in inside]

    def together(ins, bias, others, static):
        with run.static.using(static):
            return run.site(site, ins, (bias, chain.activation))

    def apart(ins, bias, others, static):
        with run.static.using(static):
            env = {site.eqn.outvars[0]: run.site(site, ins)}
        env.update(zip(outside, others, strict=True))
        for k in chain.rest:
            args = [env[v] if _is_var(v) else v.val for v in eqns[k].invars]
            env.update(zip(eqns[k].outvars, jaxprs.bind(eqns[k], args), strict=True))
        return env[eqns[chain.last].outvars[0]]

    args = (
        [read(v) for v in site.eqn.invars],
        None if chain.bias is None else plain(read(chain.bias)),
        [plain(read(v)) for v in outside],
        run.static.state,
    )
    return _differentiated_as(apart, together, args)


def _differentiated_as(apart: Callable[..., Any], together: Callable[..., Any], args: Any) -> Any:
    """`together(*args)`, and `apart` (the same function) wherever a derivative is taken.

    Leaf by leaf: a weight's parts that nobody differentiates must not look as if somebody did.
    """
    leaves, tree = jax.tree.flatten(args)

    @jax.custom_jvp
    def value(*leaves):
        return together(*jax.tree.unflatten(tree, leaves))

    def derivative(primals, tangents):
        moving = {k: p for k, p in enumerate(primals) if not isinstance(tangents[k], SymbolicZero)}

        def moved(moving):
            filled = [moving.get(k, p) for k, p in enumerate(primals)]
            return apart(*jax.tree.unflatten(tree, filled))

        out, tangent = jax.jvp(moved, (moving,), ({k: tangents[k] for k in moving},))
        return out, tangent if moving else jnp.zeros_like(out)

    value.defjvp(derivative, symbolic_zeros=True)
    return value(*leaves)


# --- The interpreter ------------------------------------------------------------------------------

SiteHandler = Callable[..., Any]  # (site, operands[, (bias, activation)])


@dataclass
class Interpreter:
    """One interpretation: what to do at a Site, and what happened to weights on the way.

    `at_site(site, operands)` returns the product of a Site that `replaces(site)`; all other
    equations run as they were traced, and a body is rebuilt only for a Site or a weight inside it.
    `static` is what rides beside the parameters: the scales, and which layer is being run. `taps`
    reads Sites as they run; `run_tapped` returns what it read.
    """

    at_site: SiteHandler
    replaces: Callable[[TracedSite], bool]
    finishes: Callable[[TracedSite], bool] = lambda site: False  # may bias and activation be fused
    shortcuts: bool = False  # also run what is exact and faster: a long argmax in two levels
    rebuild_all: bool = False  # for tests: hold every rebuilt primitive against the original
    dequantized: list[tuple[str, str]] = field(default_factory=list)  # (leaf, primitive)
    static: StaticScales = field(default_factory=StaticScales)
    taps: Taps = field(default_factory=Taps)
    _active: dict[Node, bool] = field(default_factory=dict)

    def run(self, node: Node, args: Sequence[Any]) -> list[Any]:
        jaxpr = node.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, node.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(var):
            return var.val if jaxprs.is_literal(var) else env[var]

        chains: dict[int, Chain] = {}  # by their last equation, where all they read is there
        fused: set[int] = set()
        for i, eqn in enumerate(jaxpr.eqns):
            if i in chains:  # the last of the fused
                env[eqn.outvars[0]] = run_chain(self, node, chains[i], read)
            if i in fused:
                continue
            ins = [read(v) for v in eqn.invars]
            chain = self.chain(node, i, ins)
            if chain is not None:
                chains[chain.last] = chain
                fused.update(chain.rest)
                continue
            env.update(zip(eqn.outvars, self.equation(node, i, eqn, ins), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def run_tapped(self, node: Node, args: Sequence[Any]) -> tuple[list[Any], Readings]:
        """The results, and what the tap read at each Site it wants, by Site id."""
        return self.taps.collected(lambda: self.run(node, args))()

    def equation(self, node: Node, i: int, eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
        weights = any(map(is_weight, ins))
        if i in node.sites:
            site = node.sites[i]
            replaced = weights or self.replaces(site)
            outs = [self.site(site, ins)] if replaced else jaxprs.bind(eqn, ins)
            if self.taps.wants(site):
                with eqn.ctx.manager:
                    self.taps.read(site, ins, outs[0])
            return outs
        children = node.children.get(i, ())
        if children and (weights or self.rebuild_all or any(map(self.is_active, children))):
            return REBUILD[eqn.primitive.name](self, eqn, ins, children)
        if weights:
            return self.move(eqn, ins)
        if self.shortcuts and jaxprs.is_long_argmax(eqn):
            return [argmax(ins[0], *jaxprs.argmax_params(eqn))]
        return jaxprs.bind(eqn, ins)

    def chain(self, node: Node, i: int, ins: list[Any]) -> Chain | None:
        """What a kernel can do together with the product of equation `i`, if one will run it."""
        packed = any(is_weight(v) and isinstance(v.array, PanelArray) for v in ins)
        site = node.sites.get(i)
        if not packed or site is None or not self.finishes(site) or self.taps.wants(site):
            return None  # a tap reads the product itself
        return find_chains(node.jaxpr).get(i)

    def is_active(self, node: Node) -> bool:
        """Whether something to replace stands in this body or below; asked once per body."""
        if node not in self._active:
            short = self.shortcuts and any(map(jaxprs.is_long_argmax, node.walk_equations()))
            replaced = any(map(self.replaces, node.walk_sites()))
            self._active[node] = short or replaced or self.taps.inside(node)
        return self._active[node]

    def site(self, site: TracedSite, ins: Sequence[Any], *finish: Any) -> Any:
        with site.eqn.ctx.manager:
            out = self.at_site(site, ins, *finish)
        return fit(out, site.eqn.outvars[0].aval, site.site.id)

    def move(self, eqn: Eqn, ins: list[Any]) -> Sequence[Any]:
        """A weight meets an ordinary equation: move it if that is layout, else read it as float."""
        rule, moved = MOVES.get(eqn.primitive.name), None
        if rule is not None:
            with contextlib.suppress(CannotMove), eqn.ctx.manager:
                moved = rule(eqn, ins)
        if moved is not None:
            return with_twins(eqn, ins, moved)
        return jaxprs.bind(eqn, self.floats(ins, eqn.primitive.name))

    def floats(self, values: Sequence[Any], why: str) -> list[Any]:
        """Values with every weight dequantized, and remembered."""
        self.dequantized.extend((v.leaf, why) for v in values if is_weight(v))
        return [plain(v) for v in values]


def fit(out: Any, aval: Any, where: str) -> Any:
    """The invariant after a replaced equation: its shape, dtype and explicit sharding."""
    if out.shape != aval.shape:
        raise AssertionError(
            f"{where}: the quantized op returned shape {out.shape}, "
            f"the model's equation {aval.shape}"
        )
    out = out.astype(aval.dtype)
    wanted = aval.sharding
    if wanted.mesh.are_all_axes_explicit and jax.typeof(out).sharding != wanted:
        out = jax.sharding.reshard(out, wanted)
    return out
