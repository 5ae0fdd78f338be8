"""What calibration says when batches, rules, plans and models do not fit."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import W8, W8A8, normal, says
from test_static_models import KEY, Mlp, NnxMlp
from test_static_scales import STATIC, W, X

import fewbit

PARAMS = {"w": W}


def product(params, x):
    return x @ params["w"]


def calibrate(batches=(X,), rules=(STATIC,), f=product, params=None, **kwargs):
    return fewbit.calibrate(f, list(rules), PARAMS if params is None else params, batches, **kwargs)


@pytest.mark.parametrize("batches", [[], iter(()), (x for x in ())])
def test_no_batches(batches):
    with says(ValueError, "There are no batches to calibrate with", "[x1, x2]"):
        calibrate(batches)


def test_batches_that_are_none():
    with says(TypeError, "`batches` is one array of shape (4, 6)", "[batch]"):
        calibrate(X)
    with says(TypeError, "`batches` is a dict", "fewbit.Batch(*args, **kwargs)"):
        calibrate({"x": X})
    with says(TypeError, "`batches` is a int, not an iterable"):
        calibrate(3)
    with says(TypeError, "fewbit.calibrate(model, rules, params, batches)"):
        fewbit.calibrate(product, [STATIC], PARAMS)
    with says(TypeError, "takes rules or a Plan as its second argument, got a dict"):
        fewbit.calibrate(product, PARAMS, [STATIC], [X])
    with says(TypeError, "a list of rules: write [QuantizationRule("):
        fewbit.calibrate(product, STATIC, PARAMS, [X])


def test_nothing_to_calibrate():
    with says(
        ValueError,
        "There is nothing to calibrate: no operand of the model is one that the observer 'range'",
        "QuantizationRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)",
    ):
        calibrate(rules=W8A8)
    with says(ValueError, "nothing to calibrate", "weight-only rules need no calibration"):
        calibrate(rules=W8)
    with says(ValueError, "quantize_params(params, plan) needs no statistics"):
        calibrate(rules=[STATIC.replace(act_calibration_method="fixed,6")])


def test_batches_of_no_rows():
    none = jnp.zeros((0, 6))
    sentences = (
        "Batch 2 has no numbers at w:dot_general0 (lhs float32[0, 6]): the batch is "
        "(float32[0, 6]). Leave out batches of no rows",
        "Nothing of this batch was counted.",
    )
    with says(ValueError, *sentences):
        calibrate([X, none])
    with pytest.warns(UserWarning, match="Batch 1 has no numbers at w:dot_general0") as heard:
        stats = calibrate([none, X, X[:2]], strict=False)
    assert len(heard) == 1 and stats.batches == 2
    with pytest.warns(UserWarning, match="Batch 1 has no numbers(.|\\n)*No batch was counted"):
        calibrate([none], strict=False)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_values_that_are_not_finite(bad):
    spoilt = X.at[0, 0].set(bad)
    with says(
        ValueError,
        "Batch 3 has NaN or Inf at w:dot_general0 (lhs float32[4, 6])",
        "The batch itself holds them",
    ):
        calibrate([X, X, spoilt])
    f = lambda p, x: jnp.log(x) @ p["w"]  # noqa: E731
    with says(ValueError, "Batch 2 has NaN or Inf at w:dot_general0", "Its inputs are finite"):
        calibrate([jnp.abs(X) + 1, X], f=f)
    with pytest.warns(UserWarning, match="Batch 2 has NaN or Inf") as heard:
        stats = calibrate([X, spoilt, X], strict=False)
    assert len(heard) == 1 and stats.batches == 2
    assert np.isfinite(stats["w:dot_general0"]["lhs"]["max_of_absmax"]).all()
    in_branch = lambda p, x: jax.lax.cond(x[0, 0] > 9, lambda: x @ p["w"], lambda: x @ p["w"])  # noqa: E731
    with says(ValueError, "Batch 1 has NaN or Inf at w:dot_general"):
        calibrate([spoilt], f=in_branch)


def test_a_branch_that_no_batch_took():
    def f(params, x):
        return jax.lax.cond(x[0, 0] > 99, lambda: 2 * x @ params["w"], lambda: x @ params["w"])

    with says(
        ValueError,
        "1 of 2 observed operands saw no data in 1 batch: w:dot_general1 lhs.",
        "a branch (lax.cond, lax.switch) that no batch took",
        "act_static_scale=None",
        "strict=False",
    ):
        calibrate(f=f)
    with pytest.warns(UserWarning, match="w:dot_general1 lhs"):
        stats = calibrate(f=f, strict=False)
    assert list(stats) == ["w:dot_general0"]
    with says(ValueError, "quant_stats has nothing for 1 of the plan's static scales"):
        fewbit.quantize_params(PARAMS, fewbit.plan(f, [STATIC], PARAMS, X), stats)
    both = calibrate([X, X + 100], f=f)
    assert {int(both[k]["lhs"]["count"]) for k in both} == {1}


def test_layers_that_no_batch_reached():
    def f(params, x):
        def step(carry, w):
            i, x = carry
            return (i + 1, jax.lax.cond(i == 1, lambda: x, lambda: jnp.tanh(x @ w))), None

        return jax.lax.scan(step, (0, x), params["w"])[0][1]

    with says(ValueError, "w:dot_general0 lhs (layer 1)"):
        calibrate(f=f, params={"w": normal(1, 3, 6, 6)})


def test_ranges_of_nothing_but_zeros():
    with says(ValueError, "All values seen at w:dot_general0 lhs are zero", "real inputs"):
        calibrate([jnp.zeros((4, 6))])
    calibrate([jnp.zeros((4, 6)), X])


def test_batches_that_do_not_fit():
    with says(
        ValueError,
        "Batch 2 does not fit the model: TypeError: ",
        "The batch is (float32[4, 7])",
        "fewbit.Batch(*args, **kwargs)",
    ):
        calibrate([X, normal(0, 4, 7)])
    with says(ValueError, "Batch 1 does not fit the model: TypeError", "(float32[4, 6], 3)"):
        calibrate([(X, 3)])
    wide = [normal(i, 2, n, 6) for i, n in enumerate((3, 5))]
    with says(
        ValueError,
        "Batch 2: w:dot_general0 needs ranges of shape (1, 5, 1) for its lhs float32[2, 5, 6], but "
        "the plan has (1, 3, 1)",
        "write act_batch_axes=(0, 1) in the rule",
    ):
        calibrate(wide)
    assert calibrate(wide, [STATIC.replace(act_batch_axes=(0, 1))]).batches == 2


def test_a_plan_of_another_model():
    other = fewbit.plan(lambda p, x: x @ p["v"], [STATIC], {"v": W}, X)
    with says(
        ValueError, "w:dot_general0 has a static range, and the plan has no 'w/dot_general0_lhs'"
    ):
        fewbit.calibrate(product, other, PARAMS, [X])


def test_parameters_that_cannot_be_run():
    made = fewbit.plan(product, [STATIC], PARAMS, X)
    stored = fewbit.quantize_params(PARAMS, made, allow_missing_params=True)
    with says(ValueError, "runs the float model, but the parameter 'w' is stored quantized"):
        calibrate(params=stored)
    with says(ValueError, "needs real parameters and batches", "fewbit.plan"):
        calibrate(params={"w": jax.ShapeDtypeStruct((6, 5), "float32")})
    model = NnxMlp(nnx.Rngs(0))
    with says(ValueError, "NnxMlp is an NNX model, which holds its parameters itself"):
        fewbit.calibrate(model, [STATIC], nnx.state(model), [X])
    quantized = fewbit.quantize_model(model, fewbit.PtqProvider(W8), X)
    with says(ValueError, "is quantized already"):
        fewbit.calibrate(quantized, [STATIC], [X])
    with says(TypeError, "fewbit.calibrate(model, rules, params, batches)"):
        fewbit.calibrate(Mlp(), [STATIC], Mlp().init(KEY, X))


@pytest.mark.parametrize(
    ("method", "reduction", "found"),
    [
        ("percentile,50", None, "'absmax', without a histogram, and the plan asks for 'percentile"),
        ("mse", None, "'absmax', without a histogram"),
        ("percentile,50", "mean", "'absmax', and the plan asks for 'percentile,50'"),
        ("rms,7", None, "'absmax', and the plan asks for 'rms,7'"),
    ],
)
def test_statistics_of_another_method_make_no_scale(tmp_path, method, reduction, found):
    calibrate().save(tmp_path / "stats")
    stats = fewbit.Statistics.load(tmp_path / "stats")
    rule = STATIC.replace(act_calibration_method=method, act_static_reduction=reduction)
    made = fewbit.plan(product, [rule], PARAMS, X)
    with says(ValueError, f"of w/dot_general0_lhs were collected for {found}", "Calibrate with"):
        fewbit.quantize_params(PARAMS, made, stats)
    fewbit.quantize_params(PARAMS, made, calibrate(rules=[rule]))


def test_a_histogram_tells_the_whole_range_too():
    stats = calibrate(rules=[STATIC.replace(act_calibration_method="percentile,50")])
    made = fewbit.plan(product, [STATIC], PARAMS, X)
    found, wanted = (fewbit.quantize_params(PARAMS, made, s) for s in (stats, calibrate()))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_observers_that_are_none():
    with says(ValueError, "There is no observer 'hesian'.", "Did you mean 'hessian'?", "'range'"):
        calibrate(observers=("hesian",))
    with says(TypeError, "is no observer: it has no name, wants, init"):
        calibrate(observers=(3,))
    with says(ValueError, "Two observers are called 'range'"):
        calibrate(observers=("range", "range"))


def test_training_mode_or_not_nothing_is_printed(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate([X] * 3)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


def test_the_report_tells_the_batches_seen():
    stats = calibrate([X, 2 * X])
    made = fewbit.plan(product, [STATIC], PARAMS, X)
    qparams = fewbit.quantize_params(PARAMS, made, stats)
    report = fewbit.report(qparams, stats=stats)
    assert "static ranges of 1 operand come from 2 batches of calibration data" in report.notes
    assert "2 batches of calibration data" in " ".join(report.table(width=100).split())
    with says(TypeError, "takes the Statistics of fewbit.calibrate, got a dict"):
        fewbit.report(qparams, stats=stats.tree)
