"""What is said when static scales, statistics, rules and inputs do not fit together."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import normal, says
from test_static_models import KEY, MLP_STATS, Mlp, linen_mlp
from test_static_scales import STATIC, W, X, absmax, quantized_function, statistic

import fewbit
from fewbit import PtqProvider, QuantizationRule
from fewbit.planning._companions import QuantizedParams


def test_a_site_without_its_scale():
    qf, qp, made = quantized_function()
    for params in (qp.params, QuantizedParams(qp.params)):
        for call in (qf, jax.jit(qf), lambda p, x: jax.eval_shape(qf, p, x)):
            with says(
                ValueError,
                "w:dot_general0 has act_static_scale=True, but there is no "
                "'w/dot_general0_lhs_scale' for it.",
                "quantize_params(params, plan, quant_stats)",
                "act_static_scale=None in QuantizationRule(",
            ):
                call(params, X)
    weights = fewbit.quantize_params({"w": W}, made, allow_missing_params=True)
    assert not isinstance(weights, QuantizedParams)
    other = QuantizedParams(qp.params, {"w:dot_general1": qp.act_scales["w:dot_general0"]})
    with says(ValueError, "There is 'w/dot_general1_lhs_scale', which no Site here has."):
        qf(other, X)
    wrong = QuantizedParams(qp.params, {"w:dot_general0": {"scale": jnp.ones((1, 1))}})
    with says(ValueError, "has the entry 'scale'", "'lhs_scale': array"):
        qf(wrong, X)


def test_a_scale_for_other_inputs():
    x = normal(3, 2, 4, 6)
    stats = {"w:dot_general0": {"lhs": absmax(1.5, 1, 4, 1)}}
    qf, qp, made = quantized_function(stats=stats, x=x)
    assert made.scales[0].shape == (1, 4, 1)
    with says(
        ValueError,
        "'w/dot_general0_lhs_scale' has shape (1, 4, 1), but w:dot_general0 needs (1, 7, 1) for "
        "its lhs float32[2,7,6].",
        "write act_batch_axes=(0, 1) in the rule",
    ):
        qf(qp, normal(3, 2, 7, 6))
    rules = [STATIC.replace(act_batch_axes=(0, 1))]  # the cure
    qf, qp, _ = quantized_function(
        rules, x=x, stats={"w:dot_general0": {"lhs": absmax(1.5, 1, 1, 1)}}
    )
    assert qf(qp, normal(3, 2, 7, 6)).shape == (2, 7, 5)
    with says(ValueError, "has shape (1, 9, 1), but the scale needs (1, 4, 1)", "act_batch_axes"):
        fewbit.quantize_params({"w": W}, made, {"w:dot_general0": {"lhs": absmax(1.5, 1, 9, 1)}})


def test_scales_that_dynamic_rules_would_not_use():
    _, qp, _ = quantized_function()
    rules = [STATIC.replace(act_static_scale=None)]
    with says(ValueError, "'w/dot_general0_lhs_scale' is a static scale", "strict=False"):
        fewbit.quantize_model(lambda p, x: x @ p["w"], PtqProvider(rules))(qp, X)
    lenient = fewbit.quantize_model(lambda p, x: x @ p["w"], PtqProvider(rules, strict=False))
    assert lenient(qp, X).shape == (4, 5)


def test_static_scales_without_statistics():
    _, _, made = quantized_function()
    message = "A static activation scale that the rules ask for has no range: "
    cure = "stats = fewbit.calibrate(model, rules, params, batches)", "allow_missing_params=True"
    with says(ValueError, message + "w/dot_general0_lhs.", *cure):
        fewbit.quantize_params({"w": W}, made)
    _, params, template = linen_mlp()
    for target in (template, fewbit.plan(Mlp(), [STATIC], X)):
        with says(ValueError, "2 static activation scales that the rules ask for have no range:"):
            fewbit.quantize_params(params, target)
        fewbit.quantize_params(params, target, allow_missing_params=True)
    with says(ValueError, "A static", "has no range: down/dot_general0_lhs."):
        fewbit.quantize_params({"down": params["down"]}, template)
    model = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    q = fewbit.quantize_model(model, PtqProvider([STATIC]), X)
    with says(ValueError, "has no range: dot_general0_lhs."):
        fewbit.quantize_params(nnx.to_pure_dict(nnx.state(model)), q)
    # Where there are no numbers yet there is nothing to be wrong.
    abstract = jax.eval_shape(lambda: {"w": W})
    assert fewbit.quantize_params(abstract, made)["w"].shape == W.shape
    assert jax.eval_shape(lambda p: fewbit.quantize_params(p, made), {"w": W})


def test_statistics_that_do_not_fit_the_plan():
    _, _, made = quantized_function()
    params = {"w": W}

    def use(stat, **kwargs):
        return fewbit.quantize_params(params, made, {"w:dot_general0": {"lhs": stat}}, **kwargs)

    with says(ValueError, "w/dot_general0_lhs has values in", "no range can have"):
        use(absmax(-1.0))
    empty = {**absmax(1.0), "count": jnp.array(0)}
    with says(ValueError, "quant_stats is not initialized for w/dot_general0_lhs.", "count is 0"):
        use(empty)
    with says(
        ValueError, "has max_of_max, min_of_min, sum_of_max, sum_of_min", "needs sum_of_absmax"
    ):
        use(statistic({"min": [[-1.0]], "max": [[1.0]]}))
    bare = {"count": jnp.array(1), "sum_of_absmax": jnp.ones((1, 1))}
    rules = [STATIC.replace(act_static_reduction="mean")]
    with says(ValueError, "no 'max_of_absmax'", f"='mean' in the rule: {rules[0]!r}."):
        use(bare)
    assert quantized_function(rules, stats={"w:dot_general0": {"lhs": bare}})[1].act_scales
    with says(ValueError, "holds 1 value that is NaN"):
        use(absmax(jnp.nan))
    with says(ValueError, "is {'<site id>': {'lhs': statistic}}", "'w:dot_general0'"):
        fewbit.quantize_params(params, made, {"w": {"dot_general0_lhs": absmax(1.0)}})
    with says(ValueError, "nothing for 1 of the plan's static scales: w/dot_general0_lhs"):
        fewbit.quantize_params(params, made, {})
    partly = fewbit.quantize_params(params, made, {}, allow_missing_params=True)
    assert partly.act_scales == {}


def test_statistics_of_nothing_but_zeros():
    """As training collects them from batches that are empty of signal."""
    told = pytest.warns(UserWarning, match="lhs saw nothing but zeros, which is no range")
    _, _, made = quantized_function()
    with told:
        fewbit.quantize_params({"w": W}, made, {"w:dot_general0": {"lhs": absmax(0.0)}})
    rule = fewbit.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    model = nnx.Linear(*W.shape, rngs=nnx.Rngs(0))
    trained = fewbit.quantize_model(model, fewbit.QtProvider([rule]), X)
    trained(0 * X)
    with told:
        fewbit.to_ptq(trained)
    trained(X)
    fewbit.to_ptq(trained)

    def layers(p, x):
        return jax.lax.scan(lambda h, w: (0 * h, h @ w), x, p["w"])[1]

    stack = {"w": jnp.stack([W, W])}
    made = fewbit.plan(layers, [STATIC], stack, X)
    with pytest.warns(UserWarning, match="All values seen at .* are zero"):
        stats = fewbit.calibrate(layers, made, stack, [X], strict=False)
    with told:  # the second layer alone
        fewbit.quantize_params(stack, made, stats)


def test_statistics_of_unknown_sites():
    _, params, template = linen_mlp()
    made = fewbit.plan(Mlp(), [STATIC], X)
    stats = {**MLP_STATS, "upp": MLP_STATS["up"]}
    for target, where in ((template, "the template"), (made, "the plan")):
        with says(
            ValueError,
            f"quant_stats has 'upp/dot_general0_lhs', and {where} has no static scale",
            "The nearest are up/dot_general0_lhs",
        ):
            fewbit.quantize_params(params, target, stats)
        q = fewbit.quantize_params(params, target, stats, allow_extra_params=True)
        assert "upp" not in q
    with says(ValueError, "quant_stats holds float at 'up'"):
        fewbit.quantize_params(params, template, {"up": 1.0})


def test_methods_share_a_scale_by_name():
    class Two(nn.Module):
        def setup(self):
            self.up = nn.Dense(5)

        def __call__(self, x):
            return self.up(x)

        def other(self, x):
            return self.up(jnp.concatenate([x, x], -2))

    rule, x = STATIC, normal(0, 2, 4, 6)
    methods = ("__call__", "other")
    with says(fewbit.PlanError, "up/dot_general0_lhs is the static scale of", "act_batch_axes"):
        fewbit.plan(Two(), [rule], x, methods=methods)
    made = fewbit.plan(Two(), [rule.replace(act_batch_axes=(0, 1))], x, methods=methods)
    assert len(made.scales) == 1


def test_a_call_in_which_nothing_is_quantized():
    rules = [QuantizationRule(module_path="upp", weight_qtype="int8")]
    sentences = (
        "Nothing in this call is quantized",
        "matches no Site of the model.",
        "The nearest module paths are",
        "fewbit.plan(model, rules, ...)",
        "strict=False",
    )
    params = Mlp().init(KEY, X)["params"]
    with says(ValueError, *sentences, "'up'", "module_path='upp'"):
        fewbit.quantize_model(Mlp(), PtqProvider(rules)).apply({"params": params}, X)
    f = lambda params, x: x @ params["up"]  # noqa: E731
    with says(ValueError, *sentences):
        fewbit.quantize_model(f, PtqProvider(rules))({"up": W}, X)
    only = [QuantizationRule(weight_qtype="int8")]
    with says(ValueError, "Nothing in this call", "product of two activations"):
        fewbit.quantize_model(lambda p, x: x @ x.T, PtqProvider(only))({}, X)
    for provider in (
        PtqProvider(rules, strict=False),
        PtqProvider([]),
        PtqProvider([QuantizationRule(module_path=".*")]),
    ):
        out = fewbit.quantize_model(f, provider)({"up": W}, X)
        assert bool((out == X @ W).all())
