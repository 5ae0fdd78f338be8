"""With nothing quantized the interpreter is bit-equal to the plain model, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

from fewbit import PtqProvider
from fewbit.interpreter._interpret import Interpreter
from fewbit.interpreter._runner import Runner
from fewbit.tracing import _jaxprs as jaxprs
from fewbit.tracing._sites import analyse


def interpreted(function, *, rebuild_all=True):
    """`function` through the interpreter, every body rebuilt, every Site bound as it was."""

    def run(*args):
        leaves, tree = jax.tree.flatten(args)
        traced = jax.jit(lambda leaves: function(*jax.tree.unflatten(tree, leaves))).trace(leaves)
        program = analyse(traced.jaxpr, [None] * len(leaves))
        at_site = lambda site, ins: jaxprs.bind(site.eqn, ins)[0]  # noqa: E731
        interpreter = Interpreter(at_site, lambda site: True, rebuild_all=rebuild_all)
        outs = interpreter.run(program.root, leaves)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)

    return run


def assert_bit_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_forward_is_bit_equal(name):
    function, params, args = zoo.member(name)
    assert_bit_equal(
        jax.jit(interpreted(function))(params, *args), jax.jit(function)(params, *args)
    )


@pytest.mark.parametrize(
    "name", [n for n in zoo.NAMES if n not in ("while_loop", "opaque_kernels")]
)
def test_gradient_is_bit_equal(name):
    """`while` and the Pallas kernel have no reverse mode in JAX itself."""
    function, params, args = zoo.member(name)

    def loss(f):
        def total(params, *args):
            outs = [
                o
                for o in jax.tree.leaves(f(params, *args))
                if jnp.issubdtype(o.dtype, jnp.floating)
            ]
            return sum(jnp.sum(o * o) for o in outs)

        return jax.jit(jax.grad(total, allow_int=True))

    assert_bit_equal(loss(interpreted(function))(params, *args), loss(function)(params, *args))


@pytest.mark.parametrize("name", ["scan_stacked", "while_loop", "cond", "remat", "custom_jvp"])
def test_vmap_and_jvp_are_bit_equal(name):
    function, params, args = zoo.member(name)
    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), args)

    def mapped(f):
        return jax.jit(jax.vmap(f, in_axes=(None, 0)))(params, *batch)

    def tangent(f):
        return jax.jit(lambda x: jax.jvp(lambda x: f(params, x), (x,), (jnp.ones_like(x),)))(
            args[0]
        )

    assert_bit_equal(mapped(interpreted(function)), mapped(function))
    if name != "while_loop":
        assert_bit_equal(tangent(interpreted(function)), tangent(function))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_an_empty_plan_changes_nothing(name):
    """The engine itself, without rules: same bits, and optimized HLO at most 2 % longer."""
    function, params, args = zoo.member(name)
    runner = Runner(
        lambda tree: function(tree[0], *tree[1]),
        PtqProvider([]),
        lambda key: jax.tree_util.keystr(key) if key[0].idx == 0 else None,
    )
    tree = (params, args)
    assert_bit_equal(runner(tree), jax.jit(function)(params, *args))
    ours, plain = map(
        instructions, (runner.interpret, lambda tree: function(tree[0], *tree[1])), [tree] * 2
    )
    assert ours <= 1.02 * plain


def instructions(function, tree):
    """Lines of optimized HLO that compute something (the rest are source positions)."""
    text = jax.jit(function).lower(tree).compile().as_text()
    return sum(" = " in line for line in text.splitlines())


def primitives_in(jaxpr, found=None):
    from jax.extend import core as jex

    found = set() if found is None else found
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        found.add(eqn.primitive.name)
        for sub in jex.jaxprs_in_params(eqn.params):
            primitives_in(sub, found)
    return found


def test_the_zoo_holds_every_primitive_with_a_body():
    found = set()
    for name in zoo.NAMES:
        function, params, args = zoo.member(name)
        found |= primitives_in(jax.make_jaxpr(function)(params, *args))
    bodies = {"jit", "scan", "while", "cond", "remat2", "custom_jvp_call", "custom_vjp_call"}
    assert bodies | {"shard_map", "pallas_call", "custom_linear_solve"} <= found
    assert set(jaxprs.SITE_PRIMITIVES) <= found
