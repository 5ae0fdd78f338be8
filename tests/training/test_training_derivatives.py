"""Derivatives of training products: right, or an error in our own words, in every mode."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal

import fewbit
from fewbit import QtProvider, QtRule
from fewbit.training import (
    ConvGeneralQtConfig,
    DotGeneralQtConfig,
    RaggedDotQtConfig,
    conv_general_qt,
    dot_general_qt,
    einsum_qt,
    ragged_dot_qt,
)

PLAIN = (((1,), (0,)), ((), ()))
QAT = dict(lhs_qtype="int8", rhs_qtype="int8")
QT = dict(QAT, dlhs_grad_qtype="int8", drhs_grad_qtype="int8")
GROUPS = jnp.array([2, 1], jnp.int32)


def conv(x, w, config):
    return conv_general_qt(x, w, config, (1, 1), "SAME")


def float_conv(x, w):
    """Of rounded operands, which move as their arrays do: QAT differentiates these."""

    def rounded(x):
        q = fewbit.quantize(jax.lax.stop_gradient(x), "int8", channelwise_axes=(0,))
        return fewbit.dequantize(q) + (x - jax.lax.stop_gradient(x))

    return jax.lax.conv_general_dilated(rounded(x), rounded(w), (1, 1), "SAME")


OPS = {  # config, product for training, float product, shapes
    "dot_general_qt": (
        DotGeneralQtConfig,
        lambda x, w, c: dot_general_qt(x, w, PLAIN, c),
        jnp.matmul,
        ((3, 4), (4, 2)),
    ),
    "einsum_qt": (
        DotGeneralQtConfig,
        lambda x, w, c: einsum_qt("ab,cb->ca", x, w, c),
        lambda x, w: jnp.einsum("ab,cb->ca", x, w),
        ((3, 4), (2, 4)),
    ),
    "conv_general_qt": (ConvGeneralQtConfig, conv, float_conv, ((1, 2, 3, 3), (2, 2, 2, 2))),
    "ragged_dot_qt": (
        RaggedDotQtConfig,
        lambda x, w, c: ragged_dot_qt(x, w, GROUPS, c),
        lambda x, w: jax.lax.ragged_dot(x, w, GROUPS),
        ((3, 4), (2, 4, 2)),
    ),
}


def along(f):
    return lambda w: jax.jvp(f, (w,), (w,))


def linearized(f):
    return lambda w: jax.linearize(f, w)[1](w)


def per_example(f):
    return lambda w: jax.vmap(lambda w: jax.jvp(f, (w,), (w,)))(jnp.stack([w, w]))


FORWARD = {
    "jvp": along,
    "linearize": linearized,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "jvp of grad": lambda f: along(jax.grad(f)),
    "linearize of grad": lambda f: linearized(jax.grad(f)),
    "grad of jvp": lambda f: jax.grad(lambda w: along(f)(w)[1]),
    "hessian of remat": lambda f: jax.hessian(jax.checkpoint(f)),
    "vmap of jvp": per_example,
}
JITTED = {
    "jit inside": lambda way: lambda f: way(jax.jit(f)),
    "jit outside": lambda way: lambda f: jax.jit(way(f)),
}

OURS = (
    "{op} with quantized gradients (has no forward-mode derivative .*Use reverse mode .*, or|"
    r"cannot be differentiated twice.*) ?leave dlhs_grad_qtype and drhs_grad_qtype None \("
    r"bwd_qtype=None in a rule\)"
)


def loss_of(op, fields):
    config, run, _, shapes = OPS[op]
    x, w = (normal(k, *shape) for k, shape in enumerate(shapes))
    return lambda w: jnp.sum(jnp.tanh(run(x, w, config(**fields)))), x, w


def refused(function, w, op):
    with pytest.raises(NotImplementedError, match=f"(?i){OURS.format(op=op)}"):
        function(w)


@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("op", OPS)
def test_forward_mode_over_quantized_gradients_is_refused_in_our_words(op, way):
    loss, _, w = loss_of(op, QT)
    refused(FORWARD[way](loss), w, op)


@pytest.mark.parametrize("jitted", JITTED)
@pytest.mark.parametrize("way", [way for way in FORWARD if way != "vmap of jvp"])
def test_and_in_compiled_programs(way, jitted):
    loss, _, w = loss_of("dot_general_qt", QT)
    refused(JITTED[jitted](FORWARD[way])(loss), w, "dot_general_qt")


@pytest.mark.parametrize("jitted", JITTED)
def test_a_compiled_map_of_jvp_is_refused_by_jax(jitted):
    """Nothing that is public tells it from a gradient of a map; it is an error all the same."""
    loss, _, w = loss_of("dot_general_qt", QT)
    with pytest.raises(TypeError, match="forward-mode autodiff .* custom_vjp"):
        JITTED[jitted](per_example)(loss)(w)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_in_reverse_mode_are_refused(op):
    loss, _, w = loss_of(op, QT)
    refused(jax.grad(lambda w: jnp.sum(jax.grad(loss)(w))), w, op)


@pytest.mark.parametrize("op", OPS)
def test_float_gradients_have_every_derivative(op):
    _, run, float_run, _ = OPS[op]
    loss, x, w = loss_of(op, QAT)
    # The float product moved to the quantized value has the same derivatives.
    offset = run(x, w, OPS[op][0](**QAT)) - float_run(x, w)

    def same(w):
        return jnp.sum(jnp.tanh(float_run(x, w) + offset))

    def twice(f):
        return jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), jax.lax.stop_gradient(w)))

    ways = [along, lambda f: along(jax.grad(f))]
    if op != "ragged_dot_qt":  # JAX has no more of it: no map over tangents, no second transpose
        ways += [twice, jax.hessian]
    for way in ways:
        for a, b in zip(jax.tree.leaves(way(loss)(w)), jax.tree.leaves(way(same)(w)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("op", ["dot_general_qt", "conv_general_qt"])
def test_reverse_mode_is_what_it_was_through_every_body(op):
    config, run, _, _ = OPS[op]
    loss, x, w = loss_of(op, QT)
    expected = jax.grad(loss)(w)
    close(jax.jacrev(loss)(w), expected)
    close(jax.grad(jax.checkpoint(loss))(w), expected)
    close(jax.vmap(jax.grad(loss))(jnp.stack([w, w]))[1], expected)
    mapped = jax.grad(lambda w: jnp.sum(jax.vmap(loss)(jnp.stack([w, 2 * w]))))
    close(mapped(w), expected + 2 * jax.grad(loss)(2 * w))
    xs = jnp.stack([x, x])

    def one_side(w):  # only one of two operands is mapped
        outs = jax.vmap(lambda x: jnp.sum(jnp.tanh(run(x, w, config(**QT)))))(xs)
        return jnp.sum(outs)

    close(jax.jit(jax.grad(one_side))(w), 2 * expected)

    def in_a_loop(w):
        return jax.lax.scan(lambda total, _: (total + loss(w), None), 0.0, None, 3)[0]

    close(jax.jit(jax.grad(in_a_loop))(w), 3 * expected)
    branch = jax.grad(lambda w, yes: jax.lax.cond(yes, loss, lambda w: 0.0, w))
    close(branch(w, True), expected)
    assert not branch(w, False).any()


def test_an_operand_whose_zero_tangent_is_known_is_no_forward_mode():
    _, x, w = loss_of("dot_general_qt", QT)

    @jax.custom_jvp
    def both(a, b):
        return a, b

    @both.defjvp
    def tangents(primals, tangents):
        return primals, tangents  # b's is an array of zeros by now

    def loss(w):
        moved, fixed = both(w, x)
        return jnp.sum(dot_general_qt(fixed, moved, PLAIN, DotGeneralQtConfig(**QT)))

    config = DotGeneralQtConfig(**QT)
    close(jax.grad(loss)(w), jax.grad(lambda w: dot_general_qt(x, w, PLAIN, config).sum())(w))


# --- models ---------------------------------------------------------------------------------------

X = normal(2, 6, 8)


def function_model(rule):
    params = {"up": normal(0, 8, 5), "down": normal(1, 5, 3)}
    f = fewbit.quantize_model(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], QtProvider([rule]))
    return params, lambda params: jnp.mean(jnp.square(f(params, X)))


def linen_model(rule):
    module = nn.Sequential([nn.Dense(5), jnp.tanh, nn.Dense(3)])
    params = module.init(jax.random.key(0), X)
    quantized = fewbit.quantize_model(module, QtProvider([rule]))
    return params, lambda params: jnp.mean(jnp.square(quantized.apply(params, X)))


def nnx_model(rule):
    rngs = nnx.Rngs(0)
    module = nnx.Sequential(nnx.Linear(8, 5, rngs=rngs), jnp.tanh, nnx.Linear(5, 3, rngs=rngs))
    quantized = fewbit.quantize_model(module, QtProvider([rule]), X)
    graph, params, rest = nnx.split(quantized, nnx.Param, ...)

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graph, params, rest)(X)))

    return params, loss


MODELS = {"function": function_model, "linen": linen_model, "nnx": nnx_model}


@pytest.mark.parametrize("front", MODELS)
def test_models_with_quantized_gradients(front):
    params, loss = MODELS[front](QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"))
    assert all(leaf.any() for leaf in jax.tree.leaves(jax.grad(loss)(params)))
    for way in ("jvp", "jvp of grad", "hessian"):
        refused(FORWARD[way](loss), params, "dot_general_qt")


def stack(rule, emulate=False):
    """The same two layers as a scan and one by one: losses of stacked parameters."""
    provider = QtProvider([rule], emulate=emulate)
    scanned = fewbit.quantize_model(
        lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0], provider
    )
    apart = fewbit.quantize_model(
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]["w"]) @ p["b"]["w"]), provider
    )
    params = {"w": normal(3, 2, 8, 8)}
    if rule.weight_calibration_method == "learned":
        params = fewbit.add_learned_scales(scanned, params, X)

    def one_by_one(params):
        layers = {k: {n: v[i] for n, v in params.items()} for i, k in enumerate("ab")}
        return jnp.mean(jnp.square(apart(layers, X)))

    return params, lambda params: jnp.mean(jnp.square(scanned(params, X))), one_by_one


W8A8 = QtRule(weight_qtype="int8", act_qtype="int8")
STACKS = {
    "int8": (W8A8, False),
    "emulated": (W8A8, True),
    "clipped": (W8A8.replace(weight_calibration_method="rms,1.5"), False),
    "learned": (W8A8.replace(weight_qtype="int4", weight_calibration_method="learned"), False),
}


@pytest.mark.parametrize("kind", STACKS)
def test_a_scan_has_the_second_derivatives_of_its_layers(kind):
    """JAX makes a scan's backward pass from the bodies of functions with a custom derivative."""
    params, scanned, one_by_one = stack(*STACKS[kind])

    def of(loss):
        direction = jax.tree.map(jnp.cos, params)

        def slope(params):
            return sum(
                jnp.vdot(g, d)
                for g, d in zip(
                    *map(jax.tree.leaves, (jax.grad(loss)(params), direction)), strict=True
                )
            )

        return jax.jvp(jax.grad(loss), (params,), (direction,))[1], jax.grad(slope)(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max()),
        of(scanned),
        of(one_by_one),
    )


def test_a_stored_scan_has_them_at_its_inputs():
    rules = [fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    w = normal(3, 2, 8, 8)

    def hessian_times_vector(f, params):
        stored = fewbit.quantize_params(params, fewbit.plan(f, rules, params, X))
        model = fewbit.quantize_model(f, fewbit.PtqProvider(rules))
        slope = jax.grad(lambda x: jnp.mean(jnp.square(model(stored, x))))
        return jax.jvp(slope, (X,), (jnp.cos(X),))[1]

    scanned = hessian_times_vector(
        lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0], {"w": w}
    )
    apart = hessian_times_vector(
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]), {"a": w[0], "b": w[1]}
    )
    np.testing.assert_allclose(scanned, apart, rtol=1e-3, atol=1e-4 * np.abs(apart).max())


def test_a_scan_with_quantized_gradients_refuses_them_too():
    params, loss, _ = stack(W8A8.replace(bwd_qtype="int8"))
    assert jax.grad(loss)(params)["w"].any()
    for way in ("jvp", "jvp of grad", "hessian", "linearize of grad"):
        apart = lambda w, way=way: FORWARD[way](lambda w: loss({"w": w}))(w)  # noqa: E731
        refused(apart, params["w"], "dot_general_qt")


@pytest.mark.parametrize("front", MODELS)
def test_models_with_float_gradients(front):
    params, loss = MODELS[front](QtRule(weight_qtype="int8", act_qtype="int8"))

    def dot(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

    gradient = jax.grad(loss)(params)
    value, slope = along(loss)(params)
    np.testing.assert_allclose(value, loss(params), rtol=1e-6)
    np.testing.assert_allclose(slope, dot(gradient, params), rtol=1e-4)
    # One Hessian, times a vector: forward over reverse and reverse over reverse.
    _, forward = along(jax.grad(loss))(params)
    reverse = jax.grad(lambda p: dot(jax.grad(loss)(p), jax.lax.stop_gradient(p)))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), forward, reverse
    )


DELAYED = QtRule(weight_qtype="fp8", act_qtype="fp8", act_calibration_method="delayed,4")
DELAYED_WORDS = (
    "Delayed scaling has first derivatives, in reverse mode: .* Use 'absmax' in place of 'delayed' "
    "where these are taken"
)


@pytest.mark.parametrize(
    "way",
    ["jvp", "hessian", "jvp of grad", "linearize of grad", "grad of grad"],
)
def test_histories_are_never_lost_in_a_derivative(way):
    module = nn.Sequential([nn.Dense(5), jnp.tanh, nn.Dense(3)])
    quantized = fewbit.quantize_model(module, QtProvider([DELAYED]))
    params = quantized.init(jax.random.key(0), X)

    def loss(params):
        return jnp.mean(jnp.square(quantized.apply(params, X)))

    (first, *_) = jax.tree.leaves(jax.grad(loss)(params)["_overwrite_with_gradient"])
    assert first[0] == jnp.abs(X).max()
    twice = jax.grad(lambda p: sum(jnp.sum(g) for g in jax.tree.leaves(jax.grad(loss)(p))))
    function = twice if way == "grad of grad" else FORWARD[way](loss)
    with pytest.raises(NotImplementedError, match=DELAYED_WORDS):
        function(params)
