"""Static activation scales: stored beside the weights, planned, and used instead of measuring.

The oracle is numpy: codes from the given scale, clipped, an integer product with the weight's codes
(which other tests hold), then scales, all in float64. Statistics are made by hand.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, relative_error

import fewbit
from fewbit import PtqProvider, QuantizationRule, WithAux
from fewbit.calibration._statistics import SimpleMovingAverage
from fewbit.planning._companions import QuantizedParams
from fewbit.qarray._ranges import scale_type

STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
MINMAX = STATIC.replace(act_calibration_method="minmax")
X = normal(0, 4, 6)
W = normal(1, 6, 5)
REACHES = (0.5, 1.0, 2.0)  # of three layers


def statistic(*calibrations):
    average = SimpleMovingAverage()
    calibrations = [{k: jnp.asarray(v, jnp.float32) for k, v in c.items()} for c in calibrations]
    stat = average.init(calibrations[0])
    for calibration in calibrations:
        stat = average.update(stat, calibration)
    return stat


def absmax(value, *shape):
    return statistic({"absmax": jnp.full(shape or (1, 1), value)})


def stacked(*values, rank=2):
    """What a scan leaves: one statistic per layer, along the leading axis."""
    parts = [absmax(value, *(1,) * rank) for value in values]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def scale_of(reach):
    return np.float32(reach) * (1 / np.float32(127.5))


def codes(x, scale, zero=0.0):
    ratio = np.asarray(x, np.float32) / np.asarray(scale, np.float32) + np.float32(zero)
    return np.clip(np.rint(ratio), -128, 127).astype(np.float64) - zero


def weight_codes(w, channel):
    q = fewbit.quantize(w, "int8", channelwise_axes=(channel % w.ndim,))
    return np.asarray(q.qvalue, np.float64), np.asarray(q.scale, np.float64)


def reference(x, w, reach):
    """x @ w with a static scale for x (int8, symmetric around `reach`) and int8 columns of w."""
    scale = scale_of(reach)
    weight, columns = weight_codes(w, -1)
    return (codes(x, scale) @ weight) * np.float64(scale) * columns


def close(found, expected):
    return relative_error(found, expected) < 2e-6


def function(params, x):
    return x @ params["w"]


def quantized_function(rules=(STATIC,), reach=1.5, stats=None, f=function, params=None, x=X):
    params = {"w": W} if params is None else params
    made = fewbit.plan(f, rules, params, x)
    stats = {"w:dot_general0": {"lhs": absmax(reach)}} if stats is None else stats
    qf = fewbit.quantize_model(f, PtqProvider(rules))
    return qf, fewbit.quantize_params(params, made, stats), made


# --- the product ----------------------------------------------------------------------------------


def test_a_function_uses_the_stored_scale_and_clips():
    qf, qp, made = quantized_function()
    assert float(jnp.abs(X).max()) > 1.5  # so that clipping is seen
    assert close(qf(qp, X), reference(X, W, 1.5))
    assert isinstance(qp, QuantizedParams)
    scale = qp.act_scales["w:dot_general0"]["lhs_scale"]
    assert isinstance(scale, WithAux) and scale.how.rule == STATIC
    assert float(scale.array[0, 0]) == pytest.approx(1.5 / 127.5)
    (entry,) = made.scales
    assert (entry.name, entry.site, entry.shape) == ("w/dot_general0_lhs", "w:dot_general0", (1, 1))
    assert made.sites[0].runs_on.startswith("xla int8 dot")
    # Another batch size is served by the same scale.
    assert close(qf(qp, X[:1]), reference(X[:1], W, 1.5))


@pytest.mark.parametrize("rule", [STATIC, MINMAX, STATIC.replace(act_qtype="nf4")])
def test_a_nan_comes_out_of_its_row_and_no_other(rule):
    seen = statistic({"min": [[-0.5]], "max": [[2.0]]}) if rule is MINMAX else absmax(1.5)
    qf, qp, _ = quantized_function([rule], stats={"w:dot_general0": {"lhs": seen}})
    for tree in (qp, fewbit.unpack(qp)):
        out = qf(tree, X.at[2, 3].set(jnp.nan))
        assert jnp.isnan(out).all(1).tolist() == [False, False, True, False]
        assert close(np.delete(out, 2, 0), np.delete(qf(tree, X), 2, 0))
        assert not jnp.isnan(qf(tree, X.at[2, 3].set(jnp.inf))).any()  # clips


def test_range_seen_or_average():
    both = statistic({"absmax": [[1.0]]}, {"absmax": [[3.0]]})
    for reduction, reach in ((None, 3.0), ("range", 3.0), ("mean", 2.0)):
        rules = [STATIC.replace(act_static_reduction=reduction)]
        qf, qp, _ = quantized_function(rules, stats={"w:dot_general0": {"lhs": both}})
        assert close(qf(qp, X), reference(X, W, reach))


def test_asymmetric_scales_have_a_zero_point():
    seen = statistic({"min": [[-0.5]], "max": [[2.0]]})
    qf, qp, _ = quantized_function([MINMAX], stats={"w:dot_general0": {"lhs": seen}})
    entries = qp.act_scales["w:dot_general0"]
    assert entries["lhs_zero_point"].array.dtype == jnp.int8
    scale, zero = np.float32(2.5 / 255), np.rint(-128 + 0.5 / (2.5 / 255))
    assert float(entries["lhs_zero_point"].array[0, 0]) == zero
    weight, columns = weight_codes(W, -1)
    expected = codes(X, scale, zero) @ weight * np.float64(scale) * columns
    assert close(qf(qp, X), expected)


def test_products_of_two_activations_have_two_scales():
    def f(params, x):
        return jnp.einsum("bi,ci->bc", x @ params["w"], jnp.tanh(x[:, :5]))

    params = {"w": W}
    made = fewbit.plan(f, [STATIC], params, X)
    names = [s.name for s in made.scales]
    assert names == ["w/dot_general0_lhs", "einsum0_lhs", "einsum0_rhs"]
    stats = {"w:dot_general0": {"lhs": absmax(3.0)}}
    stats[":einsum0"] = {"lhs": absmax(8.0), "rhs": absmax(1.0)}
    qp = fewbit.quantize_params(params, made, stats)
    out = fewbit.quantize_model(f, PtqProvider([STATIC]))(qp, X)
    left, right = reference(X, W, 3.0), np.tanh(np.asarray(X[:, :5], np.float64))
    left, right = codes(left, scale_of(8)), codes(right, scale_of(1))
    expected = left @ right.T * np.float64(scale_of(8)) * scale_of(1)
    assert close(out, expected) and out.shape == (4, 4)


def test_what_is_made_of_parameters_alone_needs_no_scale():
    def f(params, x):
        return x @ (params["w"] * 2.0)

    made = fewbit.plan(f, [STATIC], {"w": W}, X)
    assert [s.name for s in made.scales] == ["dot_general0_lhs"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "nf4"])
def test_every_type_runs_close_to_its_dynamic_range(dtype, qtype):
    x, params = X.astype(dtype), {"w": W.astype(dtype)}
    rule = STATIC.replace(act_qtype=qtype)
    reach = float(jnp.abs(x.astype(jnp.float32)).max())
    qf, qp, made = quantized_function([rule], reach, params=params, x=x)
    assert made.scales[0].dtype == dtype
    assert qp.act_scales["w:dot_general0"]["lhs_scale"].dtype == scale_type(dtype)
    out = qf(qp, x)
    error = {"int8": 0.02, "int4": 0.25, "float8_e4m3fn": 0.08, "nf4": 0.25}[qtype]
    assert out.dtype == dtype and relative_error(out, x @ params["w"]) < error


def test_tiled_formats_and_uneven_tiles():
    x, w = normal(3, 4, 64), normal(4, 64, 8)
    for rule, n in (
        (STATIC.replace(weight_qtype="mxfp8", act_qtype="mxfp8"), 2),
        (STATIC.replace(weight_qtype="nvfp4", act_qtype="nvfp4"), 4),
        (STATIC.replace(tile_size=24), 3),
    ):
        stats = {"w:dot_general0": {"lhs": absmax(float(jnp.abs(x).max()), 1, n)}}
        qf, qp, made = quantized_function([rule], stats=stats, params={"w": w}, x=x)
        assert made.scales[0].shape == (1, n)
        assert relative_error(qf(qp, x), x @ w) < (0.2 if rule.act_qtype == "nvfp4" else 0.06)


def test_a_convolution():
    x, kernel = normal(5, 2, 8, 8, 3), normal(6, 3, 3, 3, 4)

    def f(params, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, params["k"], (1, 1), "SAME", dimension_numbers=numbers
        )

    stats = {"k:conv_general_dilated0": {"lhs": absmax(4.0, 1, 1, 1, 1)}}
    qf, qp, _ = quantized_function(stats=stats, f=f, params={"k": kernel}, x=x)
    weight, columns = weight_codes(kernel, -1)
    rounded = [jnp.asarray(c, jnp.float32) for c in (codes(x, scale_of(4)), weight)]
    expected = f({"k": rounded[1]}, rounded[0]) * np.asarray(scale_of(4) * columns, np.float32)
    assert close(qf(qp, x), expected)


# --- saved and planned ----------------------------------------------------------------------------


def test_pickle_and_tree_operations_keep_scales():
    qf, qp, _ = quantized_function()
    again = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, qp)))
    assert jax.tree.structure(again) == jax.tree.structure(qp)
    assert bool((qf(again, X) == qf(qp, X)).all())
    bare = QuantizedParams(
        qp.params, {"w:dot_general0": {"lhs_scale": jnp.full((1, 1), 1.5 / 127.5)}}
    )
    assert close(qf(bare, X), qf(qp, X))  # a scale made by hand
    template = jax.eval_shape(lambda: qp)
    stats = {"w:dot_general0": {"lhs": absmax(1.5)}}
    assert close(qf(fewbit.quantize_params({"w": W}, template, stats), X), qf(qp, X))


def test_a_plan_with_scales_goes_to_json_and_back():
    _, qp, made = quantized_function([MINMAX, STATIC.replace(module_path="none")][:1], stats={
        "w:dot_general0": {"lhs": statistic({"min": [[-1.0]], "max": [[1.0]]})}
    })  # fmt: skip
    read = fewbit.Plan.from_json(made.to_json())
    assert read == made and read.scales == made.scales and read.scales[0].rule == MINMAX
    assert not made.diff(read)
    dynamic = fewbit.plan(function, [MINMAX.replace(act_static_scale=None)], {"w": W}, X)
    assert "w/dot_general0_lhs  shape: (1, 1) → not in the plan" in str(made.diff(dynamic))
    # A plan that was written before there were scales.
    older = dynamic.to_json().replace(',\n "scales": []', "")
    assert "scales" not in older.split('"unmatched_rules"')[1]
    assert fewbit.Plan.from_json(older) == dynamic


def test_statistics_may_be_abstract():
    _, _, made = quantized_function()
    stats = jax.eval_shape(lambda: {"w:dot_general0": {"lhs": absmax(1.0)}})
    params = {"w": jax.ShapeDtypeStruct((6, 5), "float32")}
    qp = fewbit.quantize_params(params, made, stats)
    assert qp.act_scales["w:dot_general0"]["lhs_scale"].array == jax.ShapeDtypeStruct(
        (1, 1), "float32"
    )


def test_stacked_statistics_average_each_layer():
    parts = [absmax(1.0), statistic({"absmax": [[1.0]]}, {"absmax": [[5.0]]})]
    stat = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    mean = SimpleMovingAverage().get_calibration(stat)["absmax"]
    assert mean[:, 0, 0].tolist() == [1.0, 3.0]
    default = {"absmax": jnp.full((2, 1, 1), 9.0)}
    early = SimpleMovingAverage(bootstrap_steps=1).get_calibration(stat, default)["absmax"]
    assert early[:, 0, 0].tolist() == [9.0, 3.0]


def test_ragged_products():
    x, w = normal(10, 6, 8), normal(11, 2, 8, 5)
    sizes = jnp.array([2, 4], jnp.int32)

    def f(params, x, sizes):
        return jax.lax.ragged_dot(x, params["w"], sizes)

    made = fewbit.plan(f, [STATIC], {"w": w}, x, sizes)
    assert [(s.name, s.shape) for s in made.scales] == [("w/ragged_dot0_lhs", (1, 1))]
    qp = fewbit.quantize_params({"w": w}, made, {"w:ragged_dot0": {"lhs": absmax(1.5)}})
    qf = fewbit.quantize_model(f, PtqProvider([STATIC]))
    expected = np.concatenate([reference(x[:2], w[0], 1.5), reference(x[2:], w[1], 1.5)])
    assert close(qf(qp, x, sizes), expected)
    gradient = jax.grad(lambda x: qf(qp, x, sizes).sum())(x)
    assert jnp.isfinite(gradient).all()
