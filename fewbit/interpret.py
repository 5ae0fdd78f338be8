"""Run: evaluate a traced model with each planned Site replaced by the quantized op.

The interpreter is ordinary JAX code, so `jit`, `grad`, `vmap`, `scan` and sharding compose around
it. Quantized weights flow through it as values (`Weight`): layout primitives move them, Sites
consume them, any other primitive reads them dequantized. With nothing quantized the result is
bit-equal to the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fewbit import jaxprs
from fewbit._qarray_panels import PanelArray
from fewbit.fused_run import run_chain
from fewbit.fusing import Chain, find_chains
from fewbit.jaxprs import Eqn
from fewbit.moves import CannotMove
from fewbit.ops.argmax import argmax
from fewbit.rebuild import REBUILD
from fewbit.static_run import StaticScales
from fewbit.taps import Readings, Taps
from fewbit.trace import Node, TracedSite
from fewbit.weight import is_weight, plain
from fewbit.weight_moves import MOVES, with_twins

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
            if i in chains:
                env[eqn.outvars[0]] = run_chain(self, node, chains[i], read)
                continue
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
        rule = MOVES.get(eqn.primitive.name)
        if rule is not None:
            try:
                with eqn.ctx.manager:
                    outs = rule(eqn, ins)
            except CannotMove:
                pass
            else:
                return with_twins(eqn, ins, outs)
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
