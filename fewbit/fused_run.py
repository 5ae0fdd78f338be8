"""Runs a product with its bias and activation as one op; differentiates them one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fewbit import jaxprs
from fewbit.fusing import Chain
from fewbit.trace import Node
from fewbit.weight import plain

Interpreter = Any


def run_chain(run: Interpreter, node: Node, chain: Chain, read: Callable[[Any], Any]) -> Any:
    """The value of the chain's last equation.

    Where a derivative is taken, the equations run as they were traced, so it is theirs.
    """
    site, eqns = node.sites[chain.product], node.jaxpr.eqns
    inside = {v for k in (chain.product, *chain.rest) for v in eqns[k].outvars}
    outside = [
        v
        for v in dict.fromkeys(v for k in chain.rest for v in eqns[k].invars if _is_var(v))
        if v not in inside
    ]

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


def _is_var(v: Any) -> bool:
    return not jaxprs.is_literal(v)


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
