"""Delayed scaling of plain functions: the update, what it survives, what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import delayed as oracle

import fewbit
from fewbit.training import accumulate, overwrite_with_gradient, split_histories
from fewbit.training._delayed import delayed_range, quantize_delayed, seen

LENGTH = 5
ALL = dict(
    weight_calibration_method=f"delayed,{LENGTH}",
    act_calibration_method=f"delayed,{LENGTH}",
    bwd_calibration_method=f"delayed,{LENGTH}",
)
FP8 = fewbit.QtRule(
    weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2", **ALL
)


def two_layers(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def data(seed=0, batch=32):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "a": jax.random.normal(keys[0], (8, 16)) / 4,
        "b": jax.random.normal(keys[1], (16, 4)) / 4,
    }
    return params, jax.random.normal(keys[2], (batch, 8)), jax.random.normal(keys[3], (batch, 4))


def model(rule=FP8, function=two_layers, **options):
    return fewbit.quantize_model(function, fewbit.QtProvider([rule], **options))


def loss_of(f):
    def loss(state, x, y):
        out = f(state["params"], x, amax_history=state["histories"])
        return jnp.mean(jnp.square(out - y))

    return loss


@functools.cache
def stepping():
    f = model()
    return f, jax.jit(jax.value_and_grad(loss_of(f)))


def plain(histories):
    """Histories as the oracle names them."""
    return {
        site: {side.removesuffix("_amax_history"): np.asarray(v) for side, v in entries.items()}
        for site, entries in histories.items()
    }


def test_thirty_steps_are_those_of_the_written_out_update():
    f, step = stepping()
    params, x, y = data()
    histories = f.init_amax_history(params, x)
    own = {k: np.asarray(v, np.float64) for k, v in params.items()}
    remembered = oracle.empty(LENGTH)
    for number in range(30):
        batch = x * (1 + 0.5 * np.sin(number)).astype(np.float32)  # ranges grow and shrink again
        loss, grads = step({"params": params, "histories": histories}, batch, y)
        expected, own_grads, remembered = oracle.step(own, remembered, batch, y)
        np.testing.assert_allclose(loss, expected, rtol=1e-3)
        for k in "ab":
            error = np.linalg.norm(grads["params"][k] - own_grads[k])
            assert error < 0.01 * np.linalg.norm(own_grads[k]), (number, k)
        histories = grads["histories"]
        for site, sides in plain(histories).items():
            for side, history in sides.items():
                wanted = remembered[site][side]
                np.testing.assert_allclose(history, wanted, rtol=5e-3, err_msg=f"{site} {side}")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads["params"])
        own = {k: v - 0.1 * own_grads[k] for k, v in own.items()}
    assert expected < 0.9  # it has learnt something


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=7),
    st.floats(0, 1e6, width=32),
)
def test_a_history_moves_by_one_and_its_range_is_its_largest(values, now):
    history = jnp.array(values, jnp.float32)
    assert delayed_range(history)[0] == max(values)
    later = jax.grad(lambda h: seen(0.0, delayed_range(h), jnp.float32(now)))(history)
    assert later.tolist() == [now, *values[:-1]]


@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "int8"])
def test_an_empty_history_measures_and_a_full_one_clips(qtype):
    x, how = jnp.array([[0.5, -2.0], [4.0, 1.0]]), fewbit.HowToQuantize(qtype=qtype)
    first, amax = quantize_delayed(x, delayed_range(jnp.zeros((3,))), how)
    measured = fewbit.quantize(x, qtype)
    assert amax == 4 and (first.qvalue == measured.qvalue).all()
    assert (first.scale == measured.scale).all()
    later, amax = quantize_delayed(x, delayed_range(jnp.array([0.0, 1.0, 0.5])), how)
    assert amax == 4
    assert later.scale.shape == (1, 1) and later.scale[0, 0] == first.scale[0, 0] / 4
    assert fewbit.dequantize(later).max() <= 1.01


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_step_that_is_not_finite_is_seen_and_not_remembered(bad):
    f, step = stepping()
    params, x, y = data()
    histories = step({"params": params, "histories": f.init_amax_history(params, x)}, x, y)[1][
        "histories"
    ]
    state = {"params": params, "histories": histories}
    loss, grads = step(state, x.at[0, 0].set(bad), y)
    assert not jnp.isfinite(loss)
    for leaf in jax.tree.leaves(grads["histories"]):
        assert jnp.isfinite(leaf).all()
    after = grads["histories"]["a:dot_general0"]["lhs_amax_history"]
    before = histories["a:dot_general0"]["lhs_amax_history"]
    assert after.tolist() == [0, *before[:-1].tolist()]


def test_microbatches_merged_by_max_are_the_history_of_the_whole_batch():
    f, _ = stepping()
    params, x, y = data(batch=64)

    def loss(state, x, y):  # a share of the whole batch's mean, as microbatches have it
        out = f(state["params"], x, amax_history=state["histories"])
        return jnp.sum(jnp.square(out - y)) / 256

    @jax.jit
    def accumulated(state, x, y):
        def one(total, batch):
            return accumulate(total, jax.grad(loss)(state, *batch)), None

        parts = x.reshape(4, 16, 8), y.reshape(4, 16, 4)
        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state), parts)[0]

    whole = jax.jit(jax.grad(loss))
    state = {"params": params, "histories": f.init_amax_history(params, x)}
    state["histories"] = whole(state, x / 2, y)["histories"]  # not the first step
    wanted, found = whole(state, x, y), accumulated(state, x, y)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        found["histories"],
        wanted["histories"],
    )
    lhs = [found["histories"]["a:dot_general0"]["lhs_amax_history"][k] for k in (0, 1)]
    assert lhs[0] == jnp.abs(x).max() and lhs[1] == lhs[0] / 2
    for k in "ab":
        np.testing.assert_allclose(found["params"][k], wanted["params"][k], rtol=1e-4, atol=1e-6)
    mean = accumulate({"w": jnp.ones(2)}, {"w": jnp.full(2, 8.0)}, weight=1 / 4)
    assert mean["w"].tolist() == [3, 3]


def test_clipping_and_the_optimizer_never_touch_a_history():
    f, step = stepping()
    params, x, y = data()
    state = {"params": params, "histories": f.init_amax_history(params, x)}
    inner = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.5, momentum=0.9))
    tx = overwrite_with_gradient(inner)
    opt, plain_opt = tx.init(state), inner.init(params)
    assert len(jax.tree.leaves(opt)) == len(jax.tree.leaves(plain_opt))

    @jax.jit
    def apply(state, opt, grads):
        updates, opt = tx.update(grads, opt, state)
        return optax.apply_updates(state, updates), opt

    for _ in range(3):
        _, grads = step(state, x, y)
        expected, plain_opt = inner.update(grads["params"], plain_opt, params)
        params = optax.apply_updates(params, expected)
        state, opt = apply(state, opt, grads)
        for found, wanted in zip(
            jax.tree.leaves(state["histories"]), jax.tree.leaves(grads["histories"]), strict=True
        ):
            assert (found == wanted).all()
        jax.tree.map(np.testing.assert_array_equal, state["params"], params)
    rest, histories = split_histories(state)
    assert len(jax.tree.leaves(rest)) == 2 and len(jax.tree.leaves(histories)) == 6


def test_what_did_not_run_remembers_what_it_knew():
    def either(params, x, second):
        return jax.lax.cond(second, lambda: x @ params["a"], lambda: x @ params["b"])

    rule = FP8.replace(weight_calibration_method="absmax")
    f = model(rule, either)
    params = {"a": jnp.eye(4), "b": 2 * jnp.eye(4)}
    x = jnp.full((2, 4), 3.0)
    histories = f.init_amax_history(params, x, True)
    known = jax.tree.map(lambda h: h + jnp.float32(0.5), histories)

    @jax.jit
    def step(histories, second):
        return jax.grad(lambda h: f(params, x, second, amax_history=h).sum())(histories)

    found = step(known, jnp.array(True))
    names = {side for side in found["a:dot_general0"]}
    assert names == {"lhs_amax_history", "grad_amax_history"}
    assert found["a:dot_general0"]["lhs_amax_history"].tolist() == [3, 0.5, 0.5, 0.5, 0.5]
    assert found["b:dot_general0"]["lhs_amax_history"].tolist() == [0.5] * LENGTH
    assert found["b:dot_general0"]["grad_amax_history"].tolist() == [0.5] * LENGTH


def test_a_gradient_beside_channelwise_weights_covers_every_channel():
    """Only the gradient is delayed: it takes up scales of channels, and none may clip it."""
    rule = fewbit.QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_calibration_method="delayed,4"
    )
    f = model(rule)
    params, x, y = data()
    params["b"] = params["b"] * jnp.logspace(-1, 1, 4)[None]
    state = {"params": params, "histories": f.init_amax_history(params, x)}
    float_grads = jax.grad(lambda p: jnp.mean(jnp.square(two_layers(p, x) - y)))(params)
    step = jax.jit(jax.grad(loss_of(f)))
    for _ in range(2):
        grads = step(state, x, y)
        state["histories"] = grads["histories"]
        for k in "ab":
            error = np.linalg.norm(grads["params"][k] - float_grads[k])
            assert error < 0.1 * np.linalg.norm(float_grads[k]), k


@pytest.mark.parametrize("emulate", [False, pytest.param(True, marks=pytest.mark.long)])
def test_serving_is_the_training_forward_with_the_last_histories(emulate):
    # Emulated, gradients are float.
    rule = dataclasses.replace(FP8, bwd_qtype=None, bwd_calibration_method="absmax")
    f = model(rule if emulate else FP8, emulate=emulate)
    params, x, y = data()
    histories = f.init_amax_history(params, x)
    state = {"params": params, "histories": histories}
    histories = jax.jit(jax.grad(loss_of(f)))(state, x, y)["histories"]
    served = fewbit.to_ptq(f, params, None, x, amax_history=histories)
    for batch in (x, 3 * x):  # the second clips
        expected = f(params, batch, amax_history=histories)
        if emulate:
            np.testing.assert_allclose(served.model(served.params, batch), expected, rtol=1e-4)
        else:
            assert (served.model(served.params, batch) == expected).all()


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (fewbit.QuantizationRule, dict(weight_calibration_method="delayed"), "QtRule(..., weight_"),
        (fewbit.QuantizationRule, dict(act_calibration_method="delayed,8"), "to_ptq"),
        (fewbit.QtRule, dict(act_calibration_method="delayed,0"), "at least 1"),
        (fewbit.QtRule, dict(act_calibration_method="delayed,1,2"), "2 numbers after the name"),
        (fewbit.QtRule, dict(bwd_calibration_method="delay"), "'delayed,<history length>'"),
        (fewbit.QtRule, dict(weight_calibration_method="delayed", tile_size=4), "per tile"),
        (
            fewbit.QtRule,
            dict(
                bwd_qtype="int8", bwd_calibration_method="delayed", bwd_weight_grad_tile_size=1 / 4
            ),
            "Leave bwd_weight_grad_tile_size out",
        ),
        (
            fewbit.QtRule,
            dict(act_calibration_method="delayed", act_static_scale=True),
            "Leave act_static_scale out",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused_when_they_are_made(kind, fields, words):
    with pytest.raises(ValueError) as error:
        kind(weight_qtype="int8", act_qtype="int8", **fields)
    assert words in str(error.value)


def test_formats_in_tiles_and_signs_have_no_delayed_scale():
    with pytest.raises(ValueError, match="'delayed' gives one range for the whole array"):
        fewbit.QtRule(weight_qtype="mxfp8", weight_calibration_method="delayed")
    with pytest.raises(ValueError, match="mean magnitude"):
        fewbit.QtRule(weight_qtype="int1", weight_calibration_method="delayed")


def test_only_a_model_that_trains_takes_such_rules():
    with pytest.raises(ValueError, match="PtqProvider does not train"):
        fewbit.PtqProvider([FP8])
    with pytest.raises(ValueError, match="an array alone has none"):
        fewbit.quantize(jnp.ones((2, 2)), "int8", calibration_method="delayed")
    with pytest.raises(ValueError, match="only training under a QtProvider remembers"):
        fewbit.DotGeneralQtConfig(lhs_qtype="int8", lhs_calibration_method="delayed")
    with pytest.raises(ValueError, match="only training under a QtProvider remembers"):
        fewbit.DotGeneralQtConfig(dlhs_grad_qtype="int8", dlhs_grad_calibration_method="delayed")


def test_histories_that_are_missing_or_of_another_length_are_named():
    f, _ = stepping()
    params, x, _ = data()
    with pytest.raises(ValueError) as error:
        f(params, x)
    assert "no history 'a/dot_general0_lhs_amax_history' for a:dot_general0" in str(error.value)
    assert "(and 5 more are missing)" in str(error.value)
    assert "f.init_amax_history(params, x)" in str(error.value)
    long = model(FP8.replace(act_calibration_method="delayed,9"))
    with pytest.raises(ValueError, match=r"has shape \(5,\), but a:dot_general0 needs \(9,\)"):
        long(params, x, amax_history=f.init_amax_history(params, x))
    with pytest.raises(ValueError, match="to_ptq got no histories"):
        fewbit.to_ptq(f, params, None, x)
    with pytest.raises(ValueError, match="is empty: no step has reached this activation"):
        fewbit.to_ptq(f, params, None, x, amax_history=f.init_amax_history(params, x))
    with pytest.raises(ValueError, match="has no amax histories"):
        model(fewbit.QtRule(weight_qtype="int8")).init_amax_history(params, x)
    with pytest.raises(TypeError, match="takes an optax optimizer"):
        overwrite_with_gradient(lambda grads: grads)
    with pytest.raises(ValueError, match="two trees of gradients of one form"):
        accumulate({"a": jnp.ones(())}, {"b": jnp.ones(())})


def test_a_product_in_a_loop_over_time_is_refused_with_its_name():
    def recurrent(params, x):
        def tick(h, row):
            return jnp.tanh(row @ params["w"] + h @ params["u"]), None

        return jax.lax.scan(tick, jnp.zeros((2, 4)), x)[0]

    params, x = {"w": jnp.eye(4), "u": jnp.eye(4)}, jnp.ones((6, 2, 4))
    with pytest.raises(fewbit.PlanError) as error:
        fewbit.plan(recurrent, fewbit.QtProvider([FP8]), params, x)
    assert "w:dot_general0 runs 6 times in a step" in str(error.value)
    weights = FP8.replace(act_calibration_method="absmax", bwd_calibration_method="absmax")
    f = model(weights, recurrent)  # a weight is rounded once, however often it is used
    histories = f.init_amax_history(params, x)
    assert {tuple(v) for v in histories.values()} == {("rhs_amax_history",)}


def test_a_product_whose_derivative_is_its_authors_is_refused():
    @jax.custom_vjp
    def own(x, w):
        return x @ w

    own.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    with pytest.raises(fewbit.PlanError, match="inside a custom_vjp, whose own derivative"):
        fewbit.plan(
            lambda p, x: own(x, p["w"]), fewbit.QtProvider([FP8]), {"w": jnp.eye(4)}, jnp.eye(4)
        )


def test_a_product_inside_shard_map_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def sharded(params, x):
        both = (rows, jax.sharding.PartitionSpec())
        body = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=both, out_specs=rows)
        return body(x, params["w"])

    with pytest.raises(fewbit.PlanError, match="stands inside a shard_map"):
        fewbit.plan(sharded, fewbit.QtProvider([FP8]), {"w": jnp.eye(4)}, jnp.ones((8, 4)))


def test_the_plan_says_what_is_delayed():
    params, x, _ = data()
    plan = fewbit.plan(two_layers, fewbit.QtProvider([FP8]), params, x)
    assert [site.act_mode for site in plan.sites] == ["delayed", "delayed"]
    assert "float8_e4m3fn x float8_e4m3fn delayed" in plan.table(width=200)
