"""Settings of training act, or are refused: none is dropped without a word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit
from fewbit import DotGeneralQtConfig, QtProvider, QtRule, einsum_qt

X = jax.random.normal(jax.random.key(0), (16, 32))
PARAMS = {"w": jax.random.normal(jax.random.key(1), (32, 8)) / 4}
INT8 = dict(weight_qtype="int8", act_qtype="int8")


def product(params, x):
    return x @ params["w"]


def trained(emulate=False, **fields):
    return fewbit.quantize_model(product, QtProvider([QtRule(**fields)], emulate=emulate))


def zeros(loss):
    return int((jax.grad(loss)(X) == 0).sum())


@pytest.mark.parametrize("method", ["rms,1", "fixed,-1,1", "percentile,90"])
def test_emulated_activations_are_clipped_like_real_ones(method):
    real, emulated, kept = (
        zeros(lambda x, m=m: m(PARAMS, x).sum())
        for m in (
            trained(act_calibration_method=method, **INT8),
            trained(True, act_calibration_method=method, **INT8),
            trained(
                True,
                act_calibration_method=method,
                additional_qt_config={"disable_gradient_clipping": True},
                **INT8,
            ),
        )
    )
    assert real == emulated > 0 == kept


@pytest.mark.parametrize("disable", [False, True])
def test_static_ranges_clip_unless_told_otherwise(disable):
    model = trained(
        act_static_scale=True,
        act_static_reduction="mean",
        additional_qt_config={"disable_gradient_clipping": disable},
        **INT8,
    )
    _, stats = model.collecting(PARAMS, {}, X * 0.3)
    found = zeros(lambda x: model.collecting(PARAMS, stats, x)[0].sum())
    assert (found == 0) == disable


@pytest.mark.parametrize("layout", ["bds,df->bf", "bb,bf->bf", "bd,dfs->bf", "bds,df->fb"])
def test_a_letter_of_one_operand_has_the_float_gradient(layout):
    sizes = dict(b=6, d=32, s=3, f=8)
    inputs = layout.split("->")[0].split(",")
    operands = [
        jax.random.normal(jax.random.key(k), [sizes[c] for c in letters])
        for k, letters in enumerate(inputs)
    ]

    exact = jax.grad(lambda a, b: jnp.einsum(layout, a, b).sum(), (0, 1))(*operands)
    for config, bound in (
        (DotGeneralQtConfig(lhs_qtype="int4", rhs_qtype="int4"), 1e-6),
        (
            DotGeneralQtConfig(
                lhs_qtype="int4",
                rhs_qtype="int4",
                dlhs_grad_qtype="int16",
                drhs_grad_qtype="int16",
                use_original_residuals=True,
            ),
            1e-4,
        ),
        (
            DotGeneralQtConfig(
                lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype="int8", drhs_grad_qtype="int8"
            ),
            2e-2,
        ),
    ):
        found = jax.grad(lambda a, b, c=config: einsum_qt(layout, a, b, c).sum(), (0, 1))(*operands)
        for g, e in zip(found, exact, strict=True):
            assert jnp.linalg.norm(g - e) <= bound * jnp.linalg.norm(e)
    # The value is that of rounded numbers.
    coarse = einsum_qt(layout, *operands, DotGeneralQtConfig(lhs_qtype="int4", rhs_qtype="int4"))
    assert 0.01 < float(jnp.abs(coarse - jnp.einsum(layout, *operands)).max())


@pytest.mark.parametrize(
    ("additional", "shown"),
    [({"lhs_qtype": None}, None), ({"lhs_qtype": "int4"}, "int4")],
)
def test_an_operand_with_a_type_of_its_own_serves_as_it_trained(additional, shown):
    model = trained(additional_qt_config=additional, **INT8)
    served = fewbit.to_ptq(model, PARAMS, None, X)
    np.testing.assert_array_equal(served.model(served.params, X), model(PARAMS, X))
    assert served.plan.sites[0].act_qtype == shown
    assert np.abs(model(PARAMS, X) - trained(**INT8)(PARAMS, X)).max() > 0


def test_two_activations_with_types_of_their_own():
    def attention(params, x):
        return jnp.einsum("bd,cd->bc", x, jnp.tanh(x @ params["w"]) @ params["w"].T)

    rule = QtRule(additional_qt_config={"lhs_qtype": None}, disable_channelwise_axes=True, **INT8)
    model = fewbit.quantize_model(attention, QtProvider([rule]))
    served = fewbit.to_ptq(model, PARAMS, None, X)
    np.testing.assert_array_equal(served.model(served.params, X), model(PARAMS, X))
    assert "float x int8" in [row.act_qtype for row in served.plan.sites]


def test_an_activation_only_type_serves_too():
    model = trained(weight_qtype="int8", additional_qt_config={"lhs_qtype": "int8"})
    served = fewbit.to_ptq(model, PARAMS, None, X)
    np.testing.assert_array_equal(served.model(served.params, X), model(PARAMS, X))
    assert served.plan.sites[0].act_qtype == "int8"


def test_statistics_of_a_broken_step_say_so():
    model = trained(bwd_qtype="int8", **INT8)
    weight = {"w": PARAMS["w"].at[0, 0].set(jnp.nan)}
    for params, x in ((weight, X), (PARAMS, X.at[0, 0].set(jnp.inf))):
        stats = dict(
            fewbit.debug.training_stats(model, params, x, loss=lambda out: jnp.mean(out**2))
        )
        assert np.isnan(stats["w:dot_general0/weight_grad_snr_db"])


def test_merging_can_be_differentiated():
    provider = fewbit.LoraProvider(rank=2, alpha=4.0, lora_b_initializer="ones")
    plan = fewbit.plan(product, provider, PARAMS, X)
    params = fewbit.lora.init(plan, PARAMS, jax.random.key(0))
    adapted = fewbit.apply_lora_to_model(product, provider)

    def merged(params):
        return product(fewbit.lora.merge_lora(params, plan)[0], X).sum()

    for name, g in jax.grad(merged)(params).items():
        expected = jax.grad(lambda params: adapted(params, X).sum())(params)[name]
        np.testing.assert_allclose(g, expected, rtol=1e-4, atol=1e-4)


def rule(**fields):
    return QtRule(**INT8, **fields)


REFUSED = {
    "emulated gradients": (
        lambda: QtProvider([rule(bwd_qtype="int8")], emulate=True),
        "emulate=True.*this rule quantizes gradients. Leave emulate out, or bwd_qtype",
    ),
    "an emulated gradient": (
        lambda: QtProvider([rule(additional_qt_config={"drhs_grad_qtype": "int8"})], emulate=True),
        "this rule quantizes gradients",
    ),
    "scale types of a layer": (
        lambda: fewbit.training.DotGeneral(rule(scale_dtype="bfloat16")),
        "scale_dtype='bfloat16' is for weights as they are stored",
    ),
    "a hook of a rule": (
        lambda: rule(additional_qt_config={"rhs_collect_quant_stat": lambda c: c}),
        r"\['rhs_collect_quant_stat'\].*Write act_static_scale=True",
    ),
    "a float weight": (
        lambda: trained(additional_qt_config={"rhs_qtype": None}, **INT8)(PARAMS, X),
        r"\['rhs_qtype'\] is None, which would leave the parameter 'w' float. Write weight_qtype",
    ),
    "a delayed operand": (
        lambda: rule(additional_qt_config={"lhs_calibration_method": "delayed"}),
        "Write act_calibration_method .*='delayed' in the rule instead",
    ),
    "a delayed gradient": (
        lambda: rule(additional_qt_config={"dlhs_grad_calibration_method": "delayed,4"}),
        "Write bwd_calibration_method='delayed,4' in the rule instead",
    ),
    "histories of nothing": (
        lambda: fewbit.to_ptq(trained(**INT8), PARAMS, None, X, amax_history={"a": 1}),
        "got an amax_history, but no rule",
    ),
    "a word for pack": (
        lambda: fewbit.to_ptq(trained(**INT8), PARAMS, None, X, pack="yes"),
        "to_ptq: pack must be True or False, got 'yes'",
    ),
    "no config": (
        lambda: fewbit.dot_general_qt(X, PARAMS["w"], (((1,), (0,)), ((), ())), None),
        "dot_general_qt is configured by a DotGeneralQtConfig, got None",
    ),
    "a config of an einsum": (lambda: einsum_qt("bd,df->bf", X, PARAMS["w"], {}), "got {}"),
    "one delayed, one not": (
        lambda: fewbit.models.delayed.serving_rule(
            rule(
                act_calibration_method="delayed,4",
                additional_qt_config={"lhs_calibration_method": "absmax"},
            )
        ),
        "static ranges for all activations of a rule or for none. Give these products a rule each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_act_is_refused(case):
    call, text = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=text):
        call()
