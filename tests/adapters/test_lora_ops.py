"""Adapters at every op: values and gradients against float64, shapes, quantized bases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_cases import ALPHA, CASES, RANK, SCALE, SOME, close, float_base, lora, normal
from tolerances import LORA_BF16, LORA_F32

import fewbit


def reference(case, w, a, b, x, g):
    """Value and gradients (A, B, x) in float64, with the update written out in the weight."""
    with jax.enable_x64(True):
        w, a, b, x, g = (jnp.asarray(np.asarray(v, np.float64)) for v in (w, a, b, x, g))

        def whole(w, x):
            return (case.op(w, x) * g).sum()

        update = np.asarray(case.update(np.asarray(a), np.asarray(b)))
        merged = w + SCALE * jnp.asarray(update)
        out = case.op(merged, x)
        dw, dx = jax.grad(whole, (0, 1))(merged, x)
        # A B is linear in each factor: its derivative is found one entry at a time, by hand.
        da = _by_entry(lambda e: case.update(e, np.asarray(b)), a.shape, np.asarray(dw))
        db = _by_entry(lambda e: case.update(np.asarray(a), e), b.shape, np.asarray(dw))
        return tuple(map(np.asarray, (out, SCALE * da, SCALE * db, dx)))


def _by_entry(linear, shape, dw):
    found = np.zeros(shape)
    for index in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[index] = 1
        found[index] = (linear(unit) * dw).sum()
    return found


def check(case, tolerance=LORA_F32, dtype=jnp.float32, seed=0, **rule):
    function = lambda params, x: case.op(params["w"], x)  # noqa: E731
    w, x = normal(*case.w, seed=seed, dtype=dtype), normal(*case.x, seed=seed + 1, dtype=dtype)
    run, params, plan = lora(function, {"w": w}, x, seed=seed, **rule)
    (adapter,) = plan.adapters
    assert (adapter.a_shape, adapter.b_shape) == (case.a, case.b)
    a, b = params["w_lora_a"], params["w_lora_b"]
    assert (a.shape, b.shape, a.dtype, b.dtype) == (case.a, case.b, dtype, dtype)
    out = run(params, x)
    assert out.dtype == jax.eval_shape(function, {"w": w}, x).dtype
    g = normal(*out.shape, seed=seed + 2)

    def loss(a, b, x):
        out = run({**params, "w_lora_a": a, "w_lora_b": b}, x)
        return (out.astype(jnp.float32) * g).sum()

    got = (out, *jax.grad(loss, (0, 1, 2))(a, b, x))
    wanted = reference(case, float_base(params["w"]), a, b, x, g)
    for mine, theirs in zip(got, wanted, strict=True):
        close(np.asarray(mine.astype(jnp.float32)), theirs, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_op_in_float(name):
    check(CASES[name])


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("qtype", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_every_op_over_codes(name, qtype):
    check(CASES[name], weight_qtype=qtype)


@pytest.mark.parametrize("name", ["dot", "weight on the left", "einsum from heads", "ragged dot"])
def test_nf4_in_tiles(name):
    check(CASES[name], weight_qtype="nf4", tile_size=2)


@pytest.mark.parametrize("name", ["dot", "einsum to heads", "conv HWIO", "ragged dot"])
def test_bfloat16(name):
    check(CASES[name], LORA_BF16, jnp.bfloat16)


@settings(max_examples=8, deadline=None)
@given(
    m=st.integers(1, 5),
    k=st.integers(1, 9),
    n=st.integers(1, 9),
    heads=st.integers(1, 3),
    data=st.data(),
)
def test_any_shape(m, k, n, heads, data):
    from lora_cases import Case

    left = data.draw(st.booleans())
    w = (heads, n, k) if left else (k, heads, n)
    op = (
        (lambda w, x: jnp.einsum("hnk,mk->mhn", w, x))
        if left
        else (lambda w, x: jnp.einsum("mk,khn->mhn", x, w))
    )
    spec = "kr,rhn->hnk" if left else "kr,rhn->khn"
    update = lambda a, b: np.einsum(spec, a, b)  # noqa: E731
    check(Case(op, w, (m, k), (k, RANK), (RANK, heads, n), update), seed=m)


def test_activations_are_quantized_for_the_base_alone_and_gradients_go_straight_through():
    """The adapter sees the float input; the derivative is that of the float product."""
    f = lambda params, x: x @ params["w"]  # noqa: E731
    w, x = normal(64, 64), normal(8, 64, seed=1)
    run, params, _ = lora(f, {"w": w}, x, weight_qtype="int8", act_qtype="int8")
    ptq = fewbit.quantize_model(f, fewbit.PtqProvider(fewbit.lora.base_rules(run.provider.rules)))
    a, b = params["w_lora_a"], params["w_lora_b"]
    base = ptq(fewbit.lora.without_adapters(params), x)
    close(run(params, x), base + SCALE * (x @ a) @ b, LORA_F32)
    merged = float_base(params["w"]) + SCALE * np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    got = jax.grad(lambda x: run(params, x).sum())(x)
    close(got, np.ones((8, 64)) @ merged.T, LORA_F32)


def table_model(params, ids):
    """One table, looked up in and multiplied with."""
    return params["table"][ids] @ params["table"].T


@pytest.mark.parametrize("rule", [{}, {"weight_qtype": "int8"}], ids=["float", "int8"])
def test_a_tied_table_has_its_adapter_in_both_places(rule):
    table, ids = normal(12, 8), jnp.array([[0, 3], [11, 3]])
    run, params, plan = lora(table_model, {"table": table}, ids, **rule)
    assert [a.a_shape for a in plan.adapters] == [(8, RANK)]
    a, b = (np.asarray(params[f"table_lora_{end}"], np.float64) for end in "ab")
    merged = float_base(params["table"]) + SCALE * (a @ b).T
    close(run(params, ids), merged[np.asarray(ids)] @ merged.T, LORA_F32)

    def loss(a, b, table):
        delta = jnp.asarray(SCALE, a.dtype) * (a @ b).T
        return table_model({"table": table + delta}, ids).sum()

    got = jax.grad(
        lambda a, b: run({**params, "table_lora_a": a, "table_lora_b": b}, ids).sum(), (0, 1)
    )(params["table_lora_a"], params["table_lora_b"])
    with jax.enable_x64(True):
        base = jnp.asarray(float_base(params["table"]))
        wanted = jax.grad(loss, (0, 1))(jnp.asarray(a), jnp.asarray(b), base)
        wanted = tuple(map(np.asarray, wanted))
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs, LORA_F32)


def test_a_table_of_its_own_is_named_in_the_rule():
    f = lambda params, ids: jnp.take(params["table"], ids, axis=1)  # noqa: E731
    table, ids = normal(8, 12), jnp.array([[0, 3], [11, 3]])
    run, params, plan = lora(f, {"table": table}, ids, op_names=("take",))
    assert (plan.adapters[0].a_shape, plan.adapters[0].b_shape) == ((12, RANK), (RANK, 8))
    a, b = (np.asarray(params[f"table_lora_{end}"], np.float64) for end in "ab")
    merged = np.asarray(table, np.float64) + SCALE * (a @ b).T
    close(run(params, ids), merged[:, np.asarray(ids)], LORA_F32)


def test_two_uses_of_one_weight_in_two_directions():
    f = lambda params, x: jnp.tanh(x @ params["w"]) @ params["w"].T  # noqa: E731
    w, x = normal(6, 8), normal(4, 6, seed=1)
    run, params, plan = lora(f, {"w": w}, x)
    a, b = (np.asarray(params[f"w_lora_{end}"], np.float64) for end in "ab")
    merged = np.asarray(w, np.float64) + SCALE * a @ b
    x64 = np.asarray(x, np.float64)
    close(run(params, x), np.tanh(x64 @ merged) @ merged.T, LORA_F32)
    assert len(plan.adapters) == 1 and [row.site.weight for row in plan.sites] == ["w", "w"]


def stacked(params, x):
    def layer(x, w):
        return jnp.tanh(jnp.einsum("bi,io->bo", x, w)), None

    return jax.lax.scan(layer, x, params["w"])[0]


@pytest.mark.parametrize("rule", [{}, {"weight_qtype": "int8"}], ids=["float", "int8"])
def test_stacked_layers_have_an_adapter_each(rule):
    w, x = normal(3, 8, 8), normal(2, 8, seed=1)
    run, params, plan = lora(stacked, {"w": w}, x, **rule)
    assert plan.adapters[0].shapes == {"w_lora_a": (3, 8, RANK), "w_lora_b": (3, RANK, 8)}
    a, b = params["w_lora_a"], params["w_lora_b"]
    assert not np.allclose(a[0], a[1])
    base = jnp.asarray(float_base(params["w"], np.float32))

    def merged(a, b):
        return base + jnp.float32(SCALE) * jnp.einsum("lkr,lrn->lkn", a, b)

    close(run(params, x), stacked({"w": merged(a, b)}, x), LORA_F32)
    got = jax.grad(lambda a, b: run({**params, "w_lora_a": a, "w_lora_b": b}, x).sum(), (0, 1))(
        a, b
    )
    wanted = jax.grad(lambda a, b: stacked({"w": merged(a, b)}, x).sum(), (0, 1))(a, b)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs, 10 * LORA_F32)


def test_scan_in_scan_remat_and_a_weight_shared_by_all_layers():
    def model(params, x):
        @jax.checkpoint
        def inner(x, w):
            return jnp.tanh(x @ w + x @ params["shared"]), None

        def outer(x, ws):
            return jax.lax.scan(inner, x, ws)

        return jax.lax.scan(outer, x, params["w"])[0]

    params = {"w": normal(2, 3, 4, 4), "shared": normal(4, 4, seed=3)}
    x = normal(2, 4, seed=1)
    run, params, plan = lora(model, params, x)
    shapes = {name: shape for plan in plan.adapters for name, shape in plan.shapes.items()}
    assert shapes["w_lora_a"] == (2, 3, 4, RANK) and shapes["shared_lora_a"] == (4, RANK)

    def merged(p):
        w = p["w"] + jnp.float32(SCALE) * jnp.einsum(
            "lmkr,lmrn->lmkn", p["w_lora_a"], p["w_lora_b"]
        )
        shared = p["shared"] + jnp.float32(SCALE) * p["shared_lora_a"] @ p["shared_lora_b"]
        return model({"w": w, "shared": shared}, x)

    close(run(params, x), merged(params), 10 * LORA_F32)
    got, wanted = (
        jax.grad(lambda p, f=f: f(p).sum())(params) for f in (lambda p: run(p, x), merged)
    )
    for name in got:
        close(got[name], wanted[name], 100 * LORA_F32)


def test_while_and_cond():
    def model(params, x):
        def more(carry):
            return carry[0] < 2

        def step(carry):
            i, x = carry
            return i + 1, jnp.tanh(x @ params["w"])

        x = jax.lax.while_loop(more, step, (0, x))[1]
        return jax.lax.cond(x.sum() > 0, lambda x: x @ params["v"], lambda x: x, x)

    params, x = {"w": normal(4, 4), "v": normal(4, 4, seed=2)}, normal(2, 4, seed=1)
    run, params, _ = lora(model, params, x)
    merged = {
        k: params[k] + jnp.float32(SCALE) * params[f"{k}_lora_a"] @ params[f"{k}_lora_b"]
        for k in "wv"
    }
    close(run(params, x), model(merged, x), LORA_F32)


def test_vmap_and_per_example_gradients():
    f = lambda params, x: x @ params["w"]  # noqa: E731
    run, params, _ = lora(f, {"w": normal(6, 8)}, normal(1, 6), weight_qtype="int8")
    xs = normal(5, 1, 6, seed=1)
    trained, frozen = fewbit.lora.split(params)

    def loss(trained, x):
        return (run(fewbit.merge_trainable(trained, frozen), x) ** 2).sum()

    each = jax.vmap(jax.grad(loss), (None, 0))(trained, xs)
    one = jax.grad(loss)(trained, xs[2])
    close(each["w_lora_a"][2], one["w_lora_a"], LORA_F32)


def test_the_rank_is_the_scale():
    f = lambda params, x: x @ params["w"]  # noqa: E731
    run, params, plan = lora(f, {"w": normal(6, 8)}, normal(4, 6))
    assert plan.adapters[0].scale == ALPHA / RANK
    assert plan.adapters[0].bytes == 4 * RANK * (6 + 8)
