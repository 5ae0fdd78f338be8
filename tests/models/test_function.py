"""Plain functions: each spelling of a product is a Site, the quantized function is ordinary JAX."""

import itertools
import pickle
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from flax.core import FrozenDict
from helpers import W8, W8A8, dot_types, normal, quantized, relative_error
from jax import lax

import fewbit
from fewbit import PtqProvider, QArray, QuantizationRule, WithAux, dequantize

W = {"w": normal(0, 16, 16)}
X = normal(1, 16, 16)  # the same shape as the weight: nothing may guess by shape

SPELLINGS = {
    "matmul operator": lambda p, x: x @ p["w"],
    "jnp.matmul": lambda p, x: jnp.matmul(x, p["w"]),
    "jnp.dot": lambda p, x: jnp.dot(x, p["w"]),
    "tensordot": lambda p, x: jnp.tensordot(x, p["w"], axes=1),
    "lax.dot_general": lambda p, x: lax.dot_general(x, p["w"], (((1,), (0,)), ((), ()))),
    "einsum": lambda p, x: jnp.einsum("bi,io->bo", x, p["w"]),
    "weight on the left": lambda p, x: jnp.einsum("io,bi->bo", p["w"], x),
    "weight on the left, matmul": lambda p, x: p["w"] @ x,
    "transposed": lambda p, x: x @ p["w"].T,
    "reshaped": lambda p, x: jnp.einsum("bi,iho->bho", x, p["w"].reshape(16, 4, 4)),
    "reshaped contraction": lambda p, x: jnp.einsum(
        "bhi,hio->bo", x.reshape(16, 4, 4), p["w"].reshape(4, 4, 16)
    ),
    "sliced": lambda p, x: x @ p["w"][:, :8] + x @ p["w"][:, 8:],
    "split": lambda p, x: jnp.concatenate([x @ part for part in jnp.split(p["w"], 4, axis=1)], 1),
    "vmapped": lambda p, x: jax.vmap(lambda row: row @ p["w"])(x),
    "jitted helper": lambda p, x: jax.jit(lambda w, x: x @ w)(p["w"], x),
    "constrained": lambda p, x: x @ lax.optimization_barrier(p["w"]),
    "copied": lambda p, x: x @ jnp.copy(p["w"]),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("rules", [W8A8, W8], ids=["w8a8", "w8"])
def test_every_spelling_is_a_site(name, rules):
    f = SPELLINGS[name]
    qf, qp, plan = quantized(f, rules, W, X)
    assert all(row.quantized and row.site.weight == "w" for row in plan.sites) and plan.sites
    assert isinstance(qp["w"].array, QArray) and qp["w"].array.qtype == jnp.int8
    assert 0 < relative_error(qf(qp, X), f(W, X)) < 0.03
    if rules is W8A8:
        assert set(dot_types(qf, qp, X)) == {"i8xi8"}
        assert all(row.runs_on == "xla int8 dot" for row in plan.sites) and not plan.notes


def test_bfloat16_cast_keeps_the_weight_quantized():
    f = lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)  # noqa: E731
    qf, qp, _ = quantized(f, W8A8, W, X)
    out = qf(qp, X)
    assert out.dtype == jnp.bfloat16 and qp["w"].array.scale.dtype == jnp.float32
    assert dot_types(qf, qp, X) == ["i8xi8"]
    assert relative_error(out, f(W, X)) < 0.03


def test_the_integer_product_is_exact():
    """The value is the float64 product of the quantized numbers, to float32 rounding."""
    qf, qp, _ = quantized(SPELLINGS["einsum"], W8A8, W, X)
    q = fewbit.quantize(X, "int8", channelwise_axes=(0,))
    exact = np.asarray(dequantize(q), np.float64) @ np.asarray(
        dequantize(qp["w"].array), np.float64
    )
    np.testing.assert_allclose(
        np.asarray(qf(qp, X), np.float64), exact, rtol=0, atol=2e-6 * np.abs(exact).max()
    )


# The first member has no Site, the second uses a weight as it is and transposed: strict refuses.
LENIENT = {
    "opaque_kernels": "A rule matches nothing",
    "scan_of_remat_of_cond": "stored differently",
}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo_runs_quantized(name):
    function, params, args = zoo.member(name)
    if name in LENIENT:
        with pytest.warns(UserWarning, match=LENIENT[name]):
            qf, qp, plan = quantized(function, W8A8, params, *args, strict=False)
    else:
        qf, qp, plan = quantized(function, W8A8, params, *args)
    floats = lambda tree: [  # noqa: E731
        dequantize(v.array) if isinstance(v, WithAux) else v
        for v in jax.tree.leaves(tree, is_leaf=lambda v: isinstance(v, WithAux))
    ]
    assert relative_error(floats(qf(qp, *args)), floats(function(params, *args))) < 0.05
    left = [row.reason for row in plan.sites if not row.quantized]
    expected = {"grad_inside": ["backward of a"], "look_up": ["table of its own"]}.get(name, [])
    assert len(left) == len(expected) and all(e in r for e, r in zip(expected, left, strict=True))


def test_tied_table_serves_look_up_and_logits():
    params = {"table": normal(0, 50, 16)}
    f = lambda p, ids: jnp.take(p["table"], ids, axis=0) @ p["table"].T  # noqa: E731
    ids = jnp.array([1, 49, 3], jnp.int32)
    qf, qp, plan = quantized(f, W8A8, params, ids)
    assert [row.site.op for row in plan.sites] == ["take", "dot_general"]
    assert qp["table"].array.scale.shape == (50, 1)
    assert relative_error(qf(qp, ids), f(params, ids)) < 0.03


def test_out_of_range_look_up_is_nan_as_in_float():
    params = {"table": normal(0, 5, 4)}
    rules = [QuantizationRule(weight_qtype="int8", op_names=("take",))]
    f = lambda p, ids: jnp.take(p["table"], ids, axis=0)  # noqa: E731
    ids = jnp.array([0, 7], jnp.int32)
    qf, qp, _ = quantized(f, rules, params, ids)
    out = qf(qp, ids)
    assert not jnp.isnan(out[0]).any() and jnp.isnan(out[1]).all()


def test_scan_stacked_scales_keep_the_layer_axis():
    qf, qp, _ = quantized(zoo.scan_stacked, W8A8, zoo.W, zoo.X)
    assert qp["stack"].array.scale.shape == (3, 1, 8)
    layer = fewbit.quantize(zoo.W["stack"][1], "int8", channelwise_axes=(1,))
    np.testing.assert_array_equal(qp["stack"].array.qvalue[1], layer.qvalue)


def test_jit_grad_vmap_and_their_nesting():
    f = lambda p, x: jnp.sin(x @ p["w"]).sum(-1)  # noqa: E731
    qf, qp, _ = quantized(f, W8A8, W, X)
    assert relative_error(jax.jit(qf)(qp, X), qf(qp, X)) < 1e-6
    stacked = jnp.stack([X, X + 1, X * 2])
    mapped = jax.vmap(qf, in_axes=(None, 0))(qp, stacked)
    np.testing.assert_allclose(
        mapped, jnp.stack([qf(qp, x) for x in stacked]), rtol=1e-4, atol=1e-5
    )
    gradient = jax.grad(lambda x: qf(qp, x).sum())(X)
    assert relative_error(gradient, jax.grad(lambda x: f(W, x).sum())(X)) < 0.05
    per_row = jax.jit(jax.vmap(jax.grad(lambda x: qf(qp, x[None])[0])))(X)
    np.testing.assert_allclose(per_row, gradient, rtol=1e-3, atol=1e-4)
    _, tangent = jax.jvp(lambda x: qf(qp, x), (X,), (jnp.ones_like(X),))
    assert jnp.isfinite(tangent).all()


def test_straight_through_gradient_is_the_float_product_with_the_dequantized_weight():
    qf, qp, _ = quantized(SPELLINGS["einsum"], W8A8, W, X)
    cotangent = normal(3, 16, 16)
    gradient = jax.vjp(lambda x: qf(qp, x), X)[1](cotangent)[0]
    np.testing.assert_allclose(
        gradient, cotangent @ dequantize(qp["w"].array).T, rtol=1e-5, atol=1e-5
    )


def test_vmap_over_stacked_quantized_parameters():
    models = [{"w": normal(i, 16, 16)} for i in range(3)]
    qf, _, plan = quantized(SPELLINGS["einsum"], W8A8, models[0], X)
    each = [fewbit.quantize_params(m, plan) for m in models]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *each)
    out = jax.vmap(qf, in_axes=(0, None))(stacked, X)
    np.testing.assert_allclose(out, jnp.stack([qf(p, X) for p in each]), rtol=1e-5, atol=1e-5)


def test_donated_arguments():
    f = lambda p, x: x @ p["w"]  # noqa: E731
    qf, qp, _ = quantized(f, W8A8, W, X)
    expected = np.asarray(qf(qp, X))
    donated = jnp.array(X)
    out = jax.jit(qf, donate_argnums=1)(qp, donated)
    np.testing.assert_array_equal(np.asarray(out), expected)
    assert donated.is_deleted()


def test_preferred_element_type_and_precision_are_honoured():
    def f(p, x):
        return jnp.matmul(
            x.astype(jnp.bfloat16),
            p["w"].astype(jnp.bfloat16),
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )

    for rules in (W8A8, W8):
        qf, qp, _ = quantized(f, rules, W, X)
        assert qf(qp, X).dtype == jnp.float32
    assert "HIGHEST" in str(jax.make_jaxpr(qf)(qp, X))


def test_python_arguments_stay_python():
    def f(p, x, scale=1.0, train=False, name="up"):
        return (x @ p["w"]) * scale if train and name == "up" else x @ p["w"]

    qf, qp, _ = quantized(f, W8A8, W, X)
    base = qf(qp, X)
    np.testing.assert_allclose(qf(qp, X, scale=2.0, train=True), 2 * base, rtol=1e-6)
    np.testing.assert_allclose(qf(qp, X, 2.0, train=True, name="down"), base, rtol=1e-6)


def test_python_results_stay_python():
    def f(p, x):
        return {"y": x @ p["w"], "name": "up", "loss": 0.0, "flag": True, "nothing": None}

    qf, qp, _ = quantized(f, W8A8, W, X)
    for call in (qf, qf):
        out = call(qp, X)
        assert out.pop("y").shape == (X @ W["w"]).shape
        assert out == {"name": "up", "loss": 0.0, "flag": True, "nothing": None}
        assert type(out["loss"]) is float and out["flag"] is True
    assert jax.grad(lambda x: qf(qp, x)["y"].sum() + qf(qp, x)["loss"])(X).shape == X.shape


def test_two_models_and_float_code_do_not_touch_each_other():
    """One process, one jitted helper, three ways to run it; JAX's caches stay clean both ways."""

    @jax.jit
    def helper(w, x):
        return x @ w

    f = lambda p, x: helper(p["w"], x)  # noqa: E731
    before = np.asarray(helper(W["w"], X))
    q8, p8, _ = quantized(f, W8A8, W, X)
    rules4 = [QuantizationRule(weight_qtype="int4")]
    q4, p4, _ = quantized(f, rules4, W, X)
    first8, first4 = np.asarray(q8(p8, X)), np.asarray(q4(p4, X))
    np.testing.assert_array_equal(np.asarray(helper(W["w"], X)), before)
    np.testing.assert_array_equal(np.asarray(X @ W["w"]), before)
    jax.clear_caches()
    np.testing.assert_array_equal(np.asarray(q4(p4, X)), first4)
    np.testing.assert_array_equal(np.asarray(q8(p8, X)), first8)
    assert not np.array_equal(first8, before) and not np.array_equal(first4, first8)


def test_a_second_call_traces_nothing():
    traces = []

    def f(p, x):
        traces.append(1)
        return x @ p["w"]

    qf, qp, _ = quantized(f, W8A8, W, X)
    qf(qp, X)
    count = len(traces)
    qf(qp, X + 1)
    assert len(traces) == count


def test_weights_that_change_or_are_constants_are_left_alone_and_the_plan_says_why():
    constant = normal(5, 16, 16)
    f = lambda p, x: x @ (0.5 * p["w"]) + x @ constant  # noqa: E731
    with pytest.warns(UserWarning, match="Nothing of the model would be quantized. At :dot_gen"):
        plan = fewbit.plan(f, W8, W, X, strict=False)
    reasons = [row.reason for row in plan.sites]
    assert reasons == [
        "weight w is changed by mul before the product",
        "weight is a constant of the function; pass it as a parameter",
    ]
    assert plan.leaf("w").how is None


@jax.jit
def pruned(w, at_least):
    return jnp.where(jnp.abs(w) > at_least, w, 0.0)


def in_shards(f, w):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(w)


CHANGES = {
    "where": (lambda w: jnp.where(w > 0.1, w, 0.0), "select_n"),
    "select": (lambda w: jax.lax.select(w > 0, w, jnp.zeros_like(w)), "select_n"),
    "helper": (lambda w: pruned(w, 0.1), "select_n"),
    "clip": (lambda w: jnp.clip(w, -1, 1), "max"),
    "noise": (lambda w: w + jax.random.normal(jax.random.key(0), w.shape), "add"),
    "ramp": (lambda w: w * jnp.arange(16, dtype="float32")[None], "mul"),
    "loop": (lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w * 0.9 + w.T, w), "scan"),
    "while": (lambda w: jax.lax.while_loop(lambda w: w.sum() > 9, lambda w: w * 0.9, w), "while"),
    "two carried": (
        lambda w: jax.lax.fori_loop(0, 2, lambda i, c: (c[1] * 2, c[0]), (w, w.T))[0],
        "scan",
    ),
    "layer by layer": (
        lambda w: jax.lax.map(lambda row: jnp.where(row > 0, row, 0.0), w),
        "select_n",
    ),
    "branch": (lambda w: jax.lax.cond(w[0, 0] > 0, jnp.tanh, lambda w: w, w), "cond"),
    "in shards": (lambda w: in_shards(lambda w: w * 2, w), "mul"),
    "only in shards": (lambda w: in_shards(lambda w: w, w), "shard_map"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_a_helper_changes_are_no_activations(name):
    change, primitive = CHANGES[name]
    f = lambda p, x: x @ change(p["w"]) + x @ p["w"]  # noqa: E731
    plan = fewbit.plan(f, W8, W, X)
    assert plan.sites[0].reason == f"weight w is changed by {primitive} before the product"
    static = [W8A8[0].replace(act_static_scale=True)]
    assert len(fewbit.plan(f, static, W, X).scales) == 2  # of x alone, at both products
    g = lambda p, x: x @ jnp.where(x[:1].T > 0, p["w"], 0.0)  # noqa: E731
    with pytest.raises(ValueError, match="product of two activations"):
        fewbit.plan(g, W8, W, X)


CHOICES = {  # of x, and weights that are mixed with it
    "where": lambda w, x: jnp.where(x.sum() > 0, w, 0.0),
    "scaled": lambda w, x: w * x.mean(),
    "loop": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, w: w + x.mean(), w),
    "branch": lambda w, x: jax.lax.cond(w[0, 0] > 0, lambda: w, lambda: x),
    "later": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: (c[0] + c[1], x), (w, w))[0],
}


@pytest.mark.parametrize("name", CHOICES)
def test_weights_that_are_mixed_with_data_are_activations(name):
    mix = CHOICES[name]
    f = lambda p, x: x @ mix(p["w"], x) + x @ p["w"]  # noqa: E731
    assert fewbit.plan(f, W8, W, X).sites[0].reason.startswith("product of two activations")
    qf, qp, _ = quantized(f, W8A8, W, X)
    assert relative_error(qf(qp, X), f(W, X)) < 0.05


def test_a_parameter_that_masks_a_weight_is_not_called_the_weight():
    params = {"mask": jnp.ones((16, 16), bool), "w": W["w"], "v": W["w"]}
    f = lambda p, x: x @ jnp.where(p["mask"], p["w"], 0.0) + x @ p["v"]  # noqa: E731
    reason = fewbit.plan(f, W8, params, X).sites[0].reason
    assert reason == "weight w is changed by select_n before the product"


def test_packed_parameters_run_and_are_smaller():
    rules = [QuantizationRule(weight_qtype="int3", tile_size=8)]
    qf, qp, _ = quantized(SPELLINGS["einsum"], rules, W, X)
    packed = fewbit.pack(qp)
    assert packed["w"].array.layout != "plain" and packed["w"].array.nbytes < qp["w"].array.nbytes
    np.testing.assert_array_equal(np.asarray(qf(packed, X)), np.asarray(qf(qp, X)))
    np.testing.assert_array_equal(fewbit.unpack(packed)["w"].array.qvalue, qp["w"].array.qvalue)


FORMATS = {
    "int8": (None, 0.02),
    "int4": (8, 0.2),
    "int7": (None, 0.03),
    "int5": (None, 0.1),
    "int3": (8, 0.4),
    "int2": (8, 0.8),
    "int1": (8, 1.5),
    "fp8": (None, 0.06),
    "float8_e5m2": (None, 0.12),
    "float8_e4m3fnuz": (None, 0.06),
    "float8_e5m2fnuz": (None, 0.12),
    "nf4": (8, 0.15),
    "mxfp8": (32, 0.06),
    "mxfp4": (32, 0.3),
    "nvfp4": (16, 0.25),
}


@pytest.mark.parametrize("act", [None, "same"])
@pytest.mark.parametrize("qtype", FORMATS)
def test_every_format_runs_in_a_model(qtype, act):
    tile, bound = FORMATS[qtype]
    params, x = {"w": normal(0, 64, 32)}, normal(1, 8, 64)
    rules = [QuantizationRule(weight_qtype=qtype, act_qtype=qtype if act else None, tile_size=tile)]
    f = lambda p, x: x @ p["w"]  # noqa: E731
    qf, qp, plan = quantized(f, rules, params, x)
    error = jnp.linalg.norm(qf(qp, x) - f(params, x)) / jnp.linalg.norm(f(params, x))
    assert error < bound * (1.7 if act else 1)
    assert plan.sites[0].quantized


@pytest.mark.parametrize("tile", [1, 7, 32, 1.0, 1 / 4, {0: 16, 1: 8}], ids=str)
def test_tiles_of_every_kind(tile):
    params, x = {"w": normal(0, 64, 32)}, normal(1, 8, 64)
    if isinstance(tile, dict):
        q = fewbit.quantize(params["w"], "int8", tiled_axes=tile)
        assert q.scale.shape == (4, 4)
        assert relative_error(fewbit.dot(x, q), x @ params["w"]) < 0.03
        return
    rules = [QuantizationRule(weight_qtype="int8", tile_size=tile)]
    qf, qp, _ = quantized(lambda p, x: x @ p["w"], rules, params, x)
    tiles = {"1": 64, "7": 10, "32": 2, "1.0": 1, "0.25": 4}  # as text, because 1 == 1.0
    assert qp["w"].array.scale.shape == (tiles[str(tile)], 32)
    assert relative_error(qf(qp, x), x @ params["w"]) < 0.03


MODULE = """
import jax.numpy as jnp
def model(params, x):
    return jnp.tanh(x @ params["w"])
"""


def test_pickle_to_a_new_process(tmp_path):
    (tmp_path / "saved_model.py").write_text(MODULE)
    sys.path.insert(0, str(tmp_path))
    try:
        from saved_model import model

        qf, qp, _ = quantized(model, W8A8, W, X)
        blob = pickle.dumps((qf, qp, X, np.asarray(qf(qp, X))))
    finally:
        sys.path.remove(str(tmp_path))
    (tmp_path / "model.pkl").write_bytes(blob)
    code = (
        "import pickle, numpy as np;"
        "qf, qp, x, y = pickle.load(open('model.pkl', 'rb'));"
        "np.testing.assert_array_equal(np.asarray(qf(qp, x)), y); print('same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "same"


def test_provider_subclass_is_called_with_its_rule():
    seen = []

    class Mine(PtqProvider):
        def dot_general(self, lhs, rhs, dimension_numbers, *args, **kwargs):
            seen.append((self._get_current_rule_and_op_id("dot_general"), type(rhs).__name__))
            assert fewbit.get_current_rule("dot_general") == seen[-1][0][0]
            return 2 * super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)

    f = SPELLINGS["matmul operator"]
    provider = Mine(W8A8)
    plan = fewbit.plan(f, provider, W, X)
    qp = fewbit.quantize_params(W, plan)
    out = fewbit.quantize_model(f, provider)(qp, X)
    assert seen[-1] == ((W8A8[0], "dot_general0"), "QArray")
    assert plan.sites[0].runs_on == "Mine.dot_general (int8 dot)"
    assert relative_error(out, 2 * (X @ W["w"])) < 0.03


def test_kernels_ask_for_their_rule_by_name():
    asked = []

    def kernel(x, w):
        asked.append(fewbit.get_current_rule("gmm"))
        return x @ w

    rules = [QuantizationRule(weight_qtype="int8", op_names=("dot_general", "gmm"))]
    qf, qp, _ = quantized(lambda p, x: kernel(x, p["w"]), rules, W, X)
    qf(qp, X)
    assert asked and all(rule == rules[0] for rule in asked)
    assert fewbit.get_current_rule("gmm") is None


def test_numpy_parameters_are_accepted():
    params = {"w": np.asarray(W["w"])}
    qf, qp, _ = quantized(SPELLINGS["einsum"], W8A8, params, np.asarray(X))
    assert isinstance(qp["w"].array.qvalue, jax.Array)
    assert relative_error(qf(qp, np.asarray(X)), X @ W["w"]) < 0.03


def test_abstract_parameters_are_enough():
    params = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    qf, qp, plan = quantized(SPELLINGS["einsum"], W8A8, params, x)
    assert plan.totals.quantized_sites == 1
    assert qp["w"].array.qvalue == jax.ShapeDtypeStruct((16, 16), jnp.int8)
    assert jax.eval_shape(qf, qp, x).shape == (4, 16)


def test_quantized_leaves_are_leaf_by_leaf():
    """A subtree with the plan of the whole gives the same leaf."""
    params = {"a": {"w": normal(0, 8, 8)}, "b": {"w": normal(1, 8, 8)}}
    f = lambda p, x: x @ p["a"]["w"] @ p["b"]["w"]  # noqa: E731
    template = quantized(f, W8, params, normal(2, 4, 8))[1]
    part = fewbit.quantize_params({"b": params["b"]}, template)
    np.testing.assert_array_equal(part["b"]["w"].array.qvalue, template["b"]["w"].array.qvalue)


def test_empty_batches_and_empty_contractions():
    f = lambda p, x: x @ p["w"]  # noqa: E731
    qf, qp, _ = quantized(f, W8A8, W, X)
    assert qf(qp, X[:0]).shape == (0, 16)
    empty = {"w": jnp.zeros((0, 16))}
    qf, qp, _ = quantized(f, W8A8, empty, X[:, :0])
    np.testing.assert_array_equal(qf(qp, X[:, :0]), np.zeros((16, 16)))


@pytest.mark.parametrize("rules", [W8A8, W8], ids=["w8a8", "w8"])
def test_export_with_a_symbolic_batch(rules):
    qf, qp, _ = quantized(SPELLINGS["matmul operator"], rules, W, X)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16"), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: qf(qp, x)))(shape)
    for rows in (1, 5):
        np.testing.assert_allclose(exported.call(X[:rows]), qf(qp, X[:rows]), rtol=1e-5, atol=1e-5)


def test_extra_parameters_are_left_out_of_any_tree():
    class Pair(NamedTuple):
        w: jax.Array
        extra: jax.Array | None = None

    def f(params, x):
        return x @ params["a"]["w"] @ params["list"][0] @ params["pair"].w

    def tree(*extra, mapping=dict):
        w = normal(0, 16, 16)
        a = mapping({"w": w} | {f"e{k}": value for k, value in enumerate(extra)})
        rest = {"lost": {"deep": {"er": extra[0]}}} if extra else {}
        return mapping({"a": a, "list": [w, *extra], "pair": Pair(w, *extra), "none": {}, **rest})

    plan = fewbit.plan(f, W8, tree(), X)
    template = jax.eval_shape(lambda p: fewbit.quantize_params(p, plan), tree())
    for target, mapping in itertools.product((plan, template), (dict, FrozenDict, OrderedDict)):
        given = tree(normal(9, 3, 3), mapping=mapping)
        before = jax.tree.structure(given)
        found = fewbit.quantize_params(given, target, allow_extra_params=True)
        assert jax.tree.structure(given) == before
        assert type(found) is type(given) and type(found["a"]) is mapping
        assert set(found) == {"a", "list", "pair", "none"} and list(found["a"]) == ["w"]
        assert found["list"][1] is None and found["pair"].extra is None
        assert len(jax.tree.leaves(found, is_leaf=lambda v: isinstance(v, WithAux))) == 3
    nothing = {"lost": normal(9, 3, 3)}
    assert fewbit.quantize_params(nothing, template, allow_extra_params=True) == {}


FLAT = {  # where the parts of the stored axis that are summed over are its minor ones
    "out by in": lambda p, x: x @ p["w"].reshape(16, 16).T,
    "stacked": lambda p, x: jnp.einsum("bi,eio->beo", x, p["s"].reshape(4, 16, 16)),
    "rows of a table": lambda p, x: x @ p["w"].reshape(16, 16).T[:, :8],
}


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_weight_is_stored_where_its_scales_keep_their_number(name):
    f = FLAT[name]
    params = {"w": normal(0, 16 * 16), "s": normal(1, 4 * 16, 16)}
    qf, qp, plan = quantized(f, W8, params, X)
    (row,) = plan.sites
    stored = qp[row.site.weight].array
    assert stored.scale.size == (16 if name != "stacked" else 64)
    assert 0 < relative_error(qf(qp, X), f(params, X)) < 0.03
