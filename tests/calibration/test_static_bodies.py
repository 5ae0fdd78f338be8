"""Static scales reach a product under every transformation, around it and inside the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, relative_error
from test_static_scales import (
    REACHES,
    STATIC,
    W,
    X,
    absmax,
    close,
    quantized_function,
    reference,
    stacked,
)

import fewbit


def test_transformations_around_a_static_product():
    qf, qp, _ = quantized_function()
    expected = reference(X, W, 1.5)
    assert close(jax.jit(qf)(qp, X), expected)
    assert jax.eval_shape(qf, qp, X).shape == (4, 5)
    straight = jax.grad(lambda x: qf(qp, x).sum())(X)
    weight = fewbit.dequantize(qp.params["w"])
    assert close(straight, jnp.ones((4, 5)) @ weight.T)  # as for a dynamic range
    assert close(jax.jit(jax.grad(lambda x: qf(qp, x).sum()))(X), straight)
    one, qp1, _ = quantized_function(stats={"w:dot_general0": {"lhs": absmax(1.5, 1)}}, x=X[0])
    rows = jax.vmap(one, in_axes=(None, 0))(qp1, X)
    assert close(rows, expected)


def bodies():
    """Ways to put a product into a body; each takes (params, x) to x @ w."""

    def product(params, x):
        return x @ params["w"]

    @jax.custom_jvp
    def with_jvp(w, x):
        return x @ w

    with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[1] @ p[0] + p[1] @ t[0]))

    @jax.custom_vjp
    def with_vjp(w, x):
        return x @ w

    with_vjp.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))

    def cond(params, x):
        return jax.lax.cond(x[0, 0] < 99, lambda: x @ params["w"], lambda: jnp.zeros((4, 5)))

    def loop(params, x):
        start = (0, jnp.zeros((4, 5)))
        step = lambda c: (c[0] + 1, x @ params["w"])  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 2, step, start)[1]

    def over_time(params, x):
        return jax.lax.scan(lambda c, row: (c, row[None] @ params["w"]), 0, x)[1][:, 0]

    def shard_map(params, x):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        mapped = jax.shard_map(
            lambda w, x: x @ w, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data")
        )
        return mapped(params["w"], x)

    return {
        "jit": lambda p, x: jax.jit(product)(p, x),
        "remat": lambda p, x: jax.checkpoint(product)(p, x),
        "custom_jvp": lambda p, x: with_jvp(p["w"], x),
        "custom_vjp": lambda p, x: with_vjp(p["w"], x),
        "cond": cond,
        "while": loop,
        "scan over time": over_time,
        "shard_map": shard_map,
        "jit of remat": lambda p, x: jax.jit(jax.checkpoint(product))(p, x),
        "remat of custom_vjp": lambda p, x: jax.checkpoint(lambda: with_vjp(p["w"], x))(),
    }


@pytest.mark.parametrize("kind", list(bodies()))
def test_scales_reach_a_product_in_any_body(kind):
    f = bodies()[kind]
    made = fewbit.plan(f, [STATIC], {"w": W}, X)
    (entry,) = made.scales
    assert entry.shape == (1, 1)  # a scan over time has no layer axis
    qf, qp, _ = quantized_function(f=f)
    expected = reference(X, W, 1.5)
    assert close(qf(qp, X), expected)
    assert close(jax.jit(qf)(qp, X), expected)
    if kind != "while":
        gradient = jax.grad(lambda x: qf(qp, x).sum())(X)
        assert jnp.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 0
        assert close(jax.jit(jax.grad(lambda x: qf(qp, x).sum()))(X), gradient)


L, D = 3, 6
STACK = {"layers": {"w": normal(7, L, D, D) / 2}}


def stack(params, x, body=lambda w, x: jnp.tanh(x @ w), **kwargs):
    return jax.lax.scan(lambda x, w: (body(w, x), None), x, params["layers"]["w"], **kwargs)[0]


def stack_reference(x, order=range(L)):
    for i in order:
        x = np.tanh(reference(np.float32(x), STACK["layers"]["w"][i], REACHES[i]))
    return x


@pytest.mark.parametrize("kind", ["scan", "remat", "reverse", "custom_vjp", "cond", "unroll"])
def test_layers_of_a_scan_have_scales_of_their_own(kind):
    @jax.custom_vjp
    def with_vjp(w, x):
        return jnp.tanh(x @ w)

    with_vjp.defvjp(lambda w, x: (with_vjp(w, x), (w, x)), lambda r, g: (g.T @ g, g @ r[0].T))
    plain = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    body = {
        "remat": jax.checkpoint(plain),
        "custom_vjp": with_vjp,
        "cond": lambda w, x: jax.lax.cond(x[0, 0] < 99, plain, lambda w, x: x, w, x),
    }.get(kind, plain)
    options = {"reverse": {"reverse": True}, "unroll": {"unroll": 2}}.get(kind, {})
    f = lambda params, x: stack(params, x, body, **options)  # noqa: E731
    stats = {"layers/w:dot_general0": {"lhs": stacked(*REACHES)}}
    qf, qp, made = quantized_function(stats=stats, f=f, params=STACK)
    assert made.scales[0].shape == (L, 1, 1)
    order = reversed(range(L)) if kind == "reverse" else range(L)
    assert relative_error(qf(qp, X), stack_reference(X, order)) < 1e-2
    swapped = {"layers/w:dot_general0": {"lhs": stacked(*REACHES[::-1])}}
    other = fewbit.quantize_params(STACK, made, swapped)
    assert relative_error(qf(other, X), qf(qp, X)) > 0.02
    gradient = jax.jit(jax.grad(lambda x: qf(qp, x).sum()))(X)
    assert jnp.isfinite(gradient).all()


def test_a_scan_of_scans():
    params = {"layers": {"w": normal(8, 2, L, D, D) / 2}}

    def f(params, x):
        outer = lambda x, w: (stack({"layers": {"w": w}}, x), None)  # noqa: E731
        return jax.lax.scan(outer, x, params["layers"]["w"])[0]

    parts = stacked(*REACHES), stacked(*(2 * r for r in REACHES))
    stat = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    stats = {"layers/w:dot_general0": {"lhs": stat}}
    qf, qp, made = quantized_function(stats=stats, f=f, params=params)
    assert made.scales[0].shape == (2, L, 1, 1)
    x = np.asarray(X)
    for j in range(2):
        for i in range(L):
            w = params["layers"]["w"][j, i]
            x = np.tanh(reference(np.float32(x), w, (j + 1) * REACHES[i]))
    assert relative_error(qf(qp, X), x) < 1e-2


def test_eight_devices():
    qf, qp, _ = quantized_function(x=normal(0, 8, 6))
    x, expected = normal(0, 8, 6), reference(normal(0, 8, 6), W, 1.5)
    spec = jax.sharding.PartitionSpec("data")
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
            out = jax.jit(qf)(qp, placed)
        assert len(out.sharding.device_set) == 8
        assert close(np.asarray(out), expected)
